"""Tracking in the kernels, against plain comparisons."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_parity import CPU, KERNELS, guarded, offsets
from support.comparison import FLOATS
from support.kernels import window
from support.models import check_passes, check_random_lists, check_times

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


def test_a_step_counts_once() -> None:
    check_times(KERNELS, CPU, 3 * window(torch.float32) + 1)
