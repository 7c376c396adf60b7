"""The examples run, and give the same with both scalers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


def last_line(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, FOLDER / name, *arguments],
        cwd=FOLDER.parent,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_digits() -> None:
    pytest.importorskip("sklearn")
    short = ("--epochs", "1", "--device", "cpu")
    theirs = last_line("digits.py", "--scaler", "torch", *short)
    assert theirs.startswith("accuracy ")
    assert last_line("digits.py", "--scaler", "ampfast", *short) == theirs
    assert last_line("digits.py", "--scaler", "ampfast", "--together", *short) == theirs
