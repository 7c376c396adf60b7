"""Cost of `step`, `update` and clipping on the host: Python frames."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.gradients import parameter_with
from support.steps import Training, adamw, frames_of

from ampfast import GradScaler, StepGuard

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="code objects have no qualified names"
)

SCALERS: dict[str, Callable[[], GradScaler]] = {
    "default": lambda: GradScaler("cpu"),
    "tracking": lambda: GradScaler("cpu", track="overflow"),
    "limits": lambda: GradScaler("cpu", min_scale=1.0, max_scale=2.0**24, hysteresis=2),
    "guard": lambda: StepGuard("cpu"),
    "group of one": lambda: GradScaler("cpu", process_group=torch.distributed.group.WORLD),
}
FUSED = pytest.mark.parametrize("fused", [False, True])


def frames(scaler: GradScaler, fused: bool, clips: bool = False, schedule: bool = False) -> Any:
    """Frames of a clip, or of a step and an update without the optimizer's, of 10 parameters."""
    training = Training(scaler, partial(adamw, **{"fused": True} if fused else {"foreach": False}))
    others = [parameter_with(torch.ones(4)) for _ in range(9)]
    training.optimizer.param_groups[0]["params"] += others
    if schedule:
        training.schedule = torch.optim.lr_scheduler.ConstantLR(training.optimizer)

    def call() -> None:
        if clips:
            scaler.clip_grad_norm_(training.optimizer, 1.0)
        else:
            scaler.step(training.optimizer)
            scaler.update()

    training.step(1.0, 1.0).backward(1.0)
    return frames_of(call, but=training.optimizer.step)


@FUSED
@pytest.mark.parametrize("name", SCALERS)
def test_step_and_update_take_few_frames(
    name: str, fused: bool, request: pytest.FixtureRequest
) -> None:
    if name == "group of one":
        request.getfixturevalue("world")
    found = frames(SCALERS[name](), fused)
    # A guard's logger is enabled by default.
    assert len(found) <= {"group of one": 16, "guard": 18}.get(name, 17), found


@FUSED
def test_a_schedule_adds_no_frames_and_a_clip_takes_few(fused: bool) -> None:
    assert frames(GradScaler("cpu"), fused, schedule=True) == frames(GradScaler("cpu"), fused)
    found = frames(GradScaler("cpu"), fused, clips=True)
    assert len(found) <= 20, found
