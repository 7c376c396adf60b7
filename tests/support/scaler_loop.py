"""Minimal training loop around a scaler."""

from __future__ import annotations

import torch

from ampfast import GradScaler


class Loop:
    """Scaler with one parameter, whose gradient is given by step."""

    def __init__(self, fused: bool = False, **arguments) -> None:
        self.param = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.Adam([self.param], lr=0.1, fused=fused)
        arguments = {"init_scale": 8.0, "growth_interval": 3, **arguments}
        self.scaler = GradScaler("cpu", **arguments)
        self.scaler.scale(torch.zeros(()))

    def step(self, value: float = 1.0, riding: bool = False) -> None:
        self.param.grad = torch.full((3,), value)
        if riding:
            self.scaler.step_and_update(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
