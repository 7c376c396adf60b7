"""Tables of text, for reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# Longest table that is printed, in lines.
MOST_LINES = 40


def table(columns: dict[str, Callable[[Any], str]], rows: Sequence[Any]) -> list[str]:
    """Aligned columns: the first to the left, the others to the right."""
    shown = rows[:MOST_LINES]
    aligned: list[list[str]] = []
    for title, cell in columns.items():
        cells = [title, *map(cell, shown)]
        align = str.rjust if aligned else str.ljust
        aligned.append([align(text, max(map(len, cells))) for text in cells])
    lines = ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]
    more = len(rows) - len(shown)
    return [*lines, f"... and {more} more"] if more else lines
