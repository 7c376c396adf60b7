"""Last program of a launch: flags, norms and the scale update, and no other writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launched import KERNELS
from support.comparison import FLOATS, assert_same
from support.kernels import (
    assert_same_memory,
    exact_bits,
    flag,
    grads_of,
    guarded,
    inverse_of,
    mixed,
    normal,
    offsets,
    reference_norms,
    run_check,
    run_sums,
    run_unscale,
    torch_unscaled,
    window,
)

from ampfast.backends.core import Update
from ampfast.backends.core import state_layout as layout
from ampfast.backends.gpu import undo

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


def torch_updated(case: str, found: float) -> list[torch.Tensor]:
    scale, tracker, factors = state(case)
    torch._amp_update_scale_(scale, tracker, flag(found), *factors)
    return [scale, tracker]


def new_sums() -> torch.Tensor:
    return torch.empty(2, dtype=torch.float64)


# Norms


@pytest.mark.parametrize("is_scale", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms(dtype: torch.dtype, is_scale: bool, limit_programs: Callable[[int], None]) -> None:
    """Of the products before they are rounded to 16 bits; the same bits on every grid."""

    def make() -> list[torch.Tensor]:
        one = window(dtype)
        places = [(one + 1, 1), (1, 1), (2 * one + 3, 1)]
        places += [(n, o) for n in (5, one) for o in offsets(dtype)]
        return [guarded(normal(n, dtype, n + o), o) for n, o in places]

    factor, inverse = (3.0, 1 / 3) if is_scale else (1 / 3, 1 / 3)
    squares, largest = reference_norms(make(), inverse)
    seen = []
    for write, programs in ((False, 1), (True, 3), (False, 3), (False, 4096)):
        limit_programs(programs)
        grads, sums = make(), new_sums()
        before = [exact_bits(g) for g in grads]
        run = run_unscale if write else run_sums
        found = run(KERNELS, grads_of(grads), flag(factor), is_scale=is_scale, sums=sums)
        if write:
            assert_same_memory(grads, torch_unscaled(make, inverse)[0])
        else:
            assert all(torch.equal(exact_bits(g), b) for g, b in zip(grads, before, strict=True))
        assert found.item() == 0.0
        assert sums[0].item() == pytest.approx(squares, rel=SQUARES_TOLERANCE[dtype], abs=0)
        assert sums[1].item() == largest
        seen.append(sums.tolist())
    assert seen == seen[:1] * len(seen)


@pytest.mark.parametrize("programs", [1, 3, 200])
def test_norms_of_all_dtypes(programs: int, limit_programs: Callable[[int], None]) -> None:
    limit_programs(programs)

    def make() -> list[torch.Tensor]:
        # More than the partial sums that are added at once, for one of the grids.
        more = 1030 if programs == 3 else 40
        return [*mixed(), *(normal(2, torch.float32, n) for n in range(more))]

    squares, largest = reference_norms([g for g in make() if g.numel()], 0.1)
    sums = new_sums()
    run_sums(KERNELS, grads_of(make()), flag(0.1), is_scale=False, sums=sums)
    assert sums[0].item() == pytest.approx(squares, rel=33 * 2.0**-24, abs=0)
    assert sums[1].item() == largest


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_times_infinity_do_not_depend_on_the_grid(
    dtype: torch.dtype, limit_programs: Callable[[int], None]
) -> None:
    """Some programs see zeros alone; the zeros beside a tensor are in no norm."""
    grads = grads_of([torch.full((3,), value, dtype=dtype) for value in (0.0, 1.0, 0.0)])
    for scale, largest in ((0.0, math.inf), (math.nan, math.nan)):
        for programs in (1, 2, 3):
            limit_programs(programs)
            sums = new_sums()
            assert run_sums(KERNELS, grads, flag(scale), is_scale=True, sums=sums).item() == 1.0
            assert_same(sums[1].item(), largest)
    ones = grads_of([guarded(torch.ones(3, dtype=dtype), 1)])
    run_sums(KERNELS, ones, flag(0.0), is_scale=True, sums=sums)
    assert sums.tolist() == [math.inf, math.inf]


# The update behind a pass


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("programs", [1, 3])
def test_fused_update(
    programs: int, case: str, bad: bool, limit_programs: Callable[[int], None]
) -> None:
    """The divisor is the scale before it, of an unscaling also the factor of the same pass."""

    def make() -> list[torch.Tensor]:
        grads = [guarded(normal(n, dtype, n), 1) for dtype in FLOATS for n in (5, 3)]
        if bad:
            grads[2][1] = math.inf
        return grads

    limit_programs(programs)
    for mode in ("check", "divide", "unscale"):
        scale, tracker, factors = state(case)
        before, expected, divisor = scale.clone(), float(bad), torch.full_like(scale, math.nan)
        kept = torch.zeros(layout.STATE_WORDS, dtype=torch.int64)
        ending = KERNELS.ending(Update(scale, tracker, (), *factors, kept))
        assert ending is not None and not ending.applied
        grads = make()
        more: dict[str, Any] = {"factor_copy": divisor, "ending": ending}
        if mode == "unscale":
            theirs, expected = torch_unscaled(make, inverse_of(before.item()))
            found = run_unscale(KERNELS, grads_of(grads), scale, is_scale=True, **more)
            assert_same_memory(grads, theirs)
        elif mode == "divide":
            wide = (g if g.dtype == torch.float64 else g.float() for g in make())
            expected = float(not all((g / before.to(g.dtype)).isfinite().all() for g in wide))
            found = run_check(KERNELS, grads_of(grads), scale, **more)
        else:
            found = run_check(KERNELS, grads_of(grads), ending=ending)
        assert ending.applied
        assert found.item() == expected
        if mode != "check":
            assert_same(divisor, before)
        assert_same([scale, tracker], torch_updated(case, expected))
        assert kept[layout.STEPS] == 1
        undo(ending)
        assert_same([scale, tracker], list(state(case)[:2]))
        assert kept[: layout.COUNTERS].eq(0).all()


@pytest.mark.parametrize("given", [None, 0.0, -0.0, 1.0, math.nan])
@pytest.mark.parametrize("other", [0.0, -0.0, 0.5, 1.0, 2.0, math.nan])
def test_fused_update_takes_another_flag(other: float, given: float | None) -> None:
    for value in (1.0, math.inf):
        scale, tracker, factors = state("grows")
        ending = KERNELS.ending(Update(scale, tracker, [flag(other)], *factors))
        found_inf = None if given is None else flag(given)
        grads = grads_of([torch.tensor([value])])
        found = run_check(KERNELS, grads, found_inf=found_inf, ending=ending)
        assert_same(found, flag(1.0 if value == math.inf else given if given is not None else 0.0))
        skipped = float(other != 0 or value == math.inf or (given is not None and given != 0))
        assert_same([scale, tracker], torch_updated("grows", skipped))


@pytest.mark.parametrize("given", [0.0, 1.0])
@pytest.mark.parametrize("programs", [1, 3])
def test_a_clip_that_changes_nothing_updates_the_scale(
    programs: int, given: float, limit_programs: Callable[[int], None]
) -> None:
    limit_programs(programs)
    scale, tracker, factors = state("grows")
    ending, copy = KERNELS.ending(Update(scale, tracker, (), *factors)), flag(math.nan)
    more: dict[str, Any] = {"found_inf": flag(given), "factor_copy": copy, "ending": ending}
    more["coefficient"] = torch.ones((), dtype=torch.float64)
    grads = [torch.full((5,), 2.0, dtype=dtype) for dtype in FLOATS]
    found = run_unscale(KERNELS, grads_of(grads), flag(1.0), is_scale=False, **more)
    assert ending is not None and ending.applied
    assert_same([scale, tracker], torch_updated("grows", given))
    assert (copy.item(), found.item()) == (1.0, given)


# The update alone


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_any_flag_counts(count: int) -> None:
    for value in (0.0, -0.0, 1.0, 2.0, 0.5, -1.0, math.inf, math.nan):
        for place in range(count):
            flags = [0.0] * count
            flags[place] = value
            expected = torch_updated("grows", float(value != 0))
            scale, tracker, factors = state("grows")
            assert KERNELS.update(Update(scale, tracker, [flag(f) for f in flags], *factors))
            assert_same([scale, tracker], expected)


def test_a_lowered_interval_still_grows() -> None:
    # torch compares for equality, so its tracker would never equal the interval again.
    for interval, before in ((5, 5), (5, 1000), (1, 2**31 - 2)):
        for fused in (False, True):
            scale, tracker = flag(3.0), torch.tensor(before, dtype=torch.int32)
            update = Update(scale, tracker, () if fused else [flag()], 1.1, 0.3, interval)
            if fused:
                run_check(KERNELS, grads_of([torch.ones(1)]), ending=KERNELS.ending(update))
            else:
                KERNELS.update(update)
            assert (scale.item(), tracker.item()) == (flag(3.0 * 1.1).item(), 0)
