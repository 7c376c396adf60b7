"""Atomic writes: a reader sees the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Replaces or creates a file; an interrupted write leaves it unchanged.

    Args:
        path: File in an existing directory.
        text: Written as UTF-8, with its line ends.

    Raises:
        OSError: If it cannot be written; then it is unchanged.
    """
    # Named by process, so that concurrent writes do not collide.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def require_writable(files: Iterable[Path], folders: Iterable[Path] = ()) -> None:
    """Raises OSError unless these files, and others in their directories, can be written."""
    files = list(files)
    for path in files:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory, not a file to write")
        if not path.parent.is_dir():
            raise NotADirectoryError(f"{path.parent} is not a directory")
    for folder in {*folders, *(path.parent for path in files)}:
        with tempfile.TemporaryFile(dir=folder):
            pass


def reason(error: Exception) -> str:
    """Reason of a failed read or write, without the file's name."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
