"""Cost of `step`, `update` and clipping: Python frames on the host, and what a GPU is given."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import parameter_with
from support.launchers import ReferenceLauncher
from support.steps import Side, Training, adamw, frames_of, side
from torch.autograd.profiler import profile, record_function

from ampfast import GradScaler, StepGuard
from ampfast.scaler import grad_scaler

HAS_NAMES = pytest.mark.skipif(
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


@HAS_NAMES
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


@HAS_NAMES
@FUSED
def test_a_schedule_adds_no_frames_and_a_clip_takes_few(fused: bool) -> None:
    assert frames(GradScaler("cpu"), fused, schedule=True) == frames(GradScaler("cpu"), fused)
    found = frames(GradScaler("cpu"), fused, clips=True)
    assert len(found) <= 20, found


# What a step costs a GPU by both scalers, as kernels.md has it, counted by the ops of a CPU.
#
# The rule from ops to launches: each op that computes or copies starts one kernel or copy; views
# and empty tensors start none. torch's ops over a list start k, one for as many tensors as fit into
# a launch. `item` waits.

PAGE = Path(__file__).parents[2] / "docs/contributing/kernels.md"
OURS = "launch of ampfast's"
# Single launches, those over the list (k), bytes of N gradients of b bytes, and waits.
ONE = Counter(single=1)
COSTS = {
    **dict.fromkeys(("mul", "add", "reciprocal", "clamp", "cat", "linalg_vector_norm"), ONE),
    **dict.fromkeys(("fill_", "copy_", "_amp_update_scale_", OURS), ONE),
    "_amp_foreach_non_finite_check_and_unscale_": Counter(k=1, bN=2),
    # Zeroes partial sums before, and adds them up after its passes.
    "_foreach_norm": Counter(single=2, k=1, bN=1),
    "_foreach_mul_": Counter(k=1, bN=2),
    "_local_scalar_dense": Counter(waits=1),
}
FREE = {"empty", "empty_like", "empty_strided", "as_strided", "detach", "view", "to"}

# By the page's name of a step: the optimizer, and how each side clips.
STEPS: dict[str, tuple[str, Callable[[Side], object] | None, Callable[[Side], object] | None]] = {
    "plain optimizer": ("adam", None, None),
    "fused optimizer": ("fused_adam", None, None),
    "clipped": (
        "adam",
        lambda run: (
            run.scaler.unscale_(run.optimizer),
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0, foreach=True),
        ),
        lambda run: run.scaler.clip_grad_norm_(run.optimizer, 1.0),
    ),
}


def cost_of(events: Iterable[Any]) -> Counter[str]:
    """Cost of ops; of those within one that has a price nothing is added."""
    total: Counter[str] = Counter()
    for event in events:
        name = event.name.removeprefix("aten::")
        if name in COSTS:
            total += COSTS[name]
        elif event.cpu_children:
            total += cost_of(event.cpu_children)
        else:
            assert name in FREE, f"what does {name} cost?"
    return total


def step(
    run: Side, clip: Callable[[Side], object] | None, launcher: ReferenceLauncher
) -> Counter[str]:
    """Cost of scaling, clipping, stepping and updating, less the optimizer's own step."""
    for seed in range(2):
        run.train(seed)
    run.scaler.scale(run.loss(2)).backward()
    run.optimizer.step = lambda: None
    loss = torch.ones(())
    launcher.read = launcher.written = 0
    with profile() as seen:
        run.scaler.scale(loss)
        if clip is not None:
            clip(run)
        run.scaler.step(run.optimizer)
        run.scaler.update()
    cost = cost_of(event for event in seen.function_events if event.cpu_parent is None)
    size = sum(p.grad.nbytes for p in run.model.parameters())
    cost["bN"] += (launcher.read + launcher.written) // size
    return cost


def told(cost: Counter[str]) -> str:
    passes = {0: "", 1: " + k"}.get(cost["k"], f" + {cost['k']}k")
    size = "" if cost["bN"] == 1 else str(cost["bN"])
    return f"{cost['single']}{passes}, {size}bN, {cost['waits']}"


@pytest.fixture
def counted(launcher: ReferenceLauncher, monkeypatch: pytest.MonkeyPatch) -> ReferenceLauncher:
    """Launches without the ops that stand for them, and flags that are read as on a GPU."""
    for name in ("multi_tensor", "clip_coefficient", "update_scale"):
        monkeypatch.setattr(launcher, name, record_function(OURS)(getattr(launcher, name)))
    monkeypatch.setattr(grad_scaler, "is_found", lambda flags: None)
    return launcher


@pytest.mark.parametrize("name", STEPS)
def test_costs_are_those_of_the_page(counted: ReferenceLauncher, name: str) -> None:
    kind, theirs, ours = STEPS[name]
    torchs = step(side(torch.amp.GradScaler, kind), theirs, counted)
    ampfasts = step(side(GradScaler, kind), ours, counted)
    text = PAGE.read_text(encoding="utf-8")
    [row] = re.findall(rf"^\| {name} \| (.+) \|$", text, re.MULTILINE)
    assert row == f"{told(torchs)} | {told(ampfasts)}"
