"""Every file of code has one subject, which is seldom more than 400 lines long."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("ampfast", "benchmarks", "csrc", "docs", "examples", "tests")
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".py", ".pyi"}
MOST_LINES = 400

# What is better whole, and why.
WHOLE = {
    "tests/programs.py": "one class, whose methods are the operations of random programs",
}


def lengths() -> dict[str, int]:
    """The lines of every file of code, by its path."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in [*found, ROOT / "setup.py"]
        if path.suffix in SUFFIXES
    }


def test_no_file_is_long() -> None:
    long = {name: lines for name, lines in lengths().items() if lines > MOST_LINES}
    assert {name: lines for name, lines in long.items() if name not in WHOLE} == {}
    assert WHOLE.keys() <= long.keys(), "no longer long: need not be listed"
