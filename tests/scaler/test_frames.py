"""Cost of `step`, `update` and clipping on the host: Python frames and torch's small ops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.steps import Loop, frames_of

from ampfast import GradScaler, StepGuard

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="code objects have no qualified names"
)

SCALERS: dict[str, Callable[[], GradScaler]] = {
    "default": lambda: GradScaler("cpu"),
    "tracking": lambda: GradScaler("cpu", track="overflow"),
    "limits": lambda: GradScaler("cpu", min_scale=1.0, max_scale=2.0**24, hysteresis=2),
    "guard": lambda: StepGuard("cpu"),
}
KINDS = pytest.mark.parametrize("kind", ["plain", "fused"])


def frames(loop: Loop) -> list[str]:
    """Frames of a step and an update, without the optimizer's."""

    def call() -> None:
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()

    loop.backward()
    return frames_of(call, but=loop.optimizer.step)


@KINDS
@pytest.mark.parametrize("scaler", SCALERS.values(), ids=SCALERS)
def test_step_and_update_take_few_frames(scaler: Callable[[], GradScaler], kind: str) -> None:
    found = frames(Loop(scaler(), kind))
    assert len(found) <= 17, found


@KINDS
def test_a_schedule_adds_no_frames(kind: str) -> None:
    plain, scheduled = (
        frames(Loop(GradScaler("cpu"), kind, schedule=schedule)) for schedule in (False, True)
    )
    assert scheduled == plain


@KINDS
def test_a_group_of_one_takes_few_frames(kind: str, world: Any) -> None:
    found = frames(Loop(GradScaler("cpu", process_group=world), kind))
    assert len(found) <= 16, found


@KINDS
def test_clipping_takes_few_frames(kind: str) -> None:
    loop = Loop(GradScaler("cpu"), kind)
    loop.backward()
    found = frames_of(
        lambda: loop.scaler.clip_grad_norm_(loop.optimizer, 1.0), but=loop.optimizer.step
    )
    assert len(found) <= 20, found


def aten_calls(scaler: Any, kind: str) -> int:
    """ATen calls of scale, step and update, without the optimizer's own step."""
    loop = Loop(scaler, kind)
    loop.backward()
    loop.optimizer.step = lambda: None  # type: ignore[method-assign]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaler.scale(torch.ones(()))
        scaler.step(loop.optimizer)
        scaler.update()
    return sum(event.name.startswith("aten::") for event in profile.events())


@KINDS
def test_no_more_aten_calls_than_torch(kind: str) -> None:
    ours, theirs = (
        aten_calls(GradScaler("cpu"), kind),
        aten_calls(torch.amp.GradScaler("cpu"), kind),
    )
    # Three calls are of `ones`, one is the product with the scale; three copy the scale.
    assert ours <= (4 if kind == "plain" else 7) < theirs
