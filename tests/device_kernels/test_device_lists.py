"""Kernels against torch's op: sizes, addresses, layouts and values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_parity import (
    CPU,
    KERNELS,
    Make,
    assert_same_memory,
    check_reads,
    check_unscales,
    every_16_bit_value,
    guarded,
    launch,
    mixed,
    normal,
    offsets,
    torch_unscaled,
    window,
)
from support.comparison import BITS, FLOATS, assert_same
from support.gradients import LAYOUTS, make_gradient
from support.kernel_calls import grads_of, run_check, run_sums, run_unscale
from support.kernel_parity import exact_bits, flag, last_finite, non_finite, random_bits, wide
from support.tracking_reference import marked, track_for

from ampfast import capture
from ampfast.backends import core

pytestmark = pytest.mark.usefixtures("watched")

FACTORS = (1 / 3, 2.0**-16, 3.0, 2.0**10, -0.75, 0.0, math.inf, math.nan, 1.0)
# The reciprocals of the last four are infinite, zero, subnormal and inexact.
SCALES = (3.0, 2.0**16, 1e-3, 2.0**-128, 0.0, math.inf, math.nan, 3e38, 65537.0)
IRREGULAR = ("every_other", "overlapping", "expanded")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_small_sizes_at_every_offset(dtype: torch.dtype) -> None:
    def make() -> list[torch.Tensor]:
        return [guarded(normal(n, dtype, n), o) for n in range(1, 10) for o in offsets(dtype)]

    check_unscales(make, 1 / 3)
    check_reads(make, [3.0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("beyond", ["-1", "0", "+1", "2x+3"])
def test_sizes_around_the_window_at_every_offset(dtype: torch.dtype, beyond: str) -> None:
    one = window(dtype)
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
    one, bads = window(dtype), itertools.cycle((-math.inf, math.nan))
    for size, offset in ((3, 1), (one + 2, 1), (2 * one + 3, 0)):
        places = {0, 1, size // 2, size - 2, size - 1, one - 1 - offset, one - offset}
        for place in sorted(p for p in places if 0 <= p < size):
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


@pytest.mark.usefixtures("few_chunks")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_chunks_of_several_windows(dtype: torch.dtype) -> None:
    one = window(dtype)
    for size in (2 * one, 2 * one + 3, 5 * one - 1):
        for offset in (0, 1, len(offsets(dtype)) - 1):

            def make(size: int = size, offset: int = offset) -> list[torch.Tensor]:
                return [guarded(normal(size, dtype), offset), guarded(normal(3, dtype))]

            check_unscales(make, 1 / 3)
            check_reads(make, [3.0])
            for place in (one - offset, 2 * one - offset - 1, size - 1):
                if place < size:

                    def bad(place: int = place, make: Make = make) -> list[torch.Tensor]:
                        grads = make()
                        grads[0][place] = math.nan
                        return grads

                    check_reads(bad)


@pytest.mark.parametrize("factor", FACTORS)
def test_mixed_dtypes(factor: float) -> None:
    check_unscales(mixed, factor)
    check_unscales(lambda: mixed()[::-1], factor)
    check_reads(mixed, [factor])


@pytest.mark.parametrize("scale", SCALES)
def test_inverse_is_taken_of_the_scale(scale: float) -> None:
    check_unscales(mixed, scale, is_scale=True)
    check_reads(mixed, [scale], raw=False)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_inverse_of_random_scales(dtype: torch.dtype) -> None:
    scales = torch.rand(10, generator=torch.Generator().manual_seed(4)) * 1e5
    for scale in scales.tolist():
        check_unscales(lambda: [guarded(normal(9, dtype))], scale, is_scale=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    if layout in IRREGULAR:
        assert core.list_of([make_gradient(layout, dtype)], CPU) is None
        return
    check_unscales(lambda: [make_gradient(layout, dtype, seed) for seed in range(2)], 1 / 3)
    check_reads(lambda: [make_gradient(layout, dtype, seed) for seed in range(2)])


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kernel variants compiled on first use, none of which has been launched."""
    module = getattr(launch, "_module", launch)
    if not hasattr(module, "_launched"):
        pytest.skip("these kernels are compiled with the core")
    monkeypatch.setattr(module, "_launched", {})
    return module


def eights(*dtypes: torch.dtype) -> list[torch.Tensor]:
    return [torch.full((3,), 8.0, dtype=dtype) for dtype in dtypes]


@pytest.mark.usefixtures("compiling")
def test_a_refused_capture_leaves_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    known, new = eights(torch.float32, torch.float64), eights(torch.float32, torch.bfloat16)
    scale = torch.tensor(4.0)
    run_unscale(KERNELS, grads_of(known), scale, is_scale=True)
    with monkeypatch.context() as captured:
        captured.setattr(capture, "is_capturing", lambda: True)
        run_unscale(KERNELS, grads_of(known), scale, is_scale=True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="its kernel is not compiled yet"):
                run_unscale(KERNELS, grads_of(new), scale, is_scale=True)
    assert [grad.tolist() for grad in known] == [[0.5] * 3] * 2
    assert [grad.tolist() for grad in new] == [[8.0] * 3] * 2
    run_unscale(KERNELS, grads_of(new), scale, is_scale=True)
    assert [grad.tolist() for grad in new] == [[2.0] * 3] * 2


def test_a_failed_compilation_leaves_all_gradients(
    compiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiling.INTERPRETED:
        pytest.skip("an interpreter compiles nothing")
    kernel = compiling.kernels.multi_tensor
    compile_ahead = kernel.warmup

    def no_bfloat16(*arguments: Any, **options: Any) -> Any:
        if str(options["DTYPE"]) == "bf16":
            raise RuntimeError("no compiler for bfloat16")
        return compile_ahead(*arguments, **options)

    grads, scale = eights(torch.float32, torch.bfloat16), torch.tensor(4.0)
    with monkeypatch.context() as broken:
        broken.setattr(kernel, "warmup", no_bfloat16)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no compiler for bfloat16"):
                run_unscale(KERNELS, grads_of(grads), scale, is_scale=True)
    assert [grad.tolist() for grad in grads] == [[8.0] * 3] * 2
    run_unscale(KERNELS, grads_of(grads), scale, is_scale=True)
    assert [grad.tolist() for grad in grads] == [[2.0] * 3] * 2


def test_nothing_is_launched_for_no_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "multi_tensor", lambda *_: pytest.fail("launched"))
    sums = torch.full((2,), math.nan, dtype=torch.float64)
    for grads in ([], [torch.ones(0), torch.ones(3, 0, dtype=torch.float16)]):
        assert run_check(KERNELS, grads_of(grads)).item() == 0.0
        assert run_unscale(KERNELS, grads_of(grads), flag(0.5), is_scale=False).item() == 0.0
        given = flag(1.0)
        assert run_check(KERNELS, grads_of(grads), found_inf=given) is given
        assert given.item() == 1.0
        run_sums(KERNELS, grads_of(grads), flag(2.0), is_scale=True, sums=sums)
        assert sums.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_16_bit_values(dtype: torch.dtype, factor: float) -> None:
    every = every_16_bit_value(dtype)
    check_unscales(lambda: [guarded(every, 1)], factor)
    check_reads(lambda: [guarded(every, 1)], [factor])
    # Without another bad result, so the flag must stay 0.
    written, _ = torch_unscaled(lambda: [every.clone()], factor)
    harmless = every[written[0].isfinite()]
    if harmless.numel():
        check_unscales(lambda: [guarded(harmless, 1)], factor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_each_16_bit_value_is_judged(dtype: torch.dtype) -> None:
    every = every_16_bit_value(dtype)
    # A tensor with marks of its own for each value at the limits of the exponent.
    bits = every.view(torch.int16).int() & 0x7FFF
    edge = torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(torch.int16).int()
    chosen = every[(bits - edge).abs() <= 40].view(-1, 1)
    track = track_for(len(chosen))
    assert run_check(KERNELS, grads_of(list(chosen.unbind())), track=track).item() == 1.0
    assert marked(track) == (~chosen.flatten().isfinite()).tolist()
    assert 0 < sum(marked(track)) < len(chosen)
    check_reads(lambda: [every[every.isfinite()].clone()])


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_random_bit_patterns(dtype: torch.dtype, factor: float) -> None:
    values = random_bits(20_000, dtype, 3)
    check_unscales(lambda: [guarded(values, 1)], factor)
    check_reads(lambda: [guarded(values, 1)], [factor])
    written, _ = torch_unscaled(lambda: [values.clone()], factor)
    harmless = values[written[0].isfinite()]
    if harmless.numel():
        check_unscales(lambda: [guarded(harmless, 1)], factor)
        check_reads(lambda: [guarded(harmless, 1)], [factor])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_subnormals_and_signs_of_zero(dtype: torch.dtype) -> None:
    patterns = torch.arange(-1024, 1024, dtype=torch.int64)
    smallest = (patterns % 2**11 + torch.tensor([0, -(2**63)])[:, None]).flatten()
    if dtype != torch.float64:
        sign = -(2 ** (8 * dtype.itemsize - 1))
        smallest = (patterns % 2**11 + torch.tensor([0, sign])[:, None]).flatten()
    values = smallest.to(BITS[dtype]).view(dtype)
    assert values.signbit().any() and (values == 0).sum() == 2
    for factor in (1.0, 0.5, 1 / 3, -0.75, 3.0, 0.0):
        check_unscales(lambda: [guarded(values)], factor)
    check_reads(lambda: [guarded(values)], [3.0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inverse", [1.5, 3.0, 2.0**10, 2.0**100])
def test_overflow_to_the_last_bit(dtype: torch.dtype, inverse: float) -> None:
    last = last_finite(dtype, inverse)
    for bits, expected in ((last, 0.0), (last + 1, 1.0)):
        value = torch.tensor([bits], dtype=BITS[dtype]).view(dtype)
        assert non_finite([value]) == 0.0
        for signed in (value, -value):

            def make(signed: torch.Tensor = signed) -> list[torch.Tensor]:
                return [guarded(torch.cat([torch.zeros(3, dtype=dtype), signed]), 1)]

            _, overflows = torch_unscaled(make, inverse)
            assert overflows == expected
            check_unscales(make, inverse)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("divisor", [2 / 3, 1 / 3, 2.0**-100, 0.0])
def test_quotients_are_not_rounded_to_16_bit(dtype: torch.dtype, divisor: float) -> None:
    largest = torch.tensor([0.25, -torch.finfo(dtype).max], dtype=dtype)
    check_reads(lambda: [guarded(largest)], [divisor])
    check_reads(lambda: [guarded(torch.zeros(3, dtype=dtype))], [divisor, math.inf])


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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_coefficient_does_not_decide(dtype: torch.dtype) -> None:
    for coefficient, bad, expected in (
        *((0.0, math.inf, 1.0), (0.5, math.nan, 1.0)),
        *((math.inf, 2.0, 0.0), (math.nan, 2.0, 0.0)),
    ):
        grads = grads_of([torch.tensor([1.0, bad], dtype=dtype)])
        found = run_unscale(
            KERNELS, grads, flag(1.0), is_scale=False, coefficient=wide(coefficient)
        )
        assert found.item() == expected


def test_the_same_table_serves_again() -> None:
    grads = mixed()
    for _ in range(3):
        theirs, expected = torch_unscaled(lambda: [guarded(g) for g in grads], 0.5)
        assert run_unscale(KERNELS, grads_of(grads), flag(0.5), is_scale=False).item() == expected
        for ours, wanted in zip(grads, theirs, strict=True):
            assert torch.equal(exact_bits(ours.clone()), exact_bits(wanted.clone()))
    grads[0][0] = math.inf
    assert run_check(KERNELS, grads_of(grads)).item() == 1.0
    grads[0][0] = 1.0
    assert run_check(KERNELS, grads_of(grads)).item() == 0.0


@pytest.mark.parametrize("tensors", [224, 225])
def test_lists_in_the_arguments_of_a_launch_and_beyond(tensors: int) -> None:
    """Before their table is uploaded and after."""
    grads = [torch.full((3,), 64.0 + i) for i in range(tensors)]
    expected = [grad / 64 for grad in grads]
    grads[-1][2] = torch.inf
    table = grads_of(grads)
    assert table.chunks == tensors
    for _ in range(6):
        assert run_unscale(KERNELS, table, flag(0.5), is_scale=False).item() == 1.0
    assert grads[-1][2] == torch.inf
    grads[-1][2] = expected[-1][2]
    assert_same(grads, expected)
    assert run_check(KERNELS, table).item() == 0.0
