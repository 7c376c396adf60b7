"""The table of registers in docs/kernels.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

# Its columns.
DOCUMENTED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
REGISTERS, THREADS, MOST_PROGRAMS = 65_536, 128, 16


def registers_table() -> dict[tuple[str, str], list[str]]:
    """Cells of each row, by backend and kernel."""
    text = PAGE.read_text().partition("<!-- registers:start -->\n")[2]
    rows = text.partition("<!-- registers:end -->")[0].splitlines()[2:]
    table = {}
    for row in rows:
        name, *found = [cell.strip() for cell in row.strip("|").split("|")]
        backend, _, kernel = name.partition(", ")
        table[backend, kernel] = found
    return table


def cells(registers: Sequence[int]) -> list[str]:
    """Registers and programs of a multiprocessor, as in the table."""
    programs = [min(MOST_PROGRAMS, REGISTERS // (THREADS * -(-r // 8) * 8)) for r in registers]
    return [f"{r}, {p}" for r, p in zip(registers, programs, strict=True)]
