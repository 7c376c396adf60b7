"""In-place clipping: norms and gradients, whole trainings, and several optimizers together."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.clipping_reference import (
    NORM_ULPS,
    assert_clipped,
    assert_norm,
    clip_by_hand,
    coefficient_of,
    exact_norm,
    grads_of,
    ulps,
    unscaled,
)
from support.comparison import FLOATS, assert_same
from support.gradients import WRITABLE_LAYOUTS, make_gradient, parameter_with, plant, sgd_with
from support.optimizers import OPTIMIZERS
from support.processes import threads
from support.scalers import started
from support.twins import assert_sides_same, paired

from ampfast import GradScaler, functional

INF = math.inf
ORDERS = (2.0, INF, 1.0, 3.0)
# In "overlapping" shared elements are unscaled once per alias.
CLIPPED_LAYOUTS = [layout for layout in WRITABLE_LAYOUTS if layout != "overlapping"]
# Exact, inexact, and one that is large but has a finite inverse.
SCALES = (2.0**12, 3.0, 1e-3)


def scaler_for(scale: float, **arguments: object) -> GradScaler:
    return started(GradScaler, scale, allow_fp16=True, **arguments)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_norm_and_gradients(backend: str, dtype: torch.dtype, order: float, scale: float) -> None:
    for layout in CLIPPED_LAYOUTS:
        for max_norm in (0.7, 1e9):
            optimizer = sgd_with(*(make_gradient(layout, dtype, seed) for seed in range(3)))
            before = [grad.clone() for grad in grads_of(optimizer)]
            norm = scaler_for(scale, backend=backend).clip_grad_norm_(optimizer, max_norm, order)
            assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            exact = exact_norm(before, scale, order)
            if order == 2.0:
                assert_norm(norm, exact)
            else:
                # Of the written values, rounded to the dtype.
                assert norm.item() == pytest.approx(exact, rel=max(torch.finfo(dtype).eps, 1e-14))
            assert_clipped(grads_of(optimizer), before, scale, norm, max_norm)


@pytest.mark.parametrize("value", [1 / 3, 1.1, 0.7, 5e-3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_of_equal_values(capability: str, dtype: torch.dtype, value: float) -> None:
    # All rounding errors have the same sign here.
    grads = [torch.full((size,), value, dtype=dtype) for size in (1, 100_003, 17, 64, 16_385)]
    assert_norm(scaler_for(3.0).grad_norm(sgd_with(*grads)), exact_norm(grads, 3.0))
    assert_norm(functional.grad_norm(grads), exact_norm(grads, 1.0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_clipped_gradients_on_every_instruction_set(capability: str, dtype: torch.dtype) -> None:
    for size in (1, 15, 16, 17, 33, 16 * 1024 + 5):
        optimizer = sgd_with(torch.randn(size + 1).to(dtype)[1:])
        before = [grad.clone() for grad in grads_of(optimizer)]
        norm = scaler_for(3.0).clip_grad_norm_(optimizer, 1e-2)
        [written] = unscaled(before, 3.0)
        wide = written.to(torch.promote_types(dtype, torch.float32))
        expected = (wide * coefficient_of(norm, 1e-2).to(wide.dtype)).to(dtype)
        assert_same(grads_of(optimizer)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_16_bit_values_are_clipped(capability: str, dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    optimizer = sgd_with(finite.clone())
    norm = scaler_for(4.0).clip_grad_norm_(optimizer, 1e3, INF)
    assert norm.item() == torch.finfo(dtype).max / 4
    coefficient = coefficient_of(norm, 1e3).float()
    expected = ((finite.float() * 0.25).to(dtype).float() * coefficient).to(dtype)
    assert_same(grads_of(optimizer)[0], expected)


@pytest.mark.slow
def test_a_norm_of_many_elements_is_exact_where_torchs_is_not() -> None:
    # torch adds up float32 squares in float32.
    grad = torch.rand(10**8, generator=torch.Generator().manual_seed(3))
    exact = math.sqrt(math.fsum(part.double().square().sum().item() for part in grad.split(10**6)))
    error = abs(torch.linalg.vector_norm(grad).item() - exact) / exact
    norm = started(GradScaler, 1.0).grad_norm(sgd_with(grad))
    assert abs(norm.item() - exact) / exact <= min(error, NORM_ULPS * 2.0**-23)
    print(f"torch's norm of 1e8 elements is off by {error:.2%}")


@pytest.mark.parametrize("max_norm", [0.0, 0.05, INF])
@pytest.mark.parametrize("order", [2.0, "inf"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_torchs_with_our_norm(kind: str, order: float, max_norm: float) -> None:
    # torch's scaler, with its unscaled gradients multiplied by the coefficient of our norm.
    ours, theirs = paired(kind, init_scale=2.0**12, growth_interval=2)
    for seed in range(8):
        for run in (ours, theirs):
            run.optimizer.zero_grad()
            run.scaler.scale(run.loss(seed)).backward()
            if seed in (3, 6):
                plant(next(run.model.parameters()).grad, "middle", INF if seed == 3 else math.nan)
        norm = ours.scaler.clip_grad_norm_(ours.optimizer, max_norm, order)
        theirs.scaler.unscale_(theirs.optimizer)
        clip_by_hand(theirs.model.parameters(), norm, max_norm)
        assert_sides_same(ours, theirs)
        skipped = ours.scaler.step_skipped(ours.optimizer)
        assert skipped == (seed in (3, 6)) != norm.isfinite().item()
        for run in (ours, theirs):
            run.scaler.step(run.optimizer)
            run.scaler.update()
        if kind not in ("fused_sgd",):  # without deliberate differences
            assert_sides_same(ours, theirs)


def test_joint_norm_of_several_optimizers() -> None:
    grads = [make_gradient("contiguous", dtype, seed) for seed, dtype in enumerate(FLOATS)]
    idle = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    optimizers = [*(sgd_with(grad.clone()) for grad in grads), idle]
    together = sgd_with(*(grad.clone() for grad in grads))
    scaler = scaler_for(3.0)
    norm = scaler.clip_grad_norm_(tuple(optimizers), 0.3)
    assert_same(norm, scaler.clip_grad_norm_(together, 0.3))
    assert norm.dtype == torch.float64
    assert_same(grads_of(*optimizers), grads_of(together))
    for optimizer in optimizers[:-1]:
        assert scaler.found_inf(optimizer).item() == 0.0
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(idle)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("value", [INF, math.nan])
@pytest.mark.parametrize("bad", [None, 0, 1])
def test_joint_clipping_skips_all_or_none(
    bad: int | None, value: float, in_place: bool, fused: bool
) -> None:
    """An overflow in one optimizer is in the coefficient of the other's gradients."""
    if not (in_place or fused):
        pytest.skip("a plain optimizer's gradients are written")
    grads = [torch.tensor([3.0 * 8, 0.0]), torch.tensor([4.0 * 8])]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    optimizers = [torch.optim.SGD([param], lr=1.0, fused=fused) for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    if bad is not None:
        grads[bad][0] = value
    scaler = started(GradScaler, 8.0, growth_interval=1)
    norm = scaler.clip_grad_norm_(optimizers, 1.0, in_place=in_place)
    assert_same(norm, torch.tensor(5.0 if bad is None else value))
    assert [scaler.step_skipped(o) for o in optimizers] == [bad is not None] * 2
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (16.0 if bad is None else 4.0)
    for param in params:
        assert param.isfinite().all()
        assert bool(param.detach().any()) == (bad is None)


@pytest.mark.usefixtures("small_grain")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_same_bits_with_any_thread_count(dtype: torch.dtype) -> None:
    seen = []
    for count in (1, 2, 3, 5):
        grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (200_003, 7)]
        optimizer = sgd_with(*(grad.to(dtype) for grad in grads))
        with threads(count):
            norm = scaler_for(3.0).clip_grad_norm_(optimizer, 1.0)
        seen.append([norm, *grads_of(optimizer)])
    for other in seen[1:]:
        assert_same(other, seen[0])


def test_a_norm_beyond_float32() -> None:
    # As in torch: the gradients are finite, so the step is taken, with zeros.
    optimizer = sgd_with(torch.full((4,), 3e38))
    norm = started(GradScaler, 1.0).clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == INF
    assert_same(grads_of(optimizer)[0], torch.zeros(4))
    wide = sgd_with(torch.full((4,), 3e38), torch.zeros(1, dtype=torch.float64))
    norm = started(GradScaler, 1.0).clip_grad_norm_(wide, 1.0)
    assert ulps(norm, torch.tensor(6e38, dtype=torch.float64)) < 2.0**30


# Values whose norms overflow: regular, and in a layout for torch's ops.
def even(value: float, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.full((4,), value, dtype=dtype), torch.full((3, 4), value, dtype=dtype)[:, ::2]]


@pytest.mark.parametrize(
    ("fused", "in_place"), [(False, True), (True, True), (True, False)], ids=str
)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_an_infinite_limit_only_unscales(
    backend: str, order: float, fused: bool, in_place: bool
) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for value in (torch.finfo(dtype).max, 0.0):
            sides = []
            for clips in (True, False):
                params = [parameter_with(grad) for grad in even(value, dtype)]
                optimizer = torch.optim.SGD(params, lr=2.0**-40, fused=fused)
                scaler = started(GradScaler, 2.0, backend=backend)
                if clips:
                    norm = scaler.clip_grad_norm_(optimizer, INF, order, in_place=in_place)
                    assert norm.isinf() == (value != 0 and order != INF)
                elif in_place:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                assert not scaler.step_skipped(optimizer)
                sides.append((params, grads_of(optimizer)))
            assert_same(*sides)
            assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize("scale", [1.0, 1e-30, INF])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e308])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_no_parameter_becomes_nan_at_extreme_norms(
    backend: str, order: float, max_norm: float, scale: float
) -> None:
    for dtype in FLOATS:
        for value in (0.0, torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max):
            for fused, in_place in ((False, True), (True, True), (True, False)):
                params = [parameter_with(grad) for grad in even(value, dtype)]
                optimizer = torch.optim.SGD(params, lr=2.0**-40, fused=fused)
                scaler = started(GradScaler, scale, backend=backend, allow_fp16=True)
                scaler.clip_grad_norm_(optimizer, max_norm, order, in_place=in_place)
                scaler.step(optimizer)
                assert all(p.isfinite().all() for p in params), (dtype, value, fused, in_place)


@pytest.mark.parametrize("order", ORDERS)
def test_a_disabled_scaler_does_not_clip_to_infinity(order: float) -> None:
    for dtype in (torch.float32, torch.float64):
        optimizer = sgd_with(*even(torch.finfo(dtype).max, dtype))
        GradScaler("cpu", enabled=False).clip_grad_norm_(optimizer, INF, order)
        assert_same(grads_of(optimizer), even(torch.finfo(dtype).max, dtype))


@pytest.mark.parametrize("order", [2.0, 3.0, math.inf])
def test_groups_of_parameters_that_can_be_read_once(order: float) -> None:
    clipped = []
    for once in (False, True):
        params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        for param in params:
            param.grad = torch.full((2,), 8.0)
        optimizer: Any = SimpleNamespace(
            param_groups=[{"params": iter(params) if once else params}]
        )
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        norm = scaler.clip_grad_norm_(optimizer, 1.0, order)
        clipped.append((norm, [param.grad for param in params]))
    torch.testing.assert_close(clipped[1], clipped[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_the_norm_without_a_limit_is_of_values_before_rounding(backend: str) -> None:
    """Of gradients that torch's ops take, too: all of these vanish as they are written."""
    values = torch.tensor([3.0, 9.0, 4.0, 9.0], dtype=torch.float16)
    optimizer = sgd_with(values[::2], torch.tensor([12.0], dtype=torch.float16))
    scaler = started(GradScaler, 2.0**60, allow_fp16=True, backend=backend)
    norm = scaler.clip_grad_norm_(optimizer, math.inf)
    assert norm.item() == pytest.approx(13.0 / 2.0**60, rel=1e-6, abs=0)
    assert values[::2].eq(0).all()
