"""Kernels over pairs of 16-bit and float32 tensors, against torch's arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from device_parity import KERNELS, assert_same_memory, every_16_bit_value, guarded, normal, offsets
from support.comparison import assert_same
from support.kernels import (
    exact_bits,
    flag,
    grads_of,
    random_bits,
    run_check,
    run_sums,
    run_unscale,
    wide,
    window,
)
from support.models import kinds_in, marked, marks_of, track_for

pytestmark = pytest.mark.usefixtures("watched")

HALVES = (torch.float16, torch.bfloat16)
FACTORS = (1 / 3, 2.0**-16, 3.0, 2.0**100, -0.75, 0.0, 1.0, 2.0**-149, math.inf, math.nan)

dtypes = pytest.mark.parametrize("dtype", HALVES, ids=str)


def phased(half: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """NaN between guard bands, in the phase of another tensor or out of it."""
    phase = half.data_ptr() % 16 // half.itemsize % 4 + shift
    return guarded(torch.full((half.numel(),), math.nan), phase % 4)


def check_widens(halves: list[torch.Tensor], factor: float, shift: int = 0) -> None:
    before = [exact_bits(half) for half in halves]
    floats = [phased(half, shift) for half in halves]
    theirs = [phased(half, shift) for half in halves]
    for target, half in zip(theirs, halves, strict=True):
        target.copy_(half.float() * flag(factor))
    found = run_unscale(KERNELS, grads_of(halves, floats), flag(factor), is_scale=False)
    assert found.item() == float(any(not t.isfinite().all() for t in theirs))
    assert_same_memory(floats, theirs)
    for half, bits in zip(halves, before, strict=True):
        assert torch.equal(exact_bits(half), bits), "a 16-bit gradient was written"


@dtypes
@pytest.mark.parametrize("factor", FACTORS)
def test_every_value_is_widened(dtype: torch.dtype, factor: float) -> None:
    every = every_16_bit_value(dtype)
    check_widens([guarded(every, 1)], factor)
    finite = every[every.isfinite()]
    check_widens([guarded(finite, 3)], factor)


@dtypes
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
@pytest.mark.usefixtures("few_chunks")
def test_sizes_and_addresses(dtype: torch.dtype, shift: int) -> None:
    one = window(dtype)
    sizes = [*range(1, 20), one - 1, one, one + 1, 3 * one + 5]
    for offset in offsets(dtype):
        check_widens([guarded(normal(n, dtype, n), offset) for n in sizes[offset::3]], 1 / 3, shift)


@dtypes
def test_beside_gradients_without_pair(dtype: torch.dtype) -> None:
    grads = [guarded(normal(n, dtype, n), 1) for n in (5, 9, 3)]
    grads += [guarded(normal(7, torch.float32)), guarded(normal(6, dtype))]
    floats = [phased(grads[0]), None, phased(grads[2]), None, None]
    products = [g.float() * flag(1 / 3) for g in grads]
    pairs = grads_of(grads, floats)
    assert run_unscale(KERNELS, pairs, flag(1 / 3), is_scale=False).item() == 0
    for grad, values, product in zip(grads, floats, products, strict=True):
        assert_same(*((grad, product.to(grad.dtype)) if values is None else (values, product)))
    # Pairs are written where nothing changes, too, before gradients that are then not read.
    grads[0][2] = math.inf
    found = run_unscale(KERNELS, pairs, flag(1.0), is_scale=False, coefficient=wide(1.0))
    assert found.item() == 1
    finite = grads_of([guarded(normal(5, torch.float32, 3), 1)])
    assert run_check(KERNELS, finite).item() == 0


@dtypes
def test_marks_norms_and_coefficients(dtype: torch.dtype) -> None:
    grads = [guarded(normal(n, dtype, n), n % 8) for n in (5, window(dtype) + 3, 40)]
    floats = [phased(grad) for grad in grads]
    pairs, products = grads_of(grads, floats), [g.float() * flag(0.1) for g in grads]
    sums = torch.empty(2, dtype=torch.float64)
    run_sums(KERNELS, pairs, flag(0.1), is_scale=False, sums=sums)
    squares = sum(p.double().square().sum().item() for p in products)
    assert sums[0].item() == pytest.approx(squares, rel=33 * 2.0**-24)
    assert sums[1].item() == max(p.abs().max().item() for p in products)  # not rounded to 16 bits
    assert all(f.isnan().all() for f in floats), "norms are only read"

    found = run_unscale(KERNELS, pairs, flag(0.1), is_scale=False, coefficient=wide(1 / 3))
    assert found.item() == 0
    assert_same(floats, [p * flag(1 / 3) for p in products])

    grads[1][-1], grads[2][0] = math.inf, math.nan
    track = track_for(3)
    run_unscale(KERNELS, pairs, flag(0.5), is_scale=False, track=track)
    assert marked(track) == [False, True, True]
    assert kinds_in(track) == marks_of(grads)


@dtypes
@pytest.mark.parametrize("found", [None, 0.0, -0.0, 1.0, math.nan])
def test_narrow(dtype: torch.dtype, found: float | None) -> None:
    values = torch.cat([random_bits(9_000, torch.float32, 7), torch.tensor(SPECIAL)])
    for offset, shift in ((0, 0), (1, 0), (3, 1), (7, 2)):
        for size in (values.numel(), 1, 7, 8, 9, 4096, 4097):
            half = guarded(torch.zeros(size, dtype=dtype), offset)
            floats = phased(half, shift)
            floats.copy_(values[-size:])
            expected = guarded(torch.zeros(size, dtype=dtype), offset)
            if found is None or found == 0:
                expected.copy_(floats)
            before = exact_bits(floats)
            KERNELS.narrow(grads_of([half], [floats]), None if found is None else flag(found))
            assert_same_memory([half], [expected])
            assert torch.equal(exact_bits(floats), before)


# Ties of both formats, the limits of their exponents, subnormals, infinities, NaN.
SPECIAL = [
    *(1 + 2.0**-9, 1 + 3 * 2.0**-9, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-9),
    *(65504.0, 65519.996, 65520.0, -65520.0, 3.3895314e38, 3.4028235e38, -3.4028235e38),
    *(2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14, 2.0**-126, 2.0**-133, 2.0**-134, 2.0**-149),
    *(0.0, -0.0, math.inf, -math.inf, math.nan),
]
