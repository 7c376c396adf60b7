"""Scaler usage of other projects, bit for bit as with torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import OPTIMIZERS
from support.outcomes import agree
from support.scalers import Scaler
from support.twins import side, small_model

OptState = torch.amp.grad_scaler.OptState
INF = float("inf")


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))


def composer(scaler_type: Scaler) -> Any:
    """Closure optimizers: one scaler, state popped so that unscale_ can be called again."""
    one = side(scaler_type, "sgd", init_scale=64.0, growth_interval=2)
    for seed in range(6):
        one.optimizer.zero_grad()
        one.scaler.scale(one.loss(seed)).backward()
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
        one.optimizer.zero_grad()
        one.scaler.scale(one.loss(seed)).backward()
        if seed in (1, 4):
            one.model[2].weight.grad[0, 0] = INF
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

    model = small_model()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    scaler = Delayed()
    seen = []
    for seed in range(6):
        optimizer.zero_grad()
        scaler.scale(model(inputs(seed)).square().mean()).backward()
        if seed == 3:
            model[0].bias.grad[0] = INF
        seen.append(scaler.are_grads_finite(optimizer))
        scaler.step(optimizer)
        if seed % 2:
            seen.append(scaler.update())
        seen.append(scaler.update())
    return [seen, model.state_dict(), scaler.state_dict()]


def mmengine(scaler_type: Scaler) -> Any:
    """A static scale by `update(value)` after each step, and a checkpoint of the scaler."""
    one = side(scaler_type, "momentum", init_scale=512.0)
    for seed in range(4):
        one.optimizer.zero_grad()
        one.scaler.scale(one.loss(seed)).backward()
        if seed == 2:
            one.model[0].bias.grad[0] = float("nan")
        one.scaler.unscale_(one.optimizer)
        torch.nn.utils.clip_grad_value_(one.model.parameters(), 0.01)
        one.scaler.step(one.optimizer)
        one.scaler.update(512.0)
    return one.observe()


def megatron(scaler_type: Scaler) -> Any:
    """fp32 main parameters beside the model's; flags reduced over ranks; own inverse scale."""
    one = side(scaler_type, "adam", init_scale=1024.0, growth_interval=2)
    mains = [p.detach().clone().requires_grad_() for p in one.model.parameters()]
    optimizer = OPTIMIZERS["adam"](mains)
    for seed in range(5):
        one.model.zero_grad()
        one.scaler.scale(one.loss(seed)).backward()
        for main, p in zip(mains, one.model.parameters(), strict=True):
            main.grad = p.grad.float()
        if seed == 2:
            mains[0].grad[0, 0] = INF
        one.scaler.unscale_(optimizer)
        for flag in one.scaler._found_inf_per_device(optimizer).values():
            flag.add_(flag.clone())
        one.scaler.step(optimizer)
        one.scaler.update()
        with torch.no_grad():
            for main, p in zip(mains, one.model.parameters(), strict=True):
                p.copy_(main)
    return [[m.detach() for m in mains], one.observe()]


def wrapped_optimizer(scaler_type: Scaler) -> Any:
    """Wrapper that shares the optimizer's groups (Accelerate, fairseq, DeepSpeed)."""

    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        @property
        def param_groups(self) -> list[dict[str, Any]]:
            return [dict(group) for group in self.inner.param_groups]

        def step(self, closure: Any = None) -> str:
            self.inner.step(closure)
            return "stepped"

    one = side(scaler_type, "adam", init_scale=64.0, growth_interval=2)
    wrapper = Wrapper(one.optimizer)
    results = []
    for seed in range(5):
        one.optimizer.zero_grad()
        one.scaler.scale(one.loss(seed)).backward()
        if seed == 1:
            one.model[0].bias.grad[0] = INF
        # Unscaled under one object's name, stepped under the other's.
        if seed == 3:
            one.scaler.unscale_(one.optimizer)
            one.scaler._per_optimizer_states[id(wrapper)] = one.scaler._per_optimizer_states.pop(
                id(one.optimizer)
            )
        results.append(one.scaler.step(wrapper))
        one.scaler.update()
    return [results, one.observe()]


def reset_records(scaler_type: Scaler) -> Any:
    """Replaces all records after a failed step, as loops that retry a batch do."""
    one = side(scaler_type, "sgd", init_scale=64.0, growth_interval=2)
    refresh = torch.amp.grad_scaler._refresh_per_optimizer_state
    for seed in range(5):
        one.optimizer.zero_grad()
        one.scaler.scale(one.loss(seed)).backward()
        one.scaler.unscale_(one.optimizer)
        if seed == 2:
            one.scaler._per_optimizer_states = defaultdict(refresh)
            continue
        if seed == 3:
            one.scaler._per_optimizer_states[id(one.optimizer)] = refresh()
        one.scaler.step(one.optimizer)
        one.scaler.update()
    return one.observe()


def floor_on_the_scale(scaler_type: Scaler) -> Any:
    """Manual lower bound, through every way to write the scale."""
    one = side(scaler_type, "sgd", init_scale=16.0)
    for seed in range(10):
        one.train(seed, INF)
        if one.scaler.get_scale() < 4.0:
            if seed % 3 == 0:
                one.scaler._scale = torch.tensor(4.0)
            elif seed % 3 == 1:
                one.scaler._scale.fill_(4.0)
            else:
                one.scaler.update(4.0)
    return one.observe()


PROJECTS: list[Callable[[Scaler], Any]] = [
    composer,
    lightning,
    hivemind,
    mmengine,
    megatron,
    wrapped_optimizer,
    reset_records,
    floor_on_the_scale,
]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.__name__)
def test_projects(project: Callable[[Scaler], Any]) -> None:
    assert agree(project).error is None


def test_autocast_training() -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, "adam", init_scale=2.0**24, growth_interval=3)
        scales = []
        for seed in range(12):
            one.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = one.model(inputs(seed)).float().square().mean()
            one.scaler.scale(loss).backward()
            one.scaler.step(one.optimizer)
            one.scaler.update()
            scales.append(one.scaler.get_scale())
        return [scales, one.observe()]

    scales = agree(use).value[0]
    assert scales[0] < 2.0**24, "the start scale was meant to overflow"
