"""Tracking parity of every backend's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampfast.backends.core import Factor, Pass, Track
from support.comparison import FLOATS
from support.kernel_calls import grads_of
from support.kernel_parity import flag, storage
from support.tracking_reference import (
    assert_surroundings_kept,
    marks_of,
    random_list,
    track_for,
)


def copies(grads: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies at the same offsets to a 16-byte boundary."""
    memories = [storage(grad).to(device, copy=True) for grad in grads]
    places = [(grad.storage_offset(), grad.numel()) for grad in grads]
    return [memory.narrow(0, *place) for memory, place in zip(memories, places, strict=True)]


def widened(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [g if g.dtype == torch.float64 else g.float() for g in grads]


def tracked(work: Pass, track: Track) -> Pass:
    return work._replace(marks=track.marks, now=track.now)


def check_passes(kernels: Any, make: Sequence[torch.Tensor], device: torch.device) -> None:
    """Compares marks of every kind of pass, and results with and without tracking."""
    count = len(make)
    inverse, divisor = 1.5, 0.75

    def run(name: str, used: Sequence[torch.Tensor], work: Pass) -> None:
        expected = marks_of(used, 4)
        plain = copies(make, device)
        found = kernels.run(grads_of(plain), work).item()
        grads = copies(make, device)
        track = track_for(count, step=4, device=device)
        assert kernels.run(grads_of(grads), tracked(work, track)).item() == found, name
        assert track.marks.tolist() == expected, name
        assert_surroundings_kept(track)
        for ours, theirs in zip(grads, plain, strict=True):
            same = (ours == theirs) | (ours.isnan() & theirs.isnan())
            assert same.all(), f"{name}: another result"

    run("raw", make, Pass(False, Factor.NONE))
    quotients = [g / divisor for g in widened(make)]
    run("divided", quotients, Pass(False, Factor.DIVIDE, flag(divisor).to(device)))
    written = [(w * inverse).to(g.dtype) for w, g in zip(widened(make), make, strict=True)]
    factor = flag(inverse).to(device)
    run("unscaled", written, Pass(True, Factor.TIMES, factor))
    scale = flag(4.0).to(device)
    run("scaled", [g / 4 for g in make], Pass(True, Factor.TIMES_RECIPROCAL, scale))
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    run("norms", written, Pass(False, Factor.TIMES, factor, sums=sums))


def check_random_lists(kernels: Any, device: torch.device, seeds: range) -> None:
    for seed in seeds:
        dtypes = FLOATS if seed % 2 else FLOATS[seed // 2 % 4 :][:1]
        grads = random_list(seed, dtypes)
        if any(g.numel() for g in grads):
            check_passes(kernels, grads, device)


def check_times(kernels: Any, device: torch.device, elements: int = 70_000) -> None:
    """A step counts once in any number of passes, with the kind found by the last one."""
    track = track_for(2, device=device)
    check = tracked(Pass(False, Factor.NONE), track)
    good, bad = torch.ones(elements, device=device), torch.ones(elements, device=device)
    for step, value in ((0, torch.inf), (1, 1.0), (2, torch.nan), (5, -torch.inf), (6, 1.0)):
        track.now.fill_(step)
        bad.fill_(value)
        for _ in range(3):
            kernels.run(grads_of([good, bad]), check)
    assert track.marks.tolist() == [[0, 0, 0, 0], [6, 3, 3, 1]]
    # First infinities, then NaN in the same step, which makes it a step with NaN.
    track.now.fill_(7)
    for value in (torch.inf, torch.nan, torch.inf):
        bad.fill_(value)
        kernels.run(grads_of([bad, good]), check)
    assert track.marks.tolist() == [[8, 8, 1, 1], [6, 3, 3, 1]]
