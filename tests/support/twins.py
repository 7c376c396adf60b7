"""Twins, which train small models and differ in the scaler alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ampfast import GradScaler
from support.comparison import assert_same
from support.gradients import filled, plant
from support.optimizers import OPTIMIZERS
from support.scalers import TorchScaler


@dataclass
class Side:
    """Scaler, small model and optimizer; one of two twins."""

    scaler: TorchScaler
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[torch.Tensor] = field(default_factory=list)

    def loss(self, seed: int) -> torch.Tensor:
        """Mean square of the model's output for inputs drawn from `seed`."""
        return self.model(filled((5, 8), torch.float32, seed)).square().mean()

    def train(self, seed: int, bad: float | None = None) -> Any:
        """One ordinary step, with `bad` planted in a gradient if given; returns step's value."""
        self.optimizer.zero_grad()
        loss = self.loss(seed)
        self.losses.append(loss.detach())
        self.scaler.scale(loss).backward()
        if bad is not None:
            plant(next(self.model.parameters()).grad, "middle", bad)
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        return result

    def observe(self) -> dict[str, Any]:
        """State that must be equal on both sides."""
        scaler = self.scaler
        return {
            "losses": self.losses,
            "parameters": [p.detach() for p in self.model.parameters()],
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scale": scaler._scale if scaler.is_enabled() else None,
            "tracker": scaler._growth_tracker if scaler.is_enabled() else None,
            "state_dict": scaler.state_dict(),
            "records": [
                {"stage": record["stage"], "flags": list(record["found_inf_per_device"].values())}
                for record in (scaler._per_optimizer_states if scaler.is_enabled() else {}).values()
            ],
        }


def small_model(seed: int = 0) -> torch.nn.Module:
    """Two-layer network with weights drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def side(
    scaler_type: type[TorchScaler],
    optimizer: str | Callable[..., Any] = "sgd",
    seed: int = 0,
    **scaler_arguments: Any,
) -> Side:
    """Returns one twin; `optimizer` is a name in `OPTIMIZERS` or makes one from the parameters."""
    scaler_arguments.setdefault("device", "cpu")
    model = small_model(seed)
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return Side(scaler_type(**scaler_arguments), model, make(list(model.parameters())))


def paired(
    optimizer: str | Callable[..., Any] = "sgd", seed: int = 0, **scaler_arguments: Any
) -> tuple[Side, Side]:
    """Returns ``(ours, torch's)`` twins that differ in the scaler's class alone."""
    return (
        side(GradScaler, optimizer, seed, **scaler_arguments),
        side(TorchScaler, optimizer, seed, **scaler_arguments),
    )


def assert_sides_same(ours: Side, theirs: Side) -> None:
    """Compares the observable state of two sides."""
    assert_same(ours.observe(), theirs.observe(), "side")
