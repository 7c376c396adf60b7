"""Cache of compiled code, in the folder `PTX_EMULATOR_CACHE` or else in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["COMPILER", "SOURCES", "built"]

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
SOURCES = Path(__file__).with_name("src")


def _folder() -> Path:
    if given := os.environ.get("PTX_EMULATOR_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptx_emulator"


def built(name: str, files: Sequence[Path], settings: object, make: Callable[[Path], None]) -> Path:
    """Returns the folder filled by `make`, anew if a file or the settings have changed.

    Args:
        name: First part of the folder's name.
        files: Files that determine the result.
        settings: Object whose `repr` determines the result.
        make: Fills the empty folder it is given.
    """
    key = hashlib.sha256(repr((COMPILER, settings)).encode())
    for file in files:
        key.update(hashlib.sha256(file.read_bytes()).digest())
    folder = _folder() / f"{name}-{key.hexdigest()[:16]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            made = Path(unfinished) / "made"
            made.mkdir()
            make(made)
            # Another process may have finished first.
            with contextlib.suppress(OSError):
                made.rename(folder)
    return folder
