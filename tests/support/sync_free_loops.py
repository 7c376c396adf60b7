"""Optimizers and training loops for the tests of `sync_free_`, on any device."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch

import ampfast
from support.gradients import plant

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "foreach": (torch.optim.Adam, {"lr": 0.1, "foreach": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "maximize": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.5, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "nesterov": True}),
    "dampened": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "dampening": 0.3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.5, "lr_decay": 0.01}),
}
# Shapes for all kernels, with a scalar, an empty and a permuted tensor.
SHAPES = ((3, 5), (17,), (), (0,), (2, 3, 4))
BAD = (None, math.inf, None, math.nan, None, None)


def parameters(device: torch.device | str = "cpu") -> list[torch.nn.Parameter]:
    values = [_drawn(i, shape) for i, shape in enumerate(SHAPES)]
    values[0], values[1] = values[0].t().contiguous().t(), values[1].double()
    return [torch.nn.Parameter(value.to(device)) for value in values]


def _drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, the second with another learning rate."""
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]


class Loop:
    """Optimizer with gradients drawn from seeds, with a scaler or without."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.params[0].device

    def step(self, seed: int, bad: float | None = None) -> None:
        self.draw(seed, bad)
        self.finish()

    def draw(self, seed: int, bad: float | None = None) -> None:
        """Scaled gradients."""
        self.optimizer.zero_grad()
        factor = 1.0
        if self.scaler is not None:
            scaled = self.scaler.scale(torch.ones((), device=self.device))
            factor = scaled.to(torch.float64)
        for i, p in enumerate(self.params):
            drawn = _drawn(100 * seed + i, tuple(p.shape)).to(self.device)
            p.grad = torch.empty_like(p).copy_(drawn * factor)
        if bad is not None:
            plant(self.params[1].grad, "middle", bad)

    def finish(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def run(self, bad: Iterable[float | None], start: int = 0) -> None:
        for seed, value in enumerate(bad, start):
            self.step(seed, value)

    def observe(self) -> dict[str, Any]:
        return {
            "parameters": [p.detach() for p in self.params],
            "optimizer": self.optimizer.state_dict(),
            "scale": None if self.scaler is None else self.scaler.get_scale(),
        }


def fused_twin(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Any:
    """Optimizer made with `fused=True` and the state and values of a plain one."""
    copied = [
        {"params": [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    options = {key: value for key, value in options.items() if key != "foreach"}
    twin = type(optimizer)(copied, **options, fused=True, foreach=False)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group.update(fused=True, foreach=False)
    twin.load_state_dict(saved)
    return twin


def plain(kind: str, steps: int = 0, **options: Any) -> Loop:
    """Loop after some steps of a plain optimizer."""
    make, defaults = KINDS[kind]
    loop = Loop(make(in_groups(parameters()), **{**defaults, **options}))
    loop.run([None] * steps)
    return loop


def make_free(loop: Loop, scaler: Any = None) -> Loop:
    return Loop(ampfast.sync_free_(loop.optimizer), scaler)
