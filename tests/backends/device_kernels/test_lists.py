"""Kernels against torch's op: sizes, addresses and values; those of the CPU without others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from support.comparison import BITS, FLOATS, assert_same
from support.kernels import (
    CHUNK,
    CPU_KERNELS,
    Make,
    assert_same_memory,
    exact_bits,
    flag,
    grads_of,
    guarded,
    inverse_of,
    last_finite,
    mixed,
    non_finite,
    normal,
    offsets,
    random_bits,
    run_check,
    run_sums,
    run_unscale,
    torch_unscaled,
    wide,
    window,
)
from support.models import check_times

try:
    from launched import KERNELS
except pytest.skip.Exception:
    KERNELS = CPU_KERNELS
IS_CPU = KERNELS is CPU_KERNELS

pytestmark = pytest.mark.usefixtures("capability" if IS_CPU else "watched")

FACTORS = (1 / 3, 2.0**-16, 3.0, 2.0**10, -0.75, 0.0, math.inf, math.nan, 1.0)
# The reciprocals of the last four are infinite, zero, subnormal and inexact.
SCALES = (3.0, 2.0**16, 1e-3, 2.0**-128, 0.0, math.inf, math.nan, 3e38, 65537.0)
# Fewer of what is emulated or interpreted.
SMALL = range(71) if IS_CPU else range(1, 10)
EDGES = (1, 8, 17, 33, 70) if IS_CPU else (3,)


def share(dtype: torch.dtype) -> int:
    """Elements of a chunk of a thread of the CPU, or of a window of a device."""
    return CHUNK if IS_CPU else window(dtype)


def places(dtype: torch.dtype) -> range:
    """Offsets in elements; vectors of the CPU have up to 64 bytes."""
    return range(16) if IS_CPU else offsets(dtype)


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def quotients(grads: Sequence[torch.Tensor], divisor: float) -> list[torch.Tensor]:
    """Quotients as fused optimizers divide: 16-bit gradients in float32."""
    wide = [g if g.dtype == torch.float64 else g.float() for g in grads]
    return [g / flag(divisor).to(g.dtype) for g in wide]


def check_reads(make: Make, divisors: Sequence[float] = ()) -> None:
    """Checks gradients and their quotients by each divisor; nothing may be written."""
    grads = make()
    before = [exact_bits(g) for g in grads]
    table = grads_of(grads)
    assert run_check(KERNELS, table).item() == non_finite(grads)
    for divisor in divisors:
        found = run_check(KERNELS, table, flag(divisor)).item()
        assert found == non_finite(quotients(grads, divisor)), divisor
    for gradient, bits in zip(grads, before, strict=True):
        assert torch.equal(exact_bits(gradient), bits), "a check wrote"


def check_unscales(make: Make, factor: float, *, is_scale: bool = False) -> None:
    """Unscales copies of the same gradients here and in torch and compares all memory."""
    theirs, expected = torch_unscaled(make, inverse_of(factor) if is_scale else factor)
    ours = make()
    found = run_unscale(KERNELS, grads_of(ours), flag(factor), is_scale=is_scale)
    assert found.shape == () and found.dtype == torch.float32
    assert_same_memory(ours, theirs)
    assert found.item() == expected


@pytest.mark.parametrize("factor", [1 / 3, 1.0] if IS_CPU else [1 / 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_small_sizes_at_every_offset(dtype: torch.dtype, factor: float) -> None:
    def make() -> list[torch.Tensor]:
        return [guarded(normal(n, dtype, n), o) for n in SMALL for o in places(dtype)]

    check_unscales(make, factor)
    check_reads(make, [3.0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("beyond", ["-1", "0", "+1", "2x+3"])
def test_sizes_around_a_share_at_every_offset(dtype: torch.dtype, beyond: str) -> None:
    one = share(dtype)
    size = {"-1": one - 1, "0": one, "+1": one + 1, "2x+3": 2 * one + 3}[beyond]

    def make() -> list[torch.Tensor]:
        return [guarded(normal(size, dtype, o), o) for o in offsets(dtype)]

    check_unscales(make, 1 / 3)
    check_unscales(make, 3.0, is_scale=True)
    check_reads(make, [3.0])
    # Alone, as a program's first and last tensor and window.
    for offset in (0, 1):
        check_unscales(lambda offset=offset: [guarded(normal(size, dtype), offset)], 1 / 3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bad_value_at_the_edges(dtype: torch.dtype) -> None:
    """And everywhere in short tensors."""
    one, bads = share(dtype), itertools.cycle((-math.inf, math.nan, math.inf))
    for size, offset in (*((size, 1) for size in EDGES), (one + 2, 1), (2 * one + 3, 0)):
        edges = {0, 1, size // 2, size - 2, size - 1, one - 1 - offset, one - offset}
        for place in range(size) if size < 99 else sorted(edges):
            gradient = guarded(normal(size, dtype), offset)
            gradient[place] = next(bads)

            def make(gradient: torch.Tensor = gradient, offset: int = offset) -> list:
                copy = guarded(gradient, offset)
                return [guarded(normal(5, dtype)), copy, guarded(normal(3, dtype))]

            check_unscales(make, 0.25)
            check_reads(make, [4.0])


@pytest.mark.parametrize("programs", [1, 2, 3, 1000])
def test_grid_sizes(programs: int, limit_programs: Callable[[int], None]) -> None:
    limit_programs(programs)
    check_unscales(mixed, 1 / 3)
    check_unscales(mixed, 3.0, is_scale=True)
    check_reads(mixed, [3.0])
    total = sum(1 for g in mixed() if g.numel())
    # Where programs take several chunks, in turn.
    for bad in range(total if programs in (2, 3) else 0):

        def make(bad: int = bad) -> list[torch.Tensor]:
            grads = mixed()
            [g for g in grads if g.numel()][bad][-1] = math.nan
            return grads

        check_reads(make)


@pytest.mark.parametrize(
    ("factor", "is_scale"), [*((f, False) for f in FACTORS), *((s, True) for s in SCALES)]
)
def test_mixed_dtypes(factor: float, is_scale: bool) -> None:
    check_unscales(mixed, factor, is_scale=is_scale)
    check_unscales(lambda: mixed()[::-1], factor, is_scale=is_scale)
    check_reads(mixed, [factor])


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values(dtype: torch.dtype, factor: float) -> None:
    """All of 16 bits, or random ones; then those that stay finite, whose flag must stay 0."""
    values = every_16_bit_value(dtype) if dtype.itemsize == 2 else random_bits(20_000, dtype, 3)
    written, _ = torch_unscaled(lambda: [values.clone()], factor)
    for chosen in (values, values[values.isfinite()], values[written[0].isfinite()]):
        if chosen.numel():
            check_unscales(lambda chosen=chosen: [guarded(chosen, 1)], factor)
            check_reads(lambda chosen=chosen: [guarded(chosen, 1)], [factor])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inverse", [1.0000001, 1.5, 1000.1, 2.0**40, 2.0**127])
def test_overflow_to_the_last_bit(dtype: torch.dtype, inverse: float) -> None:
    last = last_finite(dtype, inverse)
    for bits, expected in ((last, 0.0), (last + 1, 1.0)):
        value = torch.tensor([bits], dtype=BITS[dtype]).view(dtype)
        for signed, place in itertools.product((value.item(), -value.item()), (0, 39, 43)):
            values = torch.zeros(44, dtype=dtype)
            values[place] = signed
            make = partial(lambda values: [guarded(values, 1)], values)
            assert torch_unscaled(make, inverse)[1] == expected
            check_unscales(make, inverse)
            # Quotients of 16 bits are not rounded to them.
            check_reads(make, [1 / inverse, 0.0, math.inf])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("coefficient", [0.5, 1 / 3, 0.9999, 1.0, 0.0])
def test_coefficient_multiplies_unscaled_values(dtype: torch.dtype, coefficient: float) -> None:
    def make() -> list[torch.Tensor]:
        values = random_bits(6000, dtype, 8)
        if dtype.itemsize == 2:
            values = every_16_bit_value(dtype)
        windows = [guarded(normal(window(dtype), dtype, o), o) for o in offsets(dtype)]
        return [guarded(values[values.isfinite()], 1), *windows]

    theirs, expected = torch_unscaled(make, 1 / 3)
    for gradient in theirs:
        values = gradient if dtype == torch.float64 else gradient.float()
        gradient.copy_((values * wide(coefficient).to(values.dtype)).to(dtype))
    ours = make()
    found = run_unscale(
        KERNELS, grads_of(ours), flag(1 / 3), is_scale=False, coefficient=wide(coefficient)
    )
    assert_same_memory(ours, theirs)
    assert found.item() == expected
    # It does not decide.
    for factor, bad in ((0.0, math.inf), (0.5, math.nan), (math.inf, 2.0), (math.nan, 2.0)):
        grads = grads_of([torch.tensor([1.0, bad], dtype=dtype)])
        found = run_unscale(KERNELS, grads, flag(1.0), is_scale=False, coefficient=wide(factor))
        assert found.item() == (bad != 2.0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_norms_of_bad_values(dtype: torch.dtype, bad: float) -> None:
    for place in (0, 700, -1):
        gradient = normal(share(dtype) + 9, dtype)
        gradient[place] = bad
        for grads in ([gradient], [torch.ones(3), gradient], [gradient, torch.ones(3)]):
            sums = torch.empty(2, dtype=torch.float64)
            table = grads_of(grads)
            assert run_sums(KERNELS, table, flag(0.5), is_scale=False, sums=sums).item() == 1.0
            assert_same(sums, torch.full((2,), abs(bad), dtype=torch.float64))


@pytest.mark.parametrize("tensors", [224, 225])
def test_lists_in_the_arguments_of_a_launch_and_beyond(tensors: int) -> None:
    """Before their table is uploaded and after."""
    grads = [torch.full((3,), 64.0 + i) for i in range(tensors)]
    expected = [grad / 64 for grad in grads]
    grads[-1][2] = torch.inf
    table = grads_of(grads)
    for _ in range(6):
        assert run_unscale(KERNELS, table, flag(0.5), is_scale=False).item() == 1.0
    assert grads[-1][2] == torch.inf
    grads[-1][2] = expected[-1][2]
    assert_same(grads, expected)
    assert run_check(KERNELS, table).item() == 0.0


def test_a_step_counts_once() -> None:
    check_times(KERNELS, torch.device("cpu"), 3 * share(torch.float32) + 1)
