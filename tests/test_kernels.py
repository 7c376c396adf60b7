"""CPU kernels against torch's op, over instruction sets, layouts, sizes and values; tracking."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys

import pytest
import torch
from support.comparison import BITS, FLOATS, assert_same
from support.gradients import LAYOUTS, WRITABLE_LAYOUTS, make_gradient
from support.kernel_calls import grads_of
from support.kernel_parity import (
    CHUNK,
    available_gibibytes,
    check_parity,
    exact_bits,
    flag,
    last_finite,
    norms,
    random_bits,
    reference_norms,
    storage,
    torch_unscale_,
    wide,
)
from support.tracking_reference import (
    check_passes,
    check_random_lists,
    check_times,
    kinds_in,
    marks_of,
    track_for,
    tracked,
)

from ampfast import _C, functional
from ampfast.backends import cpu
from ampfast.backends.core import Factor, Pass

CAPABILITIES = tuple(_C.cpu_capabilities())
CHUNK_SIZES = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)
INVERSES = (0.5, 2.0**-16, 1 / 3, 3.0, 2.0**10, 2.0**-30, 1.0, 0.0, math.inf, math.nan, -0.75)
# Relative tolerances of a sum of squares, whose terms are positive: roundings add up at most. A CPU
# adds up to 8 squares in float32, hence as many roundings, and what is left in float64, as it does
# with those of float64 gradients; the tensors have some tens of blocks.
SQUARES_TOLERANCE = {
    torch.float64: 64 * 2.0**-53,
    torch.float32: 8.001 * 2.0**-24,
    torch.float16: 8.001 * 2.0**-24,
    torch.bfloat16: 8.001 * 2.0**-24,
}
# Between these magnitudes of the largest value, all squares are added in float32.
LEAST, MOST = 2.0**-40, 2.0**62


def test_every_named_capability_can_be_chosen() -> None:
    assert CAPABILITIES
    assert len(set(CAPABILITIES)) == len(CAPABILITIES)
    before = _C.cpu_capability()
    assert before in CAPABILITIES
    with pytest.raises(ValueError, match="pentium"):
        _C.set_cpu_capability("pentium")
    assert _C.cpu_capability() == before


@pytest.mark.parametrize("name", [*CAPABILITIES, "", "pentium"])
def test_the_environment_chooses_a_capability(name: str) -> None:
    script = "from ampfast.backends import core; print(core.cpu_capability())"
    environment = {**os.environ, "AMPFAST_CPU_CAPABILITY": name}
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if name in ("", *CAPABILITIES):
        assert said.stdout == f"{name or CAPABILITIES[0]}\n"
    else:
        known = f"AMPFAST_CPU_CAPABILITY may be {', '.join(CAPABILITIES)}"
        assert f"ValueError: this machine has no CPU capability 'pentium': {known}" in said.stderr


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="not x86")
def test_the_widest_instructions_are_the_default() -> None:
    best_first = ("avx512", "avx2", "baseline")
    assert tuple(name for name in best_first if name in CAPABILITIES) == CAPABILITIES
    widest = torch.backends.cpu.get_cpu_capability().lower()
    if "ATEN_CPU_CAPABILITY" not in os.environ and widest in best_first:
        assert CAPABILITIES[0] == widest


@pytest.mark.parametrize("inverse", [0.5, 1.0, 1 / 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", WRITABLE_LAYOUTS)
def test_layouts(capability: str, layout: str, dtype: torch.dtype, inverse: float) -> None:
    check_parity(lambda: [make_gradient(layout, dtype, seed) for seed in range(3)], inverse)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_bad_value_in_each_layout(capability: str, dtype: torch.dtype, bad: float) -> None:
    for layout in WRITABLE_LAYOUTS:
        count = make_gradient(layout, dtype).numel()
        for index in {0, count // 2, count - 1} if count else set():

            def make(layout: str = layout, index: int = index) -> list[torch.Tensor]:
                gradient = make_gradient(layout, dtype)
                place = torch.unravel_index(torch.tensor(index), gradient.shape)
                gradient[tuple(int(i) for i in place)] = bad
                return [make_gradient("contiguous", dtype, 5), gradient]

            check_parity(make, 0.25)


def test_flipped_gradient_is_a_copy(capability: str) -> None:
    check_parity(lambda: [make_gradient("permuted").flip(0, 2)], 1 / 3)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_expanded_is_refused_as_in_torch(capability: str, position: int) -> None:
    grads = [make_gradient("contiguous", seed=1), make_gradient("contiguous", seed=2)]
    grads.insert(position, make_gradient("expanded"))
    before = [exact_bits(g) for g in grads]
    with pytest.raises(RuntimeError) as theirs:
        torch_unscale_([make_gradient("expanded")], 0.5)
    for call in (
        lambda: functional.unscale_(grads, flag(), flag(0.5)),
        lambda: functional.check_(grads, flag()),
    ):
        with pytest.raises(RuntimeError) as ours:
            call()
        assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
    assert all(torch.equal(exact_bits(g), b) for g, b in zip(grads, before, strict=True))


STRIDES = [
    # A dimension of one element may have any stride, and so may any dimension of an empty tensor.
    ((1, 5), (0, 1)),
    ((5, 1), (1, 0)),
    ((1, 1), (7, 9)),
    ((3, 1, 2), (2, 0, 1)),
    ((0, 5), (1, 0)),
    ((5, 0), (0, 0)),
    # Rows that touch, rows with gaps, and rows that share an element.
    ((2, 2), (2, 1)),
    ((2, 2), (3, 1)),
    ((3, 2), (1, 1)),
    ((2, 3, 2), (1, 2, 1)),
    # Each row is one element, or part of it.
    ((2, 3), (0, 1)),
    ((2, 3), (1, 0)),
    ((2, 1, 3), (0, 0, 1)),
]


@pytest.mark.parametrize(("shape", "stride"), STRIDES, ids=str)
def test_strides_are_judged_as_in_torch(
    capability: str, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    def make() -> list[torch.Tensor]:
        return [torch.arange(1.0, 20.0).as_strided(shape, stride, 2)]

    try:
        torch_unscale_(make(), 1 / 3)
    except RuntimeError:
        for call in (functional.check_, lambda g, f: functional.unscale_(g, f, flag(1 / 3))):
            grads = make()
            with pytest.raises(RuntimeError, match="more than one element of the written-to"):
                call(grads, flag())
            assert_same(storage(grads[0]), torch.arange(1.0, 20.0))
    else:
        check_parity(make, 1 / 3)


def test_every_layout_was_tried() -> None:
    assert set(LAYOUTS) - set(WRITABLE_LAYOUTS) == {"expanded"}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inverse", [1 / 3, 1.0])
def test_small_sizes_at_every_offset(capability: str, dtype: torch.dtype, inverse: float) -> None:
    def make() -> list[torch.Tensor]:
        # Each has memory of its own on both sides, so writes beyond it show.
        return [
            make_gradient("every_other", dtype, n).new_empty(n + 32).fill_(1 + n / 8)[o : o + n]
            for n in range(71)
            for o in range(16)
        ]

    check_parity(make, inverse)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bad_value_at_every_position(capability: str, dtype: torch.dtype) -> None:
    bad = (math.inf, -math.inf, math.nan)
    inverse = flag(0.5)
    for count in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 70):
        for position in range(count):
            for write in (False, True):
                gradient = torch.ones(count + 1, dtype=dtype)[1:]
                gradient[position] = bad[position % 3]
                found = flag()
                if write:
                    functional.unscale_([gradient], found, inverse)
                else:
                    functional.check_([gradient], found)
                assert found.item() == 1.0, (count, position, write)
    for count in range(71):
        found = flag()
        functional.unscale_([torch.ones(count, dtype=dtype)], found, inverse)
        functional.check_([torch.ones(count, dtype=dtype)], found)
        assert found.item() == 0.0, count


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_sizes_around_the_chunk(capability: str, dtype: torch.dtype, size: int) -> None:
    for offset in (0, 1, 7):
        values = random_bits(size + 16, dtype, size + offset)
        values[~values.isfinite()] = 1.5
        # Halving never overflows, so the flag comes from the planted value alone.
        check_parity(lambda v=values, o=offset: [v.clone()[o : o + size]], 0.5)
    for position in {0, size // 2, size - 1, min(CHUNK - 1, size - 1), min(CHUNK, size - 1)}:
        for bad in (math.inf, math.nan):

            def make(position: int = position, bad: float = bad) -> list[torch.Tensor]:
                gradient = torch.ones(size, dtype=dtype)
                gradient[position] = bad
                return [torch.ones(3, dtype=dtype), gradient, torch.ones(5, dtype=dtype)]

            check_parity(make, 2.0)


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_16_bit_values(capability: str, dtype: torch.dtype, inverse: float) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    check_parity(lambda: [every.clone()], inverse)
    # A strided view takes the non-contiguous path.
    check_parity(lambda: [every.clone().reshape(256, 256).t()], inverse)
    written = every.clone()
    torch_unscale_([written], inverse)
    harmless = every[written.isfinite()]
    check_parity(lambda: [harmless.clone()], inverse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_each_non_finite_16_bit_value_is_found(capability: str, dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for value in every[~every.isfinite()]:
        gradient = torch.full((5,), 2.0, dtype=dtype)
        gradient[2] = value
        functional.check_([gradient], found := flag())
        assert found.item() == 1.0, value
    functional.check_([every[every.isfinite()]], found := flag())
    assert found.item() == 0.0


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_random_bit_patterns(capability: str, dtype: torch.dtype, inverse: float) -> None:
    check_parity(lambda: [random_bits(200_000, dtype, 3)], inverse)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_subnormals_and_signs_of_zero(capability: str, dtype: torch.dtype) -> None:
    patterns = torch.arange(-2048, 2048, dtype=torch.int64)
    tiny = patterns.abs().to(BITS[dtype]).view(dtype).copysign(patterns)
    normal = torch.full_like(tiny, torch.finfo(dtype).tiny).copysign(patterns)
    for inverse in (0.5, 0.25, 1 / 3, 1.0, 3.0, 2.0**-20, 0.0, -1.0, 2.0**-149):
        check_parity(lambda: [tiny.clone(), normal.clone(), -normal], inverse)
    zeros = torch.tensor([0.0, -0.0] * 9, dtype=dtype)
    functional.unscale_([zeros], found := flag(), flag(0.5))
    assert zeros.signbit().tolist() == [False, True] * 9
    assert found.item() == 0.0


@pytest.mark.parametrize("inverse", [1.0000001, 1.5, 2.0, 3.0, 1000.1, 2.0**40, 2.0**127])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_overflow_on_unscaling_to_the_ulp(
    capability: str, dtype: torch.dtype, inverse: float
) -> None:
    edge = last_finite(dtype, inverse)
    # Where even the smallest value overflows, zero is the bound.
    for pattern, expected in ((max(edge - 1, 0), 0), (edge, 0), (edge + 1, 1), (edge + 2, 1)):
        value = torch.tensor([pattern], dtype=BITS[dtype]).view(dtype)
        for sign in (1, -1):
            for count, position in ((1, 0), (40, 0), (40, 39), (67, 30)):
                gradient = torch.zeros(count, dtype=dtype)
                gradient[position] = value.item() * sign
                twin = gradient.clone()
                functional.unscale_([gradient], found := flag(), flag(inverse))
                torch_found = torch_unscale_([twin], inverse)
                assert_same(gradient, twin)
                if not gradient.isfinite().all() or pattern <= edge:
                    assert found.item() == expected, (pattern, sign, count, position)
                assert torch_found.item() == float(not value.isfinite().all())


@pytest.mark.parametrize("bad_dtype", FLOATS, ids=str)
def test_lists_of_every_dtype(capability: str, bad_dtype: torch.dtype) -> None:
    def make(bad: float) -> list[torch.Tensor]:
        grads = [torch.ones(9, dtype=dtype) for dtype in (*FLOATS, *reversed(FLOATS))]
        grads[FLOATS.index(bad_dtype)][4] = bad
        return grads

    for bad in (1.0, math.nan, torch.finfo(bad_dtype).max):
        check_parity(lambda bad=bad: make(bad), 3.0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inverse", [math.inf, -math.inf, math.nan])
def test_inverse_that_is_not_finite(capability: str, dtype: torch.dtype, inverse: float) -> None:
    for values in ([0.0], [-0.0, 0.0], [1.0], [2.0, 0.0], [], [[], []]):
        check_parity(lambda values=values: [torch.tensor(values, dtype=dtype)], inverse)


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
        assert squares == pytest.approx(want_squares, rel=SQUARES_TOLERANCE[dtype], abs=0)
        # A written value, hence exact.
        assert maximum == want_maximum
        assert all(torch.equal(exact_bits(g), b) for g, b in zip(grads, before, strict=True))


def test_norms_of_rounded_sums_are_within_the_bound(capability: str) -> None:
    # The most that is lost: each square below half of the last place of the sum of the first row.
    lost = 2.0**-12 * (1 - 2.0**-10)
    grad = torch.full((32 * 32,), lost)
    grad[:32] = 1.0
    (squares, _), (want, _) = norms([grad], 1.0), reference_norms([grad], 1.0)
    assert 6.9 * 2.0**-24 < (want - squares) / want <= SQUARES_TOLERANCE[torch.float32]


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
        assert squares == pytest.approx(want, rel=SQUARES_TOLERANCE[dtype], abs=0), grad[:2]


@pytest.mark.parametrize("limit", [LEAST, MOST])
def test_norms_beside_the_limits_of_float32_sums(capability: str, limit: float) -> None:
    edge = torch.tensor(limit)
    for value in (edge.nextafter(flag(0.0)), edge, edge.nextafter(flag(math.inf))):
        for rest in (value.item(), value.item() * 2.0**-23, value.item() * 2.0**-24):
            grad = torch.full((CHUNK + 300,), rest)
            grad[5] = value
            (squares, _), (want, _) = norms([grad], 1.0), reference_norms([grad], 1.0)
            assert squares == pytest.approx(want, rel=SQUARES_TOLERANCE[torch.float32], abs=0)


@pytest.mark.parametrize("exponent", [-40.5, -50, -59.9])
def test_squares_below_float32_are_added_in_float64(capability: str, exponent: float) -> None:
    """Each is half of the smallest float32; together they are most of the sum's error."""
    grad = torch.full((CHUNK,), 2.0**-75.01)
    grad[0] = 2.0**exponent
    (squares, _), (want, _) = norms([grad], 1.0), reference_norms([grad], 1.0)
    assert squares == pytest.approx(want, rel=SQUARES_TOLERANCE[torch.float32], abs=0)


def test_norms_of_values_that_vanish_or_become_infinite(capability: str) -> None:
    for size in (1, 5, 31, 32, 33, 300):
        grad = torch.full((size,), 2.0**-100)
        assert norms([grad], 0.0) == (0.0, 0.0)
        assert norms([grad * 0], 3.0) == (0.0, 0.0)
        assert norms([grad], 2.0**-60) == (0.0, 0.0)  # in float32, as `unscale_` writes it
        assert norms([grad], math.inf) == (math.inf, math.inf)
        assert all(math.isnan(norm) for norm in norms([grad], math.nan))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_have_the_same_bits_on_every_instruction_set(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    before = _C.cpu_capability()
    request.addfinalizer(lambda: _C.set_cpu_capability(before))
    lists = [[grad] for grad in magnitudes(dtype)]
    lists += [[torch.randn(n).to(dtype)] for n in (*range(100), 255, 256, 257, *CHUNK_SIZES)]
    every = random_bits(100_000, dtype, 5)
    lists.append([every[every.isfinite()]])
    seen = []
    for name in CAPABILITIES:
        _C.set_cpu_capability(name)
        seen.append([norms(grads, factor) for grads in lists for factor in (1.0, 1 / 3, 2.0**-16)])
    assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("position", [0, 35, 69, CHUNK])
def test_norms_keep_non_finite_values(capability: str, dtype: torch.dtype, position: int) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        gradient = torch.ones(CHUNK + 9, dtype=dtype)
        gradient[position] = bad
        squares, maximum = norms([torch.ones(3, dtype=dtype), gradient], 0.5)
        for value in (squares, maximum):
            assert math.isnan(value) if math.isnan(bad) else value == math.inf
        # NaN wins over infinity at any position.
        gradient[position + 3] = -bad
        gradient[-1] = math.nan
        assert all(math.isnan(v) for v in norms([gradient], 0.5))


@pytest.mark.parametrize("order", [1, -1])
def test_norms_keep_a_nan_of_another_dtype(capability: str, order: int) -> None:
    grads = [torch.tensor([math.nan]), torch.ones(2, dtype=torch.float64), torch.ones(2)]
    assert all(math.isnan(norm) for norm in norms(grads[::order], 1.0))


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
            found.append(kinds_in(track))
    finally:
        torch.set_num_threads(threads)
        _C.set_grain(grain)
    assert found == [marks_of(grads)] * 3
