"""CPU kernels against torch's op, over instruction sets, layouts, sizes and values."""

from __future__ import annotations

import math

import pytest
import torch
from support.comparison import BITS, FLOATS, assert_same
from support.gradients import LAYOUTS, WRITABLE_LAYOUTS, make_gradient
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
)

from ampfast import _C, functional

CAPABILITIES = tuple(_C.cpu_capabilities())
CHUNK_SIZES = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)
INVERSES = (0.5, 2.0**-16, 1 / 3, 3.0, 2.0**10, 2.0**-30, 1.0, 0.0, math.inf, math.nan, -0.75)
# Relative tolerances of the norms. Products are summed before rounding to a 16-bit dtype; their
# squares are exact or rounded once in float64, and sums add blocks to blocks, so some tens of
# roundings suffice. The maximum is a written value, hence exact.
NORM_TOLERANCE = {"sum_of_squares": 64 * 2.0**-53, "absolute_maximum": 0.0}


def test_every_named_capability_can_be_chosen() -> None:
    assert CAPABILITIES
    assert len(set(CAPABILITIES)) == len(CAPABILITIES)
    before = _C.cpu_capability()
    assert before in CAPABILITIES
    with pytest.raises(ValueError, match="pentium"):
        _C.set_cpu_capability("pentium")
    assert _C.cpu_capability() == before


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_million_random_bit_patterns(capability: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(17)
    inverse = torch.rand((), generator=generator).item()
    check_parity(lambda: [random_bits(1_000_000, dtype, 11)], inverse)


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
        for name, got, want in (
            ("sum_of_squares", squares, want_squares),
            ("absolute_maximum", maximum, want_maximum),
        ):
            assert abs(got - want) <= NORM_TOLERANCE[name] * want, name
        assert all(torch.equal(exact_bits(g), b) for g, b in zip(grads, before, strict=True))


def test_norms_of_large_and_small_values(capability: str) -> None:
    # float32 squares would overflow and underflow here.
    assert norms([torch.full((4,), 1e30)], 1.0)[0] == pytest.approx(4e60, rel=1e-6)
    assert norms([torch.full((4,), 1e-30)], 1.0)[0] == pytest.approx(4e-60, rel=1e-6)
    assert norms([], 1.0) == (0.0, 0.0)


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
