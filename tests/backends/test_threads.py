"""CPU kernels with several threads: shares of the work, shared memory, forks."""

from __future__ import annotations

import math
import os
from functools import partial

import pytest
import torch
from support.kernels import CHUNK, check_parity, flag, mixed
from support.processes import python, threads

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


FORK = """
import os, torch
from ampfast import functional
torch.set_num_threads(2)
grads = [torch.ones(2_000_000)]
def flag():
    found_inf = torch.zeros(())
    functional.check_(grads, found_inf)
    return found_inf.item()
torch.ones(10_000_000).sum()  # starts the threads, none of which outlives the fork
child = os.fork()
if child == 0:
    grads[0][-1] = float("inf")
    os._exit(0 if flag() == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_does_not_wait_for_threads_that_it_lacks() -> None:
    done = python("-c", FORK)
    assert done.returncode == 0, done.stderr
