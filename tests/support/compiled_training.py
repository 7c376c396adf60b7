"""Training loop for CUDA graphs and torch.compile, and its graph breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampfast import GradScaler
from support.scalers import TorchScaler

SHAPE = (37, 129)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.25),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, capturable=True),
    "one_by_one_adam": lambda params: torch.optim.Adam(
        params, lr=torch.tensor(0.1, device=params[0].device), capturable=True, foreach=False
    ),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, capturable=True),
    "fused_sgd": lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5, fused=True),
    "fused_adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True, capturable=True),
    "fused_adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True, capturable=True),
}
# Plain ones, whose steps the replays of a CUDA graph can skip.
SKIPPABLE = ("sgd", "momentum", "adam", "one_by_one_adam", "rmsprop")
# More finite iterations in a row than the interval, and more than one overflow.
BAD_AT = (4, 5, 9)
SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}


class Training:
    """Net of elementwise operations, so that captured and eager gradients have the same bits."""

    def __init__(self, scaler: Any, kind: str, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(4)
        self.scaler = scaler
        self.weight, self.bias = (
            torch.nn.Parameter(torch.randn(SHAPE, generator=generator, device=device))
            for _ in range(2)
        )
        self.params = [self.weight, self.bias]
        self.optimizer = OPTIMIZERS[kind](self.params)
        self.input = torch.zeros(SHAPE, device=device)

    def feed(self, iteration: int) -> None:
        """Sets the input in place; some make gradients overflow."""
        generator = torch.Generator(self.input.device).manual_seed(iteration)
        drawn = torch.randn(SHAPE, generator=generator, device=self.input.device)
        if iteration in BAD_AT:
            drawn[3, 5] = torch.inf
        self.input.copy_(drawn)

    def backward(self) -> None:
        loss = ((self.input * self.weight + self.bias).square() / 64).sum()
        self.scaler.scale(loss).backward()

    def step(self, together: bool = False) -> None:
        if together and hasattr(self.scaler, "step_and_update"):
            self.scaler.step_and_update(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def iterate(self, iteration: int, together: bool = False) -> None:
        self.feed(iteration)
        self.optimizer.zero_grad()
        self.backward()
        self.step(together)

    def observe(self) -> list[Any]:
        scaler = self.scaler
        return [
            [p.detach() for p in self.params],
            self.optimizer.state_dict()["state"],
            scaler.get_scale(),
            scaler._get_growth_tracker(),
        ]


def graph_breaks(scaler: Any, kind: str, device: torch.device) -> int:
    """Number of graph breaks of a compiled iteration."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    training = Training(scaler, kind, device)

    def iteration() -> None:
        training.optimizer.zero_grad()
        training.backward()
        training.scaler.step(training.optimizer)
        training.scaler.update()

    compiled = torch.compile(iteration, backend="eager")
    for i in range(3):
        training.feed(i)
        compiled()
    assert training.params[0].isfinite().all()
    broken = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return broken


def assert_no_more_breaks(kind: str, device: torch.device, backend: str | None = None) -> None:
    """Asserts at most torch's number of breaks; fewer breaks may leave more graphs."""
    theirs = graph_breaks(TorchScaler(device.type, **SETTINGS), kind, device)
    ours = graph_breaks(GradScaler(device.type, backend=backend, **SETTINGS), kind, device)
    assert 0 < ours <= theirs, (ours, theirs)
