"""Helpers of the trainer tests: model, batches, and a run that can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from support.comparison import assert_same
from support.optimizers import OPTIMIZERS
from support.scalers import TorchScaler
from support.twins import small_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ampfast

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
STEPS = 16
# Overflows float16 in the first steps, and again later as it grows fast.
SETTINGS: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 3}

# Steps with an infinite gradient in `planted`: the first, a later one, and two in a row.
PLANTED = (0, 3, 8, 9)


class HalfNet(nn.Module):
    """Computes in float16 on the CPU, since some trainers start CUDA's autocast only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, data: Tensor) -> Tensor:
        """Maps float32 of shape (n, 8) to float32 of shape (n, 3)."""
        with torch.autocast("cpu", dtype=torch.float16):
            return self.layers(data).float()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `STEPS` batches: data of shape (5, 8) and its classes below 3."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield (
            torch.randn(5, 8, generator=generator),
            torch.randint(3, (5,), generator=generator),
        )


def loader(batches: Iterable[tuple[Tensor, Tensor]]) -> DataLoader:
    """Loader of ready batches."""
    return DataLoader(list(batches), batch_size=None)


def optimizer_for(model: nn.Module, name: str = "adam") -> torch.optim.Optimizer:
    """An optimizer of `OPTIMIZERS`, with a learning rate that lets overflows go on."""
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    return optimizer


def planted(loss: Tensor, model: nn.Module, step: int) -> Tensor:
    """The loss, with one infinite gradient in the steps of `PLANTED`."""
    if step not in PLANTED:
        return loss
    return loss + next(model.parameters()).flatten()[0] * float("inf")


@dataclass
class Run:
    """Losses, scales and final state of a training run."""

    scaler: TorchScaler | None = None
    losses: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def loss(self, output: Tensor, target: Tensor, scaler: TorchScaler) -> Tensor:
        """Cross entropy, recorded with the scale."""
        loss = nn.functional.cross_entropy(output, target)
        self.scaler = scaler
        self.losses.append(loss.detach().clone())
        self.scales.append(scaler.get_scale())
        return loss

    def finish(self, model: nn.Module, **more: Any) -> Run:
        """Records parameters, the scaler's state and anything else that must be equal."""
        self.state = {
            "parameters": [p.detach().clone() for p in model.parameters()],
            "scaler": self.scaler.state_dict(),
            **more,
        }
        return self

    @property
    def skipped(self) -> int:
        """Number of steps that lowered the scale."""
        scales = [*self.scales, self.state["scaler"]["scale"]]
        return sum(b < a for a, b in pairwise(scales))


def late_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, clip: float | None = None
) -> Run:
    """A run with torch's scaler and no trainer, with the exact schedule one iteration late."""
    run, scaler, rates, ran = Run(), TorchScaler("cpu", **SETTINGS), [], False
    for data, target in batches():
        optimizer.zero_grad()
        scaler.scale(run.loss(model(data), target, scaler)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        rates.append(scheduler.get_last_lr()[0])
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if ran:
            scheduler.step()
        ran = scaler.get_scale() >= before
    return run.finish(model, rates=rates, optimizer=optimizer.state_dict())


class Late:
    """Gives a Trainer of Transformers a `LateScheduler`, as docs/trainers.md does."""

    def create_scheduler(self, *args: Any, **kwargs: Any) -> ampfast.LateScheduler:
        scheduler = super().create_scheduler(*args, **kwargs)
        self.lr_scheduler = ampfast.LateScheduler(
            scheduler, self.accelerator.scaler, self.optimizer.optimizer
        )
        return self.lr_scheduler


def assert_same_run(ours: Run, theirs: Run) -> None:
    """Asserts bitwise equal runs, with overflows and growth in ours."""
    assert isinstance(ours.scaler, ampfast.GradScaler)
    assert not isinstance(theirs.scaler, ampfast.GradScaler)
    assert_same(ours.losses, theirs.losses, "losses")
    assert_same(ours.scales, theirs.scales, "scales")
    assert_same(ours.state, theirs.state, "state")
    stats = ours.scaler.stats()
    assert stats.steps == len(ours.losses) == STEPS
    assert 2 <= stats.skipped == ours.skipped < STEPS - stats.growths
    assert stats.growths >= 2
