"""Failing collectives: gradients are divided once, and `step` agrees again."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gradients import parameter_with

from ampfast import GradScaler, distributed

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

SCALE, GRADIENT = 4.0, 16.0
STEPPED = 1.0 - GRADIENT
KINDS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "plain": lambda params: torch.optim.SGD(params, lr=1.0),
    "fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
}
Call = Callable[[GradScaler, Any], Any]
Make = Callable[..., GradScaler]


def clip(order: float, in_place: bool = True, limit: float = 1e3) -> Call:
    options: Any = {"in_place": in_place}
    return lambda scaler, given: scaler.clip_grad_norm_(given, limit, order, **options)


# Calls that write before the ranks agree.
DIVIDING: dict[str, tuple[str, Call]] = {
    "unscale_": ("plain", GradScaler.unscale_),
    "unscale_, fused": ("fused", GradScaler.unscale_),
    "step": ("plain", GradScaler.step),
    "step_and_update": ("plain", GradScaler.step_and_update),
}
READING: dict[str, tuple[str, Call]] = {
    "clip 3": ("plain", clip(3.0)),
    **{f"clip {order}": ("plain", clip(order)) for order in (2.0, math.inf)},
    "clip a list": ("plain", lambda scaler, optimizer: clip(3.0)(scaler, [optimizer])),
    **{f"clip {order}, fused": ("fused", clip(order)) for order in (2.0, 3.0, math.inf)},
    **{f"defer {order}": ("fused", clip(order, in_place=False)) for order in (2.0, 3.0, math.inf)},
    "grad_norm": ("plain", GradScaler.grad_norm),
    "step, fused": ("fused", GradScaler.step),
    "step_and_update, fused": ("fused", GradScaler.step_and_update),
}


class Failing:
    """Group of two equal ranks whose next collective may fail, and which counts the others."""

    fails, collectives = False, 0

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> Any:
        if self.fails:
            self.fails = False
            raise ConnectionError("connection closed by peer")
        self.collectives += 1
        return SimpleNamespace(wait=lambda: None)


class Overriding(GradScaler):
    """Subclass whose hook calls the original."""

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        return super()._unscale_grads_(*args, **kwargs)


def set_up(kind: str = "plain", make: Make = GradScaler, group: Any = None) -> tuple[Any, Any, Any]:
    """Started scaler, optimizer and parameter."""
    param = parameter_with(torch.full((3,), SCALE * GRADIENT))
    scaler = make("cpu", init_scale=SCALE, process_group=group or Failing())
    scaler.scale(torch.ones(()))
    return scaler, KINDS[kind]([param]), param


def fail(scaler: GradScaler, call: Callable[..., Any], *arguments: Any) -> None:
    """Calls while the next collective fails."""
    group: Any = scaler.process_group
    group.fails = True
    with pytest.raises(ConnectionError, match="connection closed by peer"):
        call(*arguments)
    assert not group.fails


def failed(call: Call, kind: str, make: Make = GradScaler) -> tuple[Any, Any, Any]:
    """Scaler, optimizer and parameter after a call whose collective failed."""
    scaler, optimizer, param = set_up(kind, make)
    fail(scaler, call, scaler, optimizer)
    return scaler, optimizer, param


def assert_equal(tensor: torch.Tensor, value: float) -> None:
    assert tensor.tolist() == [value] * 3


@pytest.mark.parametrize("make", [GradScaler, Overriding])
@pytest.mark.parametrize("path", DIVIDING)
def test_gradients_are_divided_once_and_the_step_agrees_again(path: str, make: Make) -> None:
    kind, call = DIVIDING[path]
    scaler, optimizer, param = failed(call, kind, make)
    for again in (GradScaler.unscale_, clip(2.0), clip(3.0)):
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            again(scaler, optimizer)
        assert_equal(param.grad, GRADIENT)
    fail(scaler, scaler.step, optimizer)
    assert_equal(param, 1.0)
    assert not any(hasattr(optimizer, name) for name in ("grad_scale", "found_inf"))
    scaler.step(optimizer)
    scaler.update()
    assert_equal(param, STEPPED)
    assert_equal(param.grad, GRADIENT)
    assert scaler.stats().skipped == 0


@pytest.mark.parametrize("path", DIVIDING)
def test_the_update_agrees_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, call = DIVIDING[path]
    scaler, _, param = failed(call, kind)
    fail(scaler, scaler.update)
    assert scaler.stats().steps == 0
    scaler.update()
    assert (scaler.stats().steps, scaler.stats().skipped) == (1, 0)
    assert_equal(param, 1.0)
    # The other ranks, whose collective was the same, wait for it.
    scaler, _, _ = failed(call, kind)
    agreed = []
    all_reduce_ = lambda _, tensor, op: agreed.append(tensor.fill_(1.0))  # noqa: E731
    monkeypatch.setattr(distributed.Group, "all_reduce_", all_reduce_)
    scaler.update(32.0)
    assert len(agreed) == 1
    assert (scaler.stats().skipped, scaler.get_scale()) == (1, 32.0)


@pytest.mark.parametrize("path", READING)
def test_a_call_that_wrote_nothing_may_be_repeated(path: str) -> None:
    kind, call = READING[path]
    scaler, optimizer, param = failed(call, kind)
    assert_equal(param.grad, SCALE * GRADIENT)
    assert_equal(param, 1.0)
    call(scaler, optimizer)
    if "step" not in path:
        scaler.step(optimizer)
    assert_equal(param, STEPPED)


def test_the_users_own_grad_scale() -> None:
    """`step` agrees on the quotients and may be repeated."""
    scaler, optimizer, param = set_up("fused")
    scaler.unscale_(optimizer)
    optimizer.grad_scale = torch.tensor(0.5)
    fail(scaler, scaler.step, optimizer)
    assert_equal(param, 1.0)
    scaler.step(optimizer)
    assert_equal(param, 1.0 - GRADIENT / 0.5)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_group_that_is_set_later_agrees(is_used: bool) -> None:
    scaler, optimizer, _ = set_up()
    group, scaler.process_group = scaler.process_group, None
    if is_used:
        scaler.step_and_update(optimizer)
    scaler.process_group = group
    scaler.step(optimizer)
    assert group.collectives == 1


def test_what_was_refused_is_not_agreed_on() -> None:
    scaler, optimizer, param = set_up()
    param.data, param.grad = torch.zeros(3, dtype=torch.float16), None
    param.grad = torch.ones(3, dtype=torch.float16)
    with pytest.raises(ValueError, match="unscale FP16"):
        scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    assert scaler.process_group.collectives == 0
    param.data, param.grad = torch.zeros(3), None
    param.grad = torch.ones(3)
    scaler.step(optimizer)
    assert scaler.process_group.collectives == 1
