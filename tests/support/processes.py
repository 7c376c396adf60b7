"""Threads of torch, and whether a process runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs a block with this many torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_alive(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
