"""Tracking by the CPU kernels, against plain comparisons."""

from __future__ import annotations

import pytest
import torch
from support.kernel_calls import grads_of
from support.tracking_reference import (
    check_passes,
    check_random_lists,
    check_times,
    marks_of,
    track_for,
    tracked,
)

from ampfast import _C
from ampfast.backends import cpu
from ampfast.backends.core import Factor, Pass

CPU = torch.device("cpu")
CHECK = Pass(False, Factor.NONE)


@pytest.mark.parametrize("start", range(0, 60, 10))
def test_random_lists(capability: str, start: int) -> None:
    check_random_lists(cpu, CPU, range(start, start + 10))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value(capability: str, dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    check_passes(cpu, [every, *every[::23].clone().split(1)], CPU)


def test_a_step_counts_once(capability: str) -> None:
    check_times(cpu, CPU)


def test_threads_do_not_change_marks() -> None:
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(n, generator=generator) for n in (5, 400_000, 3, 90_000)]
    grads[1][777], grads[3][-1] = torch.nan, torch.inf
    threads, grain = torch.get_num_threads(), _C.set_grain(1)
    found = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            track = track_for(len(grads))
            cpu.run(grads_of(grads), tracked(CHECK, track))
            found.append(track.marks.tolist())
    finally:
        torch.set_num_threads(threads)
        _C.set_grain(grain)
    assert found == [marks_of(grads)] * 3
