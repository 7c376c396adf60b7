"""Tracking in the kernels, against plain comparisons."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_parity import CPU, KERNELS, guarded, offsets, window
from support.comparison import FLOATS
from support.kernel_calls import grads_of, run_check, run_unscale
from support.kernel_parity import flag
from support.tracking_reference import (
    check_passes,
    check_random_lists,
    check_times,
    kinds_in,
    track_for,
)

pytestmark = pytest.mark.usefixtures("watched")


@pytest.mark.parametrize("programs", [1, 3, 100])
def test_random_lists(programs: int, limit_programs: Callable[[int], None]) -> None:
    limit_programs(programs)
    check_random_lists(KERNELS, CPU, range(3 * programs % 7, 3 * programs % 7 + 3))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_windows(dtype: torch.dtype) -> None:
    size = window(dtype)
    values = torch.randn(2 * size + 3, generator=torch.Generator().manual_seed(3)).to(dtype)
    values[::7] = 0.0
    grads = [guarded(values, 1), guarded(values[:size])]
    grads[0][-1], grads[1][0] = torch.inf, torch.nan
    for offset in offsets(dtype):
        # Bad values at either end, then a finite parameter without a mark.
        grads += [guarded(values[:n], offset) for n in (5, size, 5)]
        grads[-3][0], grads[-2][-1] = torch.nan, torch.inf
    check_passes(KERNELS, grads, CPU)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_infinite_factor_makes_no_nan_of_ones(dtype: torch.dtype) -> None:
    """Nor do threads without a value; of a NaN they do."""
    for factor, marks in ((0.0, [1, 0, 1, 0]), (torch.nan, [1, 1, 1, 1])):
        for write in (False, True):
            grads = grads_of([torch.ones(5, dtype=dtype), torch.ones(1, dtype=dtype)])
            track = track_for(2)
            if write:
                found = run_unscale(KERNELS, grads, flag(factor), is_scale=True, track=track)
            else:
                found = run_check(KERNELS, grads, flag(factor), track=track)
            assert found.item() == 1.0
            assert kinds_in(track) == [marks] * 2


def test_a_step_counts_once() -> None:
    check_times(KERNELS, CPU, 3 * window(torch.float32) + 1)
