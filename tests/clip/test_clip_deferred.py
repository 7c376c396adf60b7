"""Clipping with `in_place=False`: gradients stay unchanged, the optimizer's division clips."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from support.comparison import FLOATS, assert_same, started
from support.gradients import make_gradient, parameter_with, plant
from support.models import coefficient_of, exact_norm, grads_in
from support.optimizers import OPTIMIZERS, Legacy
from support.steps import TAKE_GRAD_SCALE, assert_sides_same, paired

from ampfast import GradScaler

INF = math.inf


def divisor_of(scale: float, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    coefficient = coefficient_of(norm, max_norm)
    return (torch.full_like(coefficient, scale) / coefficient).float()


class Watched(torch.optim.SGD):
    """Optimizer that records `grad_scale` and `found_inf` and takes no step."""

    _step_supports_amp_scaling = True

    def __init__(self, *gradients: torch.Tensor) -> None:
        super().__init__([parameter_with(g) for g in gradients], lr=1.0)
        self.handed: list[tuple[torch.Tensor, Any]] = []

    def step(self, closure: Any = None) -> str:
        self.handed.append((self.grad_scale, self.found_inf))
        return "stepped"


@pytest.mark.parametrize("max_norm", [0.0, 0.05, 1e9, INF])
@pytest.mark.parametrize("order", [2.0, INF, 1.0])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_the_divisor_is_scale_over_coefficient(backend: str, order: float, max_norm: float) -> None:
    optimizer = Watched(*(make_gradient("long", dtype, 1) for dtype in FLOATS))
    before = [grad.clone() for grad in grads_in(optimizer)]
    scaler = started(GradScaler, 3.0, backend=backend)
    norm = scaler.clip_grad_norm_(optimizer, max_norm, order, in_place=False)
    # The largest magnitude is that of the values to be written, here in bfloat16.
    tolerance = torch.finfo(torch.bfloat16).eps if order == INF else 1e-6
    assert norm.item() == pytest.approx(exact_norm(before, 3.0, order), rel=tolerance)
    assert scaler.step(optimizer) == "stepped"
    [(grad_scale, found_inf)] = optimizer.handed
    assert_same(grad_scale, divisor_of(3.0, norm, max_norm))
    assert_same(found_inf, torch.tensor(0.0))
    assert_same(grads_in(optimizer), before)
    for name in ("grad_scale", "found_inf"):
        assert not hasattr(optimizer, name)


@pytest.mark.parametrize("kind", TAKE_GRAD_SCALE)
def test_training_is_that_of_the_optimizers_own_division(kind: str) -> None:
    # The same optimizer with the `grad_scale` that ours must set.
    ours, theirs = paired(kind, init_scale=2.0**12, growth_interval=100)
    for seed in range(8):
        for run in (ours, theirs):
            run.optimizer.zero_grad()
            run.scaler.scale(run.loss(seed)).backward()
            if seed == 5:
                plant(next(run.model.parameters()).grad, "middle", INF)
        scale = ours.scaler.get_scale()
        norm = ours.scaler.clip_grad_norm_(ours.optimizer, 0.05, in_place=False)
        ours.scaler.step(ours.optimizer)
        theirs.optimizer.grad_scale = divisor_of(scale, norm, 0.05)
        theirs.optimizer.found_inf = torch.tensor(float(seed == 5))
        theirs.optimizer.step()
        del theirs.optimizer.grad_scale, theirs.optimizer.found_inf
        theirs.scaler._check_inf_per_device(theirs.optimizer)
        assert ours.scaler.step_skipped(ours.optimizer) == (seed == 5)
        for run in (ours, theirs):
            run.scaler.update()
        assert_sides_same(ours, theirs)


@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
@pytest.mark.parametrize("order", [2.0, INF, 1.0])
def test_a_gradient_that_is_not_finite_skips(order: float, bad: float) -> None:
    strided = make_gradient("every_other")
    strided[1, 2] = bad
    grad = torch.tensor([1.0, bad])
    for grads in ([grad], [strided], [torch.ones(3), strided], [torch.ones(3).double(), strided]):
        optimizer, before = Watched(*grads), [each.clone() for each in grads]
        scaler = started(GradScaler, 4.0)
        norm = scaler.clip_grad_norm_(optimizer, 1.0, order, in_place=False)
        assert_same(norm.float(), torch.tensor(abs(bad)))
        assert scaler.step_skipped(optimizer)
        for flag in scaler._found_inf_per_device(optimizer).values():
            flag.mul_(2.0)  # as of summed ones
        scaler.step(optimizer)
        assert optimizer.handed[0][1].item() == 1.0
        assert_same([each.contiguous() for each in grads], before)
        scaler.update()
        assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_users_own_grad_scale_is_refused(when: str) -> None:
    gradient = torch.tensor([24.0, 32.0])
    optimizer, scaler = Watched(gradient.clone()), started(GradScaler, 8.0)
    if when == "after":
        scaler.clip_grad_norm_(optimizer, 1.0, in_place=False)
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(ValueError, match="sets the grad_scale of Watched, which has one already"):
        if when == "after":
            scaler.step(optimizer)
        else:
            scaler.clip_grad_norm_(optimizer, 1.0, in_place=False)
    assert optimizer.handed == []
    assert_same(grads_in(optimizer), [gradient])
    del optimizer.grad_scale
    if when == "before":
        scaler.clip_grad_norm_(optimizer, 1.0, in_place=False)
    scaler.step(optimizer)
    assert_same(optimizer.handed[0][0], divisor_of(8.0, torch.tensor(5.0), 1.0))


def test_a_deferred_clipping_ends_with_the_iteration() -> None:
    optimizer = Watched(torch.tensor([24.0, 32.0], dtype=torch.float16))  # only read
    scaler = started(GradScaler, 8.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0, in_place=False).item() == 5.0
    scaler.step(optimizer)
    scaler.update()
    assert scaler._per_optimizer_states == {}
    scaler.step(optimizer)
    assert optimizer.handed[1][0].item() == 8.0
    scaler.update()
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()


def test_a_legacy_optimizer_gets_written_gradients() -> None:
    gradient = torch.tensor([24.0, 32.0])
    legacy, watched = Legacy([parameter_with(gradient.clone())], lr=1.0), Watched(gradient)
    scaler = started(GradScaler, 8.0)
    norm = scaler.clip_grad_norm_([legacy, watched], 1.0, in_place=False)
    expected = torch.tensor([3.0, 4.0]) * coefficient_of(norm, 1.0).float()
    assert_same(grads_in(legacy, watched), [expected, torch.tensor([24.0, 32.0])])
    scaler.step(watched)
    assert_same(watched.handed[0][0], divisor_of(8.0, norm, 1.0))


@pytest.mark.parametrize("kind", TAKE_GRAD_SCALE)
@pytest.mark.parametrize("above", [None, 100.0])
def test_a_gradient_that_overlaps_itself_is_refused(kind: str, above: float | None) -> None:
    """A fused kernel would write behind its memory."""
    optimizer = OPTIMIZERS[kind]([torch.nn.Parameter(torch.zeros(3, 4))])
    [param] = optimizer.param_groups[0]["params"]
    param.grad = torch.arange(1.0, 5.0).expand(3, 4)
    scaler = started(GradScaler, skip_above=above)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        scaler.clip_grad_norm_(optimizer, 1.0, in_place=False)
    assert scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] == {}
    assert param.grad.eq(torch.arange(1.0, 5.0)).all()
