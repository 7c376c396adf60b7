"""Training loops with every scheduler of torch, stepped exactly or one iteration late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.optimizers import OPTIMIZERS
from support.twins import Side, side, small_model
from torch.optim import lr_scheduler, swa_utils

from ampfast import GradScaler, LateScheduler

INF = float("inf")
# The first step and two in a row are skipped, the last one runs.
SKIPPED = (0, 3, 6, 7)
STEPS = 12
SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": OPTIMIZERS["momentum"],
    "adam": OPTIMIZERS["adam"],
    "fused_momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, fused=True),
    "fused_adamw": OPTIMIZERS["fused_adamw"],
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 1 - 0.01 * epoch),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.4, total_steps=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10, 2.0),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=5),
}


def arguments_of(scheduler: Any, step: int) -> tuple[float, ...]:
    """Arguments of the scheduler's `step`; the loss alternately falls and rises three times."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return (8.0 - step if step // 3 % 2 else 8.0 + step,)
    return ()


def rates(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Learning rates and momenta."""
    names = ("lr", "momentum", "betas")
    return [[group[name] for name in names if name in group] for group in optimizer.param_groups]


def without_scaler(kind: str, schedule: str, skipped: tuple[int, ...] = SKIPPED) -> list[Any]:
    """Rates by iteration, and finally, of a loop without the skipped iterations."""
    model = small_model()
    optimizer = KINDS[kind](list(model.parameters()))
    scheduler = SCHEDULERS[schedule](optimizer)
    seen = []
    for step in range(STEPS):
        seen.append(rates(optimizer))
        if step not in skipped:
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            scheduler.step(*arguments_of(scheduler, step))
    return [*seen, rates(optimizer)]


Advance = Callable[[Side, Any, int], None]


def exact(one: Side, scheduler: Any, step: int) -> None:
    if not one.scaler.step_skipped(one.optimizer):
        scheduler.step(*arguments_of(scheduler, step))


def late(one: Side, scheduler: Any, step: int) -> None:
    scheduler.step(*arguments_of(scheduler, step))


def trained(one: Side, scheduler: Any, advance: Advance, steps: range = range(STEPS)) -> list[Any]:
    seen = []
    for step in steps:
        seen.append(rates(one.optimizer))
        one.train(step, INF if step in SKIPPED else None)
        advance(one, scheduler, step)
    return seen


def late_one(kind: str, schedule: str, **arguments: Any) -> tuple[Side, LateScheduler]:
    one = side(GradScaler, KINDS[kind], **{**SETTINGS, **arguments})
    return one, LateScheduler(SCHEDULERS[schedule](one.optimizer), one.scaler, one.optimizer)
