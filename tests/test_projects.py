"""Scaler usage of other projects, bit for bit as with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import OPTIMIZERS
from support.outcomes import agree
from support.scalers import Scaler
from support.twins import Side, side

OptState = torch.amp.grad_scaler.OptState
INF = float("inf")


def backward(one: Side, seed: int, bad: bool = False) -> None:
    one.optimizer.zero_grad()
    one.scaler.scale(one.loss(seed)).backward()
    if bad:
        next(one.model.parameters()).grad[0, 0] = INF


def composer(scaler_type: Scaler) -> Any:
    """Closure optimizers: one scaler, state popped so that unscale_ can be called again."""
    one = side(scaler_type, "sgd", init_scale=64.0, growth_interval=2)
    for seed in range(6):
        backward(one, seed)
        one.scaler.unscale_(one.optimizer)
        state = one.scaler._per_optimizer_states[id(one.optimizer)]
        if seed == 3:
            for flag in state["found_inf_per_device"].values():
                flag.add_(1.0)
        state["stage"] = OptState.READY
        one.scaler.scale(one.loss(seed + 50)).backward()
        one.scaler.step(one.optimizer)
        one.scaler.update()
    return one.observe()


def lightning(scaler_type: Scaler) -> Any:
    """The closure runs first; a step counts as skipped if `optimizer.step` was not called."""
    one = side(scaler_type, "adam", init_scale=64.0, growth_interval=2)
    ran: list[int] = []
    inner = one.optimizer.step
    one.optimizer.step = lambda *args, **kwargs: ran.append(1) or inner(*args, **kwargs)
    scheduler_steps = 0
    for seed in range(6):
        backward(one, seed, bad=seed in (1, 4))
        before = len(ran)
        one.scaler.unscale_(one.optimizer)
        one.scaler.step(one.optimizer)
        one.scaler.update()
        scheduler_steps += len(ran) > before
    saved = one.scaler.state_dict()
    fresh = scaler_type("cpu")
    fresh.load_state_dict(saved)
    return [scheduler_steps, saved, fresh.state_dict(), one.observe()]


def hivemind(scaler_type: Scaler) -> Any:
    """Delays the update: several steps per update by resetting the stage under a lock."""

    class Delayed(scaler_type):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__("cpu", init_scale=64.0, growth_interval=2)
            self._ready = False

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._per_optimizer_states[id(optimizer)]["stage"] == OptState.STEPPED:
                self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
            self._ready = True
            return super().step(optimizer, *args, **kwargs)

        def update(self, new_scale: Any = None) -> bool:
            if not self._ready:
                return False
            super().update(new_scale)
            self._ready = False
            return True

        def _unscale_grads_(self, optimizer: Any, inv: Any, found: Any, allow_fp16: bool) -> Any:
            return super()._unscale_grads_(optimizer, inv, found, allow_fp16=True)

        def are_grads_finite(self, optimizer: Any) -> bool:
            return not sum(v.item() for v in self._check_inf_per_device(optimizer).values())

    one, seen = side(scaler_type), []
    one.scaler = scaler = Delayed()
    for seed in range(6):
        backward(one, seed, bad=seed == 3)
        seen.append(scaler.are_grads_finite(one.optimizer))
        scaler.step(one.optimizer)
        if seed % 2:
            seen.append(scaler.update())
        seen.append(scaler.update())
    return [seen, one.observe()]


def megatron(scaler_type: Scaler) -> Any:
    """fp32 main parameters beside the model's; flags reduced over ranks; own inverse scale."""
    one = side(scaler_type, "adam", init_scale=1024.0, growth_interval=2)
    mains = [p.detach().clone().requires_grad_() for p in one.model.parameters()]
    optimizer = OPTIMIZERS["adam"](mains)
    for seed in range(5):
        backward(one, seed, bad=seed == 2)
        for main, p in zip(mains, one.model.parameters(), strict=True):
            main.grad = p.grad.float()
        one.scaler.unscale_(optimizer)
        for flag in one.scaler._found_inf_per_device(optimizer).values():
            flag.add_(flag.clone())
        one.scaler.step(optimizer)
        one.scaler.update()
        with torch.no_grad():
            for main, p in zip(mains, one.model.parameters(), strict=True):
                p.copy_(main)
    return [[m.detach() for m in mains], one.observe()]


@pytest.mark.parametrize(
    "project", [composer, lightning, hivemind, megatron], ids=lambda project: project.__name__
)
def test_projects(project: Callable[[Scaler], Any]) -> None:
    assert agree(project).error is None
