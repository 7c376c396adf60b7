"""CPU kernels over instruction sets: layouts, flags, norms and tracking."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.comparison import FLOATS
from support.gradients import WRITABLE_LAYOUTS, make_gradient, plant
from support.kernels import (
    CAPABILITIES,
    CHUNK,
    available_gibibytes,
    check_parity,
    exact_bits,
    flag,
    grads_of,
    norms,
    random_bits,
    reference_norms,
    wide,
)
from support.models import check_random_lists

from ampfast import _C, functional
from ampfast.backends import cpu
from ampfast.backends.core import Factor, Pass

CHUNK_SIZES = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)
# Relative tolerance of a sum of squares, whose terms are positive: roundings add up at most.
TOLERANCE = 64 * 2.0**-53


@pytest.mark.parametrize("inverse", [0.5, 1.0, 1 / 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", WRITABLE_LAYOUTS)
def test_layouts(capability: str, layout: str, dtype: torch.dtype, inverse: float) -> None:
    check_parity(lambda: [make_gradient(layout, dtype, seed) for seed in range(3)], inverse)
    if inverse == 0.5:
        for where, bad in itertools.product(("first", "middle", "last"), (math.inf, math.nan)):
            check_parity(
                lambda where=where, bad=bad: [
                    make_gradient("contiguous", dtype, 5),
                    plant(make_gradient(layout, dtype), where, bad),
                ],
                0.25,
            )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_nan_of_a_factor_is_rounded_away(capability: str, dtype: torch.dtype) -> None:
    # A sum of all bits and of what rounds them overflows.
    every = torch.tensor([2**31 - 1, -1], dtype=torch.int32).view(torch.float32)
    factors = [(nan, wide(1.0)) for nan in every]
    factors += [
        (flag(0.5), torch.tensor(nan, dtype=torch.int64).view(torch.float64))
        for nan in (-1, 2**63 - 1)
    ]
    for factor, coefficient in factors:
        grad = torch.full((70,), 2.0, dtype=dtype)
        cpu.run(grads_of([grad]), Pass(True, Factor.TIMES, factor, coefficient=coefficient))
        assert grad.isnan().all()


def test_found_inf_is_accumulated_never_reset(capability: str) -> None:
    for start in (0.0, 1.0, 2.0, 0.5):
        for bad in (1.0, math.inf):
            for call in (
                lambda g, f: functional.unscale_(g, f, flag(0.5)),
                functional.check_,
                lambda g, f: torch._amp_foreach_non_finite_check_and_unscale_(g, f, flag(0.5)),
            ):
                call([torch.tensor([1.0, bad])], found := flag(start))
                assert found.item() == (1.0 if bad == math.inf else start)


@pytest.mark.parametrize("inverse", [1.0, 2.0**-16, 1 / 3, 3.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms(capability: str, dtype: torch.dtype, inverse: float) -> None:
    for sizes in ((1,), (0,), (3, 0, 70), (CHUNK + 1, 5), (2 * CHUNK + 3,)):
        grads = [torch.randn(n + 1).to(dtype)[1:] for n in sizes]
        before = [exact_bits(g) for g in grads]
        squares, maximum = norms(grads, inverse)
        want_squares, want_maximum = reference_norms(grads, inverse)
        assert squares == pytest.approx(want_squares, rel=TOLERANCE, abs=0)
        # A written value, hence exact.
        assert maximum == want_maximum
        assert all(torch.equal(exact_bits(g), b) for g, b in zip(grads, before, strict=True))


def magnitudes(dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients around each power of two that a dtype has, with zeros, tiny values and a tail."""
    info, made = torch.finfo(dtype), []
    # Squares of float64 are not to overflow, or to be subnormal.
    least = max(round(math.log2(info.smallest_normal * info.eps)), -440)
    for power in range(least, min(round(math.log2(info.max)), 440), 3):
        generator = torch.Generator().manual_seed(power - least)
        values = (1 + torch.rand(1001, generator=generator, dtype=torch.float64)) * 2.0**power
        values[::7] = 0
        values[1::5] *= 2.0**-20
        made += [values.to(dtype), torch.full((17,), 2.0**power, dtype=dtype)]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("inverse", [1.0, 1 / 3, 2.0**-16, -(2.0**40)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_of_every_magnitude(
    capability: str, dtype: torch.dtype, inverse: float, flushes: bool
) -> None:
    for grad in magnitudes(dtype):
        values = grad.to(torch.promote_types(dtype, torch.float32))
        both = torch.cat([values, values * flag(inverse)]).abs()
        if flushes and ((both > 0) & (both < torch.finfo(values.dtype).smallest_normal)).any():
            continue  # may be zeros, as in torch
        want, _ = reference_norms([grad], inverse)
        torch.set_flush_denormal(flushes)
        try:
            squares, _ = norms([grad], inverse)
        finally:
            torch.set_flush_denormal(False)
        assert squares == pytest.approx(want, rel=TOLERANCE, abs=0), grad[:2]


def test_norms_of_zero_infinite_and_nan_products(capability: str) -> None:
    for size in (1, 5, 31, 32, 33, 300):
        grad = torch.full((size,), 2.0**-100)
        assert norms([grad], 0.0) == norms([grad * 0], 3.0) == (0.0, 0.0)
        assert norms([grad], 2.0**-60) == (0.0, 0.0)  # in float32, as `unscale_` writes it
        assert norms([grad], math.inf) == (math.inf, math.inf)
        assert all(math.isnan(norm) for norm in norms([grad], math.nan))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_have_the_same_bits_on_every_instruction_set(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: _C.use_baseline(False))
    lists = [[grad] for grad in magnitudes(dtype)]
    lists += [[torch.randn(n).to(dtype)] for n in (*range(100), 255, 256, 257, *CHUNK_SIZES)]
    every = random_bits(100_000, dtype, 5)
    lists.append([every[every.isfinite()]])
    seen = []
    for name in CAPABILITIES:
        _C.use_baseline(name == "baseline")
        seen.append([norms(grads, factor) for grads in lists for factor in (1.0, 1 / 3, 2.0**-16)])
    assert all(each == seen[0] for each in seen)


@pytest.mark.slow
@pytest.mark.sweep
def test_more_elements_than_int32_counts() -> None:
    try:
        free = available_gibibytes()
    except OSError:
        pytest.skip("free memory cannot be read on this system")
    if free < 12:
        pytest.skip(f"needs 12 GiB of free memory, {free:.1f} GiB are free")
    gradient = torch.ones(2**31 + 17, dtype=torch.bfloat16)
    functional.unscale_([gradient], found := flag(), flag(0.5))
    assert found.item() == 0.0
    for block in gradient.split(2**28):
        assert bool((block == 0.5).all())
    gradient[-1] = math.inf
    functional.check_([gradient], found)
    assert found.item() == 1.0
    assert norms([gradient[:-1]], 2.0) == (float(2**31 + 16), 1.0)


@pytest.mark.parametrize("start", range(0, 60, 10))
def test_marks_of_random_lists(capability: str, start: int) -> None:
    check_random_lists(cpu, torch.device("cpu"), range(start, start + 10))
