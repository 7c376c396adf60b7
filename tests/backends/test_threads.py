"""CPU kernels with several threads: shares of the work, shared memory."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.kernels import CHUNK, check_parity, flag, mixed
from support.processes import threads

from ampfast import functional


def twice(size: int) -> list[torch.Tensor]:
    """Multiplied twice."""
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(2))
    between = torch.ones(16 * CHUNK)
    return [gradient, between, gradient, between.clone(), gradient.view(-1)]


def overlapping(size: int) -> list[torch.Tensor]:
    base = torch.randn(2 * size, generator=torch.Generator().manual_seed(3))
    return [base[:size], base[size // 2 : size + size // 2], base[1::2], base[size - 1 :]]


LISTS = {
    "mixed": partial(mixed, lambda _: 16 * CHUNK),
    **{f"twice {size}": partial(twice, size) for size in (3, CHUNK + 1, 9 * CHUNK + 5)},
    **{f"overlapping {size}": partial(overlapping, size) for size in (100, 17 * CHUNK)},
}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", LISTS)
def test_thread_counts_write_the_same_bits(capability: str, name: str, count: int) -> None:
    with threads(count):
        check_parity(LISTS[name], 1 / 3)
        grads = LISTS[name]()
        grads[-1][-1] = math.inf
        functional.check_(grads, found := flag())
        assert found.item() == 1.0
