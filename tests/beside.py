"""Test processes that run beside the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launchers import VARIABLE

TESTS = Path(__file__).parent


class Process:
    """pytest process, with interpreted kernels by default.

    It runs at low priority, as tests with several ranks wait for each other all the time. On Linux
    it ends with its parent process, however that ends.
    """

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        self._log = log
        wrappers = (["nice"], ["setpriv", "--pdeathsig", "TERM"])
        first = [word for words in wrappers if shutil.which(words[0]) for word in words]
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        with open(log, "wb") as stream:
            self._process = subprocess.Popen(
                [*first, *pytest, *arguments],
                cwd=TESTS.parent,
                env={**os.environ, "TRITON_INTERPRET": "1", VARIABLE: "", **environment},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        return self._process.wait()

    def check(self) -> None:
        """Fails with the log unless its tests passed."""
        code = self.wait()
        assert code == 0, self._log.read_text(errors="replace")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Run:
    """Tests for one process.

    Attributes:
        name: Name of the test that waits for the process.
        paths: Files and folders of tests/.
        environment: As for `Process`.
    """

    name: str
    paths: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Queue:
    """Queue of processes, run one after another."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._waiting = list(runs)
        self._started: dict[str, Process] = {}

    def go_on(self) -> None:
        """Starts the next process if none is running."""
        if self._waiting and all(process.has_ended for process in self._started.values()):
            run = self._waiting.pop(0)
            log = Path(self._folder.name, run.name)
            paths = [str(TESTS / path) for path in run.paths]
            self._started[run.name] = Process(log, *paths, **run.environment)

    def check(self, run: Run) -> None:
        """Waits for a process and fails with its log unless its tests passed."""
        while run.name not in self._started:
            for process in self._started.values():
                process.wait()
            self.go_on()
        self._started[run.name].check()

    def end(self) -> None:
        for process in self._started.values():
            process.end()
        self._folder.cleanup()
