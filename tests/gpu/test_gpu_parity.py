"""Kernels on a GPU against torch's op, bit for bit: sizes, addresses, dtypes and values."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from batches import KINDS, every_offset_batch, random_batch, run_batch, window
from gpu_support import BACKENDS, flag, kernels_of, require_memory, unavailable_reason
from support.comparison import BITS, FLOATS, assert_same, difference
from support.gradients import make_gradient
from support.kernel_calls import grads_of, run_check, run_sums, run_unscale
from support.kernel_parity import inverse_of, wide
from support.tracking_reference import (
    check_random_lists,
    check_times,
    kinds_in,
    marked,
    marks_of,
    track_for,
)

from ampfast import functional
from ampfast.backends.core import Update

pytestmark = pytest.mark.gpu

LISTS = 10_000
LISTS_PER_BATCH = 100
# Factors and divisors; the reciprocals of some are infinite, zero, subnormal or inexact.
FACTORS = (1 / 3, 2.0**-16, 3.0, 2.0**10, -0.75, 1.0, 65537.0, 2.0**-128, 1e-3, 3e38, 0.0)
WORSE = (math.inf, math.nan)
HALVES = (torch.float16, torch.bfloat16)
TINY = 2.0**-128


def test_float64_is_judged_as_float64(backend: str, device: torch.device, torch_fails: Any) -> None:
    """torch's op for GPUs takes float64 for float32, its op for CPUs does not."""
    gradient, found = torch.full((3,), 1e300, dtype=torch.float64, device=device), flag(0.0, device)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient.clone()], found, flag(0.25, device))
    torch_fails("float64 gradients beyond float32's range on a GPU", found.item() != 0)
    kernels = kernels_of(backend, device)
    assert run_check(kernels, grads_of([gradient])).item() == 0
    assert run_unscale(kernels, grads_of([gradient]), flag(4.0, device), is_scale=True).item() == 0
    assert gradient.tolist() == [2.5e299] * 3


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
def test_sizes_around_the_window_at_every_offset(
    backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    batch = every_offset_batch(dtype)
    run_batch(
        kernels_of(backend, device),
        batch,
        device,
        kind="normal",
        factor=1 / 3,
        is_scale=False,
        seed=1,
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("factor", [*FACTORS, *WORSE])
def test_all_values_of_16_bits(
    backend: str, device: torch.device, dtype: torch.dtype, factor: float
) -> None:
    kernels = kernels_of(backend, device)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for is_scale in (False, True):
        inverse = inverse_of(factor) if is_scale else factor
        expected = every.clone()
        torch._amp_foreach_non_finite_check_and_unscale_(
            [expected], torch.zeros(()), torch.tensor(inverse)
        )
        ours = every.to(device)
        # Each value alone, too, for its own flag.
        judged = track_for(2**16, device=device)
        alone = every.to(device)
        run_unscale(kernels, grads_of([ours]), flag(factor, device), is_scale=is_scale)
        run_unscale(
            kernels,
            grads_of(list(alone.split(1))),
            flag(factor, device),
            is_scale=is_scale,
            track=judged,
        )
        assert_same(ours.cpu(), expected, "all at once")
        assert_same(alone.cpu(), expected, "each alone")
        assert marked(judged) == (~expected.isfinite()).tolist()
        if dtype is torch.float16:
            theirs = every.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(
                [theirs], flag(0.0, device), flag(inverse, device)
            )
            assert_same(ours, theirs, "torch on the device")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_coefficient_multiplies_unscaled_values(
    backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    kernels = kernels_of(backend, device)
    grads = [make_gradient("long", dtype, seed).to(device) for seed in range(3)]
    grads.append(make_gradient("short", dtype).to(device))
    expected = []
    for grad in grads:
        values = grad if dtype is torch.float64 else grad.float()
        unscaled = (values * flag(1 / 3, device).to(values.dtype)).to(dtype).to(values.dtype)
        expected.append((unscaled * wide(0.7, device).to(values.dtype)).to(dtype))
    found = run_unscale(
        kernels, grads_of(grads), flag(1 / 3, device), is_scale=False, coefficient=wide(0.7, device)
    )
    assert found.item() == 0.0
    assert_same(grads, expected, "gradients")


@pytest.mark.parametrize("writes", [False, True])
def test_norms_are_right_and_the_same_every_time(
    backend: str, device: torch.device, writes: bool
) -> None:
    kernels = kernels_of(backend, device)
    drawn = [
        make_gradient("long", dtype, seed).to(device) for seed in range(40) for dtype in FLOATS
    ]
    inverse = flag(1 / 3, device)
    wide = [(g if g.dtype is torch.float64 else g.float()) for g in drawn]
    squares = sum((w * inverse.to(w.dtype)).double().square().sum() for w in wide)
    written = [(w * inverse.to(w.dtype)).to(g.dtype) for w, g in zip(wide, drawn, strict=True)]
    largest = max(w.abs().max().double().item() for w in written)
    results = []
    for _ in range(20):
        grads = [g.clone() for g in drawn]
        # Poisoned, since the last program must assign them.
        sums = torch.full((2,), math.nan, dtype=torch.float64, device=device)
        if writes:
            found = run_unscale(kernels, grads_of(grads), inverse, is_scale=False, sums=sums)
            assert_same(grads, written, "gradients")
        else:
            found = run_sums(kernels, grads_of(grads), inverse, is_scale=False, sums=sums)
            assert_same(grads, drawn, "gradients")
        assert found.item() == 0.0
        results.append(sums.tolist())
    assert all(result == results[0] for result in results), "other bits in another run"
    assert results[0][1] == largest
    # float32 sums over a window's few hundred squares per thread, then float64.
    assert math.isclose(results[0][0], float(squares), rel_tol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_have_the_same_bits_on_every_grid(
    backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Of chunks of one window and of several."""
    kernels = kernels_of(backend, device)
    generator = torch.Generator(device).manual_seed(5)
    seen: dict[int, list[list[float]]] = {}
    try:
        for numel in (300_001, 40_000_003):
            values = torch.randn(numel, generator=generator, device=device).to(dtype)
            grads = grads_of([values[1:], values[:7].clone(), values[:4096].clone()])
            for programs in (0, 1, 2, 3, 131, 1_000, 4_096):
                kernels._launcher.limit_programs(programs)
                sums = torch.empty(2, dtype=torch.float64, device=device)
                run_sums(kernels, grads, flag(0.1, device), is_scale=False, sums=sums)
                seen.setdefault(numel, []).append(sums.tolist())
    finally:
        kernels._launcher.limit_programs(0)
    assert all(each == found[0] for found in seen.values() for each in found)
    assert all(math.isfinite(found[0][0]) and found[0][0] > 0 for found in seen.values())


def test_norms_keep_a_nan(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    grads = [make_gradient("long", dtype).to(device) for dtype in FLOATS]
    grads[1][12_345] = math.nan
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    found = run_sums(kernels, grads_of(grads), flag(1.0, device), is_scale=True, sums=sums)
    assert found.item() == 1.0
    assert sums.isnan().all()


def test_random_lists_are_tracked(backend: str, device: torch.device) -> None:
    check_random_lists(kernels_of(backend, device), device, range(60))


def test_a_step_is_marked_once(backend: str, device: torch.device) -> None:
    check_times(kernels_of(backend, device), device)


def test_many_windows_of_one_bad_tensor(backend: str, device: torch.device) -> None:
    for value in (math.nan, math.inf):
        grads = [torch.ones(5, device=device), torch.full((3_000_001,), value, device=device)]
        track = track_for(2, device=device)
        run_check(kernels_of(backend, device), grads_of(grads), track=track)
        assert kinds_in(track) == marks_of(grads)


def test_found_inf_is_accumulated_as_torch_does(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    good, bad = torch.ones(5, device=device), torch.full((5,), math.inf, device=device)
    for before, grad, after in ((0, good, 0), (1, good, 1), (0, bad, 1), (1, bad, 1), (2, good, 2)):
        found = flag(before, device)
        run_unscale(
            kernels, grads_of([grad.clone()]), flag(1, device), is_scale=False, found_inf=found
        )
        assert found.item() == after
        found = flag(before, device)
        assert run_check(kernels, grads_of([grad]), found_inf=found) is found
        assert found.item() == after


@pytest.mark.parametrize("backoff", [0.5, 0.3])
@pytest.mark.parametrize("growth", [2.0, 1.1])
def test_the_scale_is_updated_as_torch_does(
    backend: str, device: torch.device, growth: float, backoff: float
) -> None:
    kernels = kernels_of(backend, device)
    grad = torch.ones(5, device=device)
    for interval in (0, 1, 2, 7):
        for start in (3.0, 65536.0, 3e38, 1e-38, TINY, 0.0, math.inf, math.nan):
            states = [
                (flag(start, device), torch.zeros((), dtype=torch.int32, device=device))
                for _ in range(3)
            ]
            for step in range(9):
                found = flag(float(step in (3, 7)), device)
                factors = (growth, backoff, interval)
                torch._amp_update_scale_(*states[0], found, *factors)
                kernels.update(Update(*states[1], [found], *factors))
                # The same behind a check that finds nothing itself.
                ending = kernels.ending(Update(*states[2], [found], *factors))
                run_check(kernels, grads_of([grad]), ending=ending)
                assert ending.applied
                for state in states[1:]:
                    assert_same(state, states[0], f"interval {interval}, start {start}, {step}")


def test_more_flags_than_the_kernel_takes(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    for count in (1, 2, 4, 5, 9):
        for bad in (None, *range(count)):
            flags = [flag(float(i == bad), device) for i in range(count)]
            for rides in (False, True):
                scale = flag(8.0, device)
                tracker = torch.full((), 3, dtype=torch.int32, device=device)
                update = Update(scale, tracker, flags, 2.0, 0.5, 100)
                ending = kernels.ending(update) if rides else None
                assert (ending is not None) == (rides and count == 1)
                if ending is not None:
                    run_check(kernels, grads_of([torch.ones(3, device=device)]), ending=ending)
                    assert ending.applied
                else:
                    kernels.update(update)
                expected = (8.0, 4) if bad is None else (4.0, 0)
                assert (scale.item(), tracker.item()) == expected, (count, bad, rides)


@pytest.mark.parametrize("given", [None, 0.0, 1.0, math.nan])
@pytest.mark.parametrize("other", [0.0, 1.0, 2.0])
def test_an_update_behind_finite_gradients_takes_other_flags(
    backend: str, device: torch.device, given: float | None, other: float
) -> None:
    scale, tracker = flag(8.0, device), torch.zeros((), dtype=torch.int32, device=device)
    kernels = kernels_of(backend, device)
    ending = kernels.ending(Update(scale, tracker, [flag(other, device)], 2.0, 0.5, 1))
    found_inf = None if given is None else flag(given, device)
    found = run_check(
        kernels, grads_of([torch.ones(3, device=device)]), found_inf=found_inf, ending=ending
    )
    assert_same(found, flag(given or 0.0, device))
    assert scale.item() == (4.0 if other or given else 16.0)


def test_both_kinds_of_kernels_have_the_same_bits(device: torch.device) -> None:
    for backend in BACKENDS:
        if reason := unavailable_reason(backend):
            pytest.skip(reason)
    for seed in range(20):
        lists = [[make_gradient("long", d, seed).to(device) for d in FLOATS] for _ in range(2)]
        factor = flag(inverse_of(3.0 + seed), device)
        found = [
            run_unscale(kernels_of(backend, device), grads_of(grads), factor, is_scale=False)
            for backend, grads in zip(BACKENDS, lists, strict=True)
        ]
        assert_same([lists[0], found[0]], [lists[1], found[1]])


def test_functional_ops_take_the_backend(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    for bad in (None, math.inf):
        ours = [make_gradient("long", d, i).to(device) for i, d in enumerate(FLOATS)]
        if bad:
            ours[2][-1] = bad
        theirs = [g.cpu() for g in ours]
        state = (flag(3.0, device), torch.zeros((), dtype=torch.int32, device=device))
        found = flag(0.0, device)
        functional.check_(ours, found)
        assert found.item() == float(bad is not None)
        functional.unscale_(ours, found, flag(inverse_of(3.0), device))
        functional.update_scale_(*state, found, 2.0, 0.5, 1)
        for grad in theirs:
            torch._amp_foreach_non_finite_check_and_unscale_(
                [grad], torch.zeros(()), torch.tensor(inverse_of(3.0))
            )
        assert_same([g.cpu() for g in ours], theirs, "gradients")
        assert state[0].item() == (1.5 if bad else 6.0)
        functional.update_scale_(*state, found, 2.0, 0.5, 1)
        assert state[0].item() == (0.75 if bad else 12.0)


def test_layouts_are_walked_over_as_memory(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    for layout in ("transposed", "channels_last", "permuted", "odd_offset", "scalar"):
        for dtype in FLOATS:
            ours = make_gradient(layout, dtype).to(device)
            theirs = make_gradient(layout, dtype)
            run_unscale(kernels, grads_of([ours]), flag(3.0, device), is_scale=True)
            torch._amp_foreach_non_finite_check_and_unscale_(
                [theirs], torch.zeros(()), torch.tensor(inverse_of(3.0))
            )
            found = difference(ours.cpu(), theirs, f"{layout}, {dtype}")
            assert found is None, found


def test_more_elements_than_32_bits_count(backend: str, device: torch.device) -> None:
    if reason := require_memory(7):
        pytest.skip(reason)
    kernels = kernels_of(backend, device)
    piece, count = 2**26, 2**31 + 12_345
    pattern = make_gradient("long", torch.float16)[:65_536].to(device).repeat(piece // 65_536)
    grad = torch.empty(count, dtype=torch.float16, device=device)
    for begin in range(0, count, piece):
        part = grad[begin : begin + piece]
        part.copy_(pattern[: part.numel()])
    expected = (pattern.float() * flag(1 / 3, device)).half()
    assert run_check(kernels, grads_of([grad])).item() == 0.0
    found = run_unscale(kernels, grads_of([grad]), flag(1 / 3, device), is_scale=False)
    assert found.item() == 0.0
    for begin in range(0, count, piece):
        part = grad[begin : begin + piece].view(torch.int16)
        assert torch.equal(part, expected[: part.numel()].view(torch.int16)), f"from {begin}"
    for place in (-1, 2**31, 2**31 - 1, count - 4096):
        kept = grad[place].clone()
        grad[place] = math.inf
        assert run_check(kernels, grads_of([grad])).item() == 1.0, place
        grad[place] = kept
    assert run_check(kernels, grads_of([grad])).item() == 0.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ten_thousand_tensors(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    kernels = kernels_of(backend, device)
    chance = random.Random(5)
    sizes = [chance.randint(1, 700) for _ in range(10_000)]
    sizes[77] = 3 * window(dtype) + 1
    memory = torch.randn(sum(sizes), device=device).to(dtype)
    expected = memory.cpu()
    torch._amp_foreach_non_finite_check_and_unscale_(
        [expected], torch.zeros(()), torch.tensor(1 / 3)
    )
    grads = list(memory.split(sizes))
    found = run_unscale(kernels, grads_of(grads), flag(1 / 3, device), is_scale=False)
    assert found.item() == 0.0
    assert torch.equal(memory.cpu().view(BITS[dtype]), expected.view(BITS[dtype]))
    for bad in (0, 77, 5_000, 9_999):
        kept = grads[bad].clone()
        grads[bad][-1] = math.nan
        assert run_check(kernels, grads_of(grads)).item() == 1.0, bad
        grads[bad].copy_(kept)
    assert run_check(kernels, grads_of(grads)).item() == 0.0
