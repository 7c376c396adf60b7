"""Last program of a launch: flags, norms and the scale update, and no other writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from device_parity import (
    KERNELS,
    assert_same_memory,
    guarded,
    mixed,
    normal,
    offsets,
    torch_unscaled,
    window,
)
from support.comparison import FLOATS, assert_same
from support.kernel_calls import grads_of, run_check, run_sums, run_unscale
from support.kernel_parity import exact_bits, flag, random_bits, reference_norms, wide
from support.tracking_reference import marked, track_for

from ampfast.backends.core import GradList, Update
from ampfast.backends.core import state_layout as layout

pytestmark = pytest.mark.usefixtures("watched")

# Relative tolerances of the sum of squares. Its terms are positive, so roundings add up at most: a
# thread adds the squares of a window in opmath, 32 of them themselves rounded in float32 or 8 in
# float64; the rest is at most some hundred additions in float64.
SQUARES_TOLERANCE = {
    torch.float64: 256 * 2.0**-53,
    torch.float32: 17 * 2.0**-24,
    torch.float16: 33 * 2.0**-24,
    torch.bfloat16: 33 * 2.0**-24,
}
NO_FLAG = ()

Case = tuple[float, int, tuple[float, float, int]]
# Scale, tracker and factors.
CASES: dict[str, Case] = {
    "counts": (3.0, 3, (1.1, 0.3, 5)),
    # In float32, 1.1 * 3 and 0.3 * 3 differ from the rounded float64 products.
    "grows": (3.0, 4, (1.1, 0.3, 5)),
    "defaults": (65536.0, 1999, (2.0, 0.5, 2000)),
    "cannot grow": (3e38, 0, (2.0, 0.5, 1)),
    "underflows": (2.0**-149, 0, (0.25, 0.25, 1)),
    "interval 0": (3.0, 7, (1.1, 0.3, 0)),
    "negative interval": (3.0, 7, (1.1, 0.3, -1)),
    "long interval": (3.0, 2**31 - 2, (1.1, 0.3, 2**31 + 5)),
    "negative tracker": (3.0, -4, (1.1, 0.3, 1)),
    "infinite scale": (math.inf, 0, (2.0, 0.5, 1)),
    "NaN scale": (math.nan, 0, (2.0, 0.5, 1)),
    "zero scale": (0.0, 0, (2.0, 0.5, 1)),
}


def state(case: str) -> tuple[torch.Tensor, torch.Tensor, tuple[float, float, int]]:
    scale, tracker, factors = CASES[case]
    return flag(scale), torch.tensor(tracker, dtype=torch.int32), factors


def torch_updated(case: str, found: float) -> tuple[torch.Tensor, torch.Tensor]:
    scale, tracker, factors = state(case)
    torch._amp_update_scale_(scale, tracker, flag(found), *factors)
    return scale, tracker


def few() -> list[torch.Tensor]:
    """Two short gradients of each dtype, where the update is the subject."""
    return [guarded(normal(n, dtype, n), 1) for dtype in FLOATS for n in (5, 3)]


def flag_values() -> tuple[float, ...]:
    return (1.0, 2.0, 0.5, -1.0, math.inf, math.nan)


# Found


@pytest.mark.parametrize("given", [0.0, 1.0, 2.0, math.nan])
@pytest.mark.parametrize("bad", [False, True])
def test_a_given_flag_accumulates(given: float, bad: bool) -> None:
    def make() -> list[torch.Tensor]:
        grads = mixed()
        grads[-1][3] = math.nan if bad else 1.0
        return grads

    for call in (
        lambda found: run_check(KERNELS, grads_of(make()), found_inf=found),
        lambda found: run_check(KERNELS, grads_of(make()), flag(2.0), found_inf=found),
        lambda found: run_unscale(
            KERNELS, grads_of(make()), flag(2.0), is_scale=True, found_inf=found
        ),
    ):
        memory = torch.tensor([7.5, given, 7.5])
        found = memory[1:2]
        assert call(found) is found
        assert_same(memory, torch.tensor([7.5, 1.0 if bad else given, 7.5]))


@pytest.mark.parametrize("bad_dtype", FLOATS, ids=str)
def test_every_segment_counts(bad_dtype: torch.dtype) -> None:
    grads = mixed()
    next(g for g in grads if g.dtype == bad_dtype)[1] = math.inf
    for _ in range(2):
        assert run_check(KERNELS, grads_of(grads)).item() == 1.0
    clean = mixed()
    assert run_check(KERNELS, grads_of(clean)).item() == 0.0


# Norms


@pytest.mark.parametrize("is_scale", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms(dtype: torch.dtype, is_scale: bool) -> None:
    def make() -> list[torch.Tensor]:
        one = window(dtype)
        places = [(one + 1, 1), (1, 1), (2 * one + 3, 1)]
        places += [(n, o) for n in (5, one) for o in offsets(dtype)]
        return [guarded(normal(n, dtype, n + o), o) for n, o in places]

    factor, inverse = (3.0, 1 / 3) if is_scale else (1 / 3, 1 / 3)
    squares, largest = reference_norms(make(), inverse)
    seen = []
    for write in (False, True, False):
        grads, sums = make(), torch.empty(2, dtype=torch.float64)
        before = [exact_bits(g) for g in grads]
        if write:
            found = run_unscale(
                KERNELS, grads_of(grads), flag(factor), is_scale=is_scale, sums=sums
            )
            assert_same_memory(grads, torch_unscaled(make, inverse)[0])
        else:
            found = run_sums(KERNELS, grads_of(grads), flag(factor), is_scale=is_scale, sums=sums)
            assert all(torch.equal(exact_bits(g), b) for g, b in zip(grads, before, strict=True))
        assert found.item() == 0.0
        assert sums[0].item() == pytest.approx(squares, rel=SQUARES_TOLERANCE[dtype], abs=0)
        assert sums[1].item() == largest
        seen.append(sums)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("programs", [1, 3, 200])
def test_norms_of_all_dtypes(programs: int, limit_programs: Callable[[int], None]) -> None:
    limit_programs(programs)

    def make() -> list[torch.Tensor]:
        # More than the partial sums that are added at once, for one of the grids.
        more = 1030 if programs == 3 else 40
        return [*mixed(), *(normal(2, torch.float32, n) for n in range(more))]

    squares, largest = reference_norms([g for g in make() if g.numel()], 0.1)
    sums = torch.empty(2, dtype=torch.float64)
    run_sums(KERNELS, grads_of(make()), flag(0.1), is_scale=False, sums=sums)
    assert sums[0].item() == pytest.approx(squares, rel=33 * 2.0**-24, abs=0)
    assert sums[1].item() == largest


@pytest.mark.usefixtures("few_chunks")
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_have_the_same_bits_on_every_grid(
    dtype: torch.dtype, write: bool, limit_programs: Callable[[int], None]
) -> None:
    """Of chunks of one to three windows."""
    sizes = [2 * window(dtype) + 5, window(dtype), *[3] * 8, 3 * window(dtype) + 1]

    def grads() -> GradList:
        return grads_of([guarded(normal(n, dtype, n), n % 2) for n in sizes])

    seen = []
    for programs in (1, 3, 4096):
        limit_programs(programs)
        sums = torch.empty(2, dtype=torch.float64)
        if write:
            run_unscale(KERNELS, grads(), flag(0.1), is_scale=False, sums=sums)
        else:
            run_sums(KERNELS, grads(), flag(0.1), is_scale=False, sums=sums)
        seen.append(sums.tolist())
    assert seen == seen[:1] * len(seen)
    assert len(set(seen[0])) == 2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_norms_of_bad_values(dtype: torch.dtype, bad: float) -> None:
    for place in (0, 700, -1):
        gradient = normal(window(dtype) + 9, dtype)
        gradient[place] = bad
        sums = torch.empty(2, dtype=torch.float64)
        found = run_sums(KERNELS, grads_of([gradient]), flag(0.5), is_scale=False, sums=sums)
        assert found.item() == 1.0
        assert_same(sums, torch.full((2,), abs(bad), dtype=torch.float64))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_times_infinity_do_not_depend_on_the_grid(
    dtype: torch.dtype, limit_programs: Callable[[int], None]
) -> None:
    """Some programs see zeros alone."""
    grads = grads_of([torch.full((3,), value, dtype=dtype) for value in (0.0, 1.0, 0.0)])
    for scale, largest in ((0.0, math.inf), (math.nan, math.nan)):
        for programs in (1, 2, 3):
            limit_programs(programs)
            sums = torch.empty(2, dtype=torch.float64)
            assert run_sums(KERNELS, grads, flag(scale), is_scale=True, sums=sums).item() == 1.0
            assert_same(sums[1].item(), largest)


def test_squares_are_taken_before_rounding_to_16_bit() -> None:
    value = torch.tensor([3.0], dtype=torch.bfloat16)
    sums = torch.empty(2, dtype=torch.float64)
    run_unscale(KERNELS, grads_of([value]), flag(1 / 3 + 0.001), is_scale=False, sums=sums)
    product = flag(3.0) * flag(1 / 3 + 0.001)
    assert sums.tolist() == [(product * product).item(), value.item()]
    assert sums[1].item() != product.item()


def test_values_outside_of_a_tensor_are_not_in_its_norms() -> None:
    # Times an infinite inverse, padding zeros would be NaN.
    sums = torch.empty(2, dtype=torch.float64)
    run_sums(KERNELS, grads_of([guarded(torch.ones(3), 1)]), flag(0.0), is_scale=True, sums=sums)
    assert sums.tolist() == [math.inf, math.inf]


# The update behind a pass


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_fused_update(case: str, bad: bool) -> None:
    def make() -> list[torch.Tensor]:
        grads = few()
        if bad:
            grads[2][1] = math.inf
        return grads

    for mode in ("check", "divide", "unscale"):
        scale, tracker, factors = state(case)
        kept = torch.zeros(layout.STATE_WORDS, dtype=torch.int64)
        ending = KERNELS.ending(Update(scale, tracker, NO_FLAG, *factors, kept))
        assert ending is not None and not ending.applied
        if mode == "unscale":
            # The replaced scale is the factor of the same pass.
            inverse = state(case)[0].double().reciprocal().float().item()
            theirs, expected = torch_unscaled(make, inverse)
            ours = make()
            found = run_unscale(KERNELS, grads_of(ours), scale, is_scale=True, ending=ending)
            assert_same_memory(ours, theirs)
        else:
            expected = float(bad)
            divisor = flag(2.0) if mode == "divide" else None
            found = run_check(KERNELS, grads_of(make()), divisor, ending=ending)
        assert ending.applied
        assert found.item() == expected
        theirs_scale, theirs_tracker = torch_updated(case, expected)
        assert_same([scale, tracker], [theirs_scale, theirs_tracker])
        assert kept[layout.STEPS] == 1
        ending.undo()
        assert_same([scale, tracker], list(state(case)[:2]))
        assert kept[: layout.COUNTERS].eq(0).all()


@pytest.mark.parametrize("programs", [1, 2, 1000])
@pytest.mark.parametrize("bad", [False, True])
def test_fused_update_on_grids(
    programs: int, bad: bool, limit_programs: Callable[[int], None]
) -> None:
    limit_programs(programs)
    for grads in (mixed(), [normal(9001, torch.float32)]):
        if bad:
            grads[0][0] = math.nan
        for case in ("grows", "counts"):
            scale, tracker, factors = state(case)
            ending = KERNELS.ending(Update(scale, tracker, NO_FLAG, *factors))
            run_check(KERNELS, grads_of(grads), ending=ending)
            assert_same([scale, tracker], list(torch_updated(case, float(bad))))


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("bad", [False, True])
def test_the_divisor_is_the_scale_before_the_update(
    bad: bool, programs: int, limit_programs: Callable[[int], None]
) -> None:
    limit_programs(programs)
    for case in ("grows", "counts"):
        scale, tracker, factors = state(case)
        before, grads = scale.clone(), few()
        if bad:
            grads[0][0] = math.inf
        for write in (False, True):
            scale, tracker, _ = state(case)
            ending = KERNELS.ending(Update(scale, tracker, NO_FLAG, *factors))
            if write:
                divisor = torch.full_like(scale, math.nan)
                more = {"factor_copy": divisor, "ending": ending}
                run_unscale(KERNELS, grads_of(grads), scale, is_scale=True, **more)
            else:
                run_check(KERNELS, grads_of(grads), scale, ending=ending)
                divisor = ending.divisor
            assert_same([scale, tracker], list(torch_updated(case, float(bad))))
            assert_same(divisor, before)


@pytest.mark.parametrize("given", [None, 0.0, -0.0, 1.0, math.nan])
@pytest.mark.parametrize("other", [0.0, -0.0, 0.5, 1.0, 2.0, math.nan])
def test_fused_update_takes_another_flag(other: float, given: float | None) -> None:
    scale, tracker, factors = state("grows")
    ending = KERNELS.ending(Update(scale, tracker, [flag(other)], *factors))
    found_inf = None if given is None else flag(given)
    found = run_check(KERNELS, grads_of([torch.ones(3)]), found_inf=found_inf, ending=ending)
    assert_same(found, flag(given or 0.0) if given is None else flag(given))
    skipped = float(other != 0 or (given is not None and given != 0))
    assert_same([scale, tracker], list(torch_updated("grows", skipped)))


@pytest.mark.parametrize("others", [2, 7])
def test_an_update_with_more_flags_is_left_to_its_caller(others: int) -> None:
    scale, tracker, factors = state("grows")
    before = [scale.clone(), tracker.clone()]
    update = Update(scale, tracker, [flag(0.0)] * others, *factors)
    assert KERNELS.ending(update) is None
    assert_same([scale, tracker], before)
    KERNELS.update(update)
    assert_same([scale, tracker], list(torch_updated("grows", 0.0)))


def test_fused_update_where_a_bad_value_meets_a_given_flag() -> None:
    scale, tracker, factors = state("grows")
    ending = KERNELS.ending(Update(scale, tracker, NO_FLAG, *factors))
    run_check(KERNELS, grads_of([torch.tensor([math.inf])]), found_inf=flag(0.0), ending=ending)
    assert_same([scale, tracker], list(torch_updated("grows", 1.0)))


def test_norms_and_marks_ride_with_the_update() -> None:
    grads = [g for g in mixed() if g.numel()]
    grads[4][2] = math.nan
    scale, tracker, factors = state("defaults")
    ending = KERNELS.ending(Update(scale, tracker, NO_FLAG, *factors))
    sums, track = torch.empty(2, dtype=torch.float64), track_for(len(grads))
    run_unscale(
        KERNELS,
        *(grads_of(grads), scale),
        is_scale=True,
        ending=ending,
        sums=sums,
        track=track,
    )
    assert sums.isnan().all()
    assert marked(track).index(True) == 4 and sum(marked(track)) == 1
    assert_same([scale, tracker], list(torch_updated("defaults", 1.0)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sums": torch.empty(2)}, "sums must be a contiguous tensor of 2 elements of Double"),
        ({"sums": torch.empty(3, dtype=torch.float64)}, "2 elements of Double"),
        (
            {"sums": torch.empty(2, dtype=torch.float64, device="meta")},
            "2 elements of Double on cpu",
        ),
        ({"sums": torch.empty(2, dtype=torch.float64), "coefficient": wide(0.5)}, "pass before"),
        (
            {"coefficient": flag(0.5)},
            "coefficient must be a contiguous tensor of 1 elements of Double",
        ),
        ({"found_inf": wide(0.0)}, "found_inf must be a contiguous tensor of 1 elements of Float"),
    ],
)
def test_arguments_that_kernels_would_misread(arguments: dict, message: str) -> None:
    grad = torch.full((3,), 8.0)
    with pytest.raises(RuntimeError, match=message):
        run_unscale(KERNELS, grads_of([grad]), flag(4.0), is_scale=True, **arguments)
    assert grad.tolist() == [8.0] * 3


def test_an_empty_list_leaves_the_update_to_its_caller() -> None:
    scale, tracker, factors = state("grows")
    ending = KERNELS.ending(Update(scale, tracker, NO_FLAG, *factors))
    assert run_check(KERNELS, grads_of([]), ending=ending).item() == 0.0
    assert not ending.applied
    ending.undo()
    assert_same([scale, tracker], list(state("grows")[:2]))


# The update alone


def updated(case: str, flags: Sequence[float]) -> list[torch.Tensor]:
    scale, tracker, factors = state(case)
    assert KERNELS.update(Update(scale, tracker, [flag(f) for f in flags], *factors))
    return [scale, tracker]


@pytest.mark.parametrize("case", CASES)
def test_update_alone(case: str) -> None:
    for found in (0.0, 1.0):
        assert_same(updated(case, [found]), list(torch_updated(case, found)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_any_flag_counts(count: int) -> None:
    assert_same(updated("grows", [0.0] * count), list(torch_updated("grows", 0.0)))
    assert_same(updated("grows", [-0.0] * count), list(torch_updated("grows", 0.0)))
    for place in range(count):
        for value in flag_values():
            flags = [0.0] * count
            flags[place] = value
            assert_same(updated("grows", flags), list(torch_updated("grows", 1.0)))


@pytest.mark.parametrize("fused", [False, True])
def test_a_lowered_interval_still_grows(fused: bool) -> None:
    # torch compares for equality, so its tracker would never equal the interval again.
    for interval, tracker_before in ((5, 5), (5, 1000), (1, 2**31 - 2)):
        scale, tracker = flag(3.0), torch.tensor(tracker_before, dtype=torch.int32)
        factors = (1.1, 0.3, interval)
        flags = NO_FLAG if fused else [flag()]
        update = Update(scale, tracker, flags, *factors)
        if fused:
            run_check(KERNELS, grads_of([torch.ones(1)]), ending=KERNELS.ending(update))
        else:
            KERNELS.update(update)
        assert scale.item() == torch.tensor(3.0 * 1.1, dtype=torch.float64).float().item()
        assert tracker.item() == 0


def test_random_updates() -> None:
    scales = random_bits(60, torch.float32, 5).tolist()
    factors = torch.rand(60, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    for scale_before, factor in zip(scales, factors.tolist(), strict=True):
        for found in (0.0, 1.0):
            arguments = (1.0 + factor, factor, 1)
            ours, theirs = flag(scale_before), flag(scale_before)
            tracker = torch.zeros((), dtype=torch.int32)
            KERNELS.update(Update(ours, tracker.clone(), [flag(found)], *arguments))
            torch._amp_update_scale_(theirs, tracker, flag(found), *arguments)
            assert_same(ours, theirs, f"{scale_before} {factor}")


@pytest.mark.parametrize(
    ("scale", "tracker", "flags"),
    [
        (torch.ones(2), torch.zeros((), dtype=torch.int32), []),
        (torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.int32), []),
        (torch.ones(()), torch.zeros((), dtype=torch.int64), []),
        (torch.ones(()), torch.zeros((), dtype=torch.int32), [torch.zeros(2)]),
        (torch.ones(()), torch.zeros((), dtype=torch.int32), [torch.zeros((), dtype=torch.half)]),
        (torch.ones((), requires_grad=True), torch.zeros((), dtype=torch.int32), []),
    ],
)
def test_arguments_unknown_to_the_kernels_are_refused(
    scale: torch.Tensor, tracker: torch.Tensor, flags: list[torch.Tensor]
) -> None:
    update = Update(scale, tracker, flags, 2.0, 0.5, 1)
    assert KERNELS.ending(update) is None
    assert not KERNELS.update(update)
