"""Writing files whole: a reader sees the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Replaces a file's content, or makes the file; who is cut off leaves it as it was.

    Args:
        path: The file; its directory exists.
        text: Written as UTF-8, line ends as they are.

    Raises:
        OSError: If it cannot be written; then it is as it was.
    """
    # Named after the process, so that two that write at once do not trip over each other.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def require_writable(files: Iterable[Path], folders: Iterable[Path] = ()) -> None:
    """Raises OSError unless these files can be written, and others in these directories."""
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
    """Reason why a file could not be read or written, without its name."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
