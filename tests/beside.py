"""A process that runs tests of its own, beside others or not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


class Process:
    """A pytest of its own in which kernels are interpreted, unless told otherwise.

    One that runs beside other tests leaves them the cores: those of several ranks wait for each
    other all the time.
    """

    def __init__(
        self, log: Path, *arguments: str, beside: bool = False, **environment: str
    ) -> None:
        self._log = log
        first = ["nice"] if beside and shutil.which("nice") else []
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        with open(log, "wb") as stream:
            self._process = subprocess.Popen(
                [*first, *pytest, *arguments],
                cwd=Path(__file__).parent.parent,
                env={**os.environ, "TRITON_INTERPRET": "1", **environment},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> int:
        return self._process.wait()

    def check(self) -> None:
        """Fails with what it said, unless its tests passed."""
        code = self.wait()
        assert code == 0, self._log.read_text(errors="replace")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
