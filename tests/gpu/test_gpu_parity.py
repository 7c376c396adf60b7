"""Kernels on a GPU against torch's op, bit for bit: sizes, addresses, dtypes and values."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from batches import KINDS, random_batch, run_batch
from gpu_support import kernels_of
from support import models
from support.comparison import FLOATS, assert_same
from support.gradients import make_gradient
from support.kernels import flag, grads_of, inverse_of, run_check, run_sums, run_unscale, window
from support.models import marked, track_for

from ampfast import _C

LISTS = 10_000
LISTS_PER_BATCH = 100
# Factors and divisors; the reciprocals of some are infinite, zero, subnormal or inexact.
FACTORS = (1 / 3, 2.0**-16, 3.0, 2.0**10, -0.75, 1.0, 65537.0, 2.0**-128, 1e-3, 3e38, 0.0)
WORSE = (math.inf, math.nan)
HALVES = (torch.float16, torch.bfloat16)


def test_ten_thousand_random_lists(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    for seed in range(LISTS // LISTS_PER_BATCH):
        chance = random.Random(f"batch {seed}")
        run_batch(
            kernels,
            random_batch(seed, LISTS_PER_BATCH),
            device,
            # Lists of random bits are nearly always bad, so they are few.
            kind=KINDS[2] if seed % 10 == 9 else KINDS[seed % 2],
            factor=chance.choice(WORSE if seed % 25 == 24 else FACTORS),
            is_scale=chance.random() < 0.5,
            seed=seed,
        )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ten_thousand_tensors(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    chance = random.Random(5)
    views = [(dtype, 1, chance.randint(1, 700)) for _ in range(10_000)]
    views[77] = (dtype, 1, 3 * window(dtype) + 1)
    how: Any = {"kind": "normal", "factor": 1 / 3, "is_scale": False, "seed": 1}
    for bad in (0.0, 1e-3):
        run_batch(kernels_of(backend, device), [views], device, **how, bad=bad)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("factor", [*FACTORS, *WORSE])
def test_all_values_of_16_bits(
    backend: str, device: torch.device, dtype: torch.dtype, factor: float
) -> None:
    kernels = kernels_of(backend, device)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for is_scale in (False, True):
        expected = every.clone()
        inverse = torch.tensor(inverse_of(factor) if is_scale else factor)
        torch._amp_foreach_non_finite_check_and_unscale_([expected], torch.zeros(()), inverse)
        # Each value alone, too, for its own flag.
        for views, track in ((1, None), (2**16, track_for(2**16, device=device))):
            ours = every.to(device)
            grads = grads_of(list(ours.split(2**16 // views)))
            run_unscale(kernels, grads, flag(factor, device), is_scale=is_scale, track=track)
            assert_same(ours.cpu(), expected, f"in {views} views")
            assert track is None or marked(track) == (~expected.isfinite()).tolist()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_have_the_same_bits_on_every_grid(
    backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Of chunks of one window and of several."""
    kernels = kernels_of(backend, device)
    generator = torch.Generator(device).manual_seed(5)
    try:
        for numel in (300_001, 40_000_003):
            values = torch.randn(numel, generator=generator, device=device).to(dtype)
            tensors, seen = [values[1:], values[:7].clone(), values[:4096].clone()], []
            for programs in (0, 1, 2, 3, 131, 1_000, 4_096):
                kernels.launcher.limit_programs(programs)
                # Poisoned, since the last program must assign them.
                sums = torch.full((2,), math.nan, dtype=torch.float64, device=device)
                run_sums(kernels, grads_of(tensors), flag(0.1, device), is_scale=False, sums=sums)
                seen.append(sums.tolist())
            assert all(each == seen[0] for each in seen), seen
            # float32 sums over a window's few hundred squares per thread, then float64.
            exact = sum(float(each.double().mul(0.1).square().sum()) for each in tensors)
            assert seen[0][0] == pytest.approx(exact, rel=1e-5)
    finally:
        kernels.launcher.limit_programs(0)


def test_marks_and_scales_are_those_of_the_models(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    models.check_random_lists(kernels, device, range(60))
    models.check_times(kernels, device)
    for limits in models.LIMITS:
        models.check_limits(kernels, device, limits)


def test_more_elements_than_32_bits_count(backend: str, device: torch.device) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 7 * 2**30:
        pytest.skip(f"needs 7 GiB of free memory, there are {free / 2**30:.1f}")
    kernels = kernels_of(backend, device)
    piece, count = 2**26, 2**31 + 12_345
    pattern = make_gradient("long", torch.float16)[:65_536].to(device).repeat(piece // 65_536)
    grad = torch.empty(count, dtype=torch.float16, device=device)
    for part in grad.split(piece):
        part.copy_(pattern[: part.numel()])
    expected = (pattern.float() * flag(1 / 3, device)).half()
    found = run_unscale(kernels, grads_of([grad]), flag(1 / 3, device), is_scale=False)
    assert found.item() == 0.0
    for number, part in enumerate(grad.split(piece)):
        same = torch.equal(part.view(torch.int16), expected[: part.numel()].view(torch.int16))
        assert same, f"piece {number}"
    for place in (-1, 2**31, 2**31 - 1, count - 4096):
        kept = grad[place].clone()
        grad[place] = math.inf
        assert run_check(kernels, grads_of([grad])).item() == 1.0, place
        grad[place] = kept
    assert run_check(kernels, grads_of([grad])).item() == 0.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reads_of_watched_tensors(device: torch.device, dtype: torch.dtype) -> None:
    reads = _C.Reads(lambda: None)
    for size, offset, bad in itertools.product(
        (1, 4097, 70_001, 30_000_001), (0, 1, 3), (0.0, math.inf, -math.inf, math.nan)
    ):
        values = torch.randn(size + offset, device=device).to(dtype)[offset:]
        values[size // 2] = bad
        [number] = reads.values_of(values)
        kept, _, tables = reads.so_far()
        found, _ = kept[number]
        assert found is not None
        row = torch.cat(tables)[found]
        largest = values.abs().max().double()
        assert_same(row[:1], largest.reshape(1), f"{size} values at {offset}")
