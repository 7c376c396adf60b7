"""The scaler's own time in training loops: `scale`, `step` less the optimizer's, and `update`."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ampfast
from ampfast import backends

from . import models
from .cases import GradCase
from .harness import Contender, Job, Measured, Setting, assert_same, interleave
from .models import Net
from .results import Row, Spread
from .steps import make_scaler, scaler_state
from .timing import Timed
from .training import Lesson

DTYPE = torch.bfloat16
SCALE = 2.0**16
# Warm-up iterations; an infinity in one of them halves torch's scale.
PARITY_STEPS = 5
BAD_STEP = 2


@dataclass(frozen=True)
class Kind:
    """Optimizer of a loop, with a schedule or not, and what ampfast's scaler does besides.

    Attributes:
        optimizer: Options of AdamW.
        scheduled: Whether its learning rate follows a schedule, whose wrapper of `step` counts as
            the scaler's time on both sides.
        features: Keywords of ampfast's scaler; torch's is the plain one.
        guards: Whether ampfast's scaler is a `StepGuard`.
        follows_torch: Whether scale and growth tracker are torch's, too.
        grouped: Whether ampfast's scaler agrees with a process group, of this process alone.
    """

    optimizer: dict[str, bool]
    scheduled: bool = False
    features: dict[str, Any] = field(default_factory=dict)
    guards: bool = False
    follows_torch: bool = True
    grouped: bool = False


PLAIN = {"foreach": False}
FUSED = {"fused": True}
ADAMW = "AdamW"
FUSED_ADAMW = "fused AdamW"
SCHEDULED_ADAMW = "AdamW, schedule"
SCHEDULED_FUSED_ADAMW = "fused AdamW, schedule"
TRACK = 'AdamW, track="overflow"'
LIMITS = "AdamW, limits"
GUARD = "AdamW, StepGuard"
LOG_MAX = "AdamW, LogMax"
GROUP = "AdamW, group of one"
WITH_LIMITS = {"min_scale": 1.0, "max_scale": 2.0**24, "hysteresis": 2}
# By call.
KINDS = {
    ADAMW: Kind(PLAIN),
    FUSED_ADAMW: Kind(FUSED),
    SCHEDULED_ADAMW: Kind(PLAIN, scheduled=True),
    SCHEDULED_FUSED_ADAMW: Kind(FUSED, scheduled=True),
    TRACK: Kind(PLAIN, features={"track": "overflow"}),
    LIMITS: Kind(PLAIN, features=WITH_LIMITS, follows_torch=False),
    GUARD: Kind(PLAIN, guards=True, follows_torch=False),
    LOG_MAX: Kind(PLAIN, features={"policy": ampfast.LogMax()}, follows_torch=False),
    GROUP: Kind(PLAIN, grouped=True),
}
# The usual training, and the same without.
SCHEDULED = (SCHEDULED_ADAMW, SCHEDULED_FUSED_ADAMW)
WITHOUT_SCHEDULE = (ADAMW, FUSED_ADAMW)


class TimedAdamW(torch.optim.AdamW):
    """AdamW that records the time of each step, in nanoseconds."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.steps_ns: list[int] = []

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        start = time.perf_counter_ns()
        result = super().step(closure)
        self.steps_ns.append(time.perf_counter_ns() - start)
        return result

    # Keeps out torch's wrapper for its profiler, whose time would count as the scaler's.
    step.hooked = True  # type: ignore[attr-defined]


class Classifier(nn.Module):
    """Conv net of ten parameters for 8 x 8 images of ten classes, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(images), classes)


CONV_NET = Net(
    "conv net",
    Classifier,
    lambda: (torch.rand(64, 1, 8, 8), torch.randint(10, (64,))),
    TimedAdamW,
    {"lr": 1e-4},
)
perceptron = functools.partial(models.perceptron, optimizer=TimedAdamW, lr=1e-4)


# By call, limit of ampfast's time as a fraction of torch's; None where there is none.
GOALS: tuple[tuple[Net, dict[str, float | None]], ...] = (
    (
        CONV_NET,
        {ADAMW: 0.40, FUSED_ADAMW: 0.35}
        | dict.fromkeys(SCHEDULED, 0.50)
        | {TRACK: 0.9, LIMITS: 0.5, GUARD: 0.5, LOG_MAX: 1.3, GROUP: 1.3},
    ),
    (
        perceptron(31, 32, 64),
        dict.fromkeys((*WITHOUT_SCHEDULE, *SCHEDULED), 0.40)
        | {TRACK: 0.6, LIMITS: 0.4, GUARD: 0.4, LOG_MAX: 1.0, GROUP: 1.1},
    ),
    (perceptron(74, 32, 64), dict.fromkeys((*WITHOUT_SCHEDULE, *SCHEDULED), 0.36)),
    (perceptron(500, 32, 64), dict.fromkeys(SCHEDULED)),
    (perceptron(3, 512, 128), dict.fromkeys(SCHEDULED, 0.60)),
)


@dataclass(frozen=True)
class Step:
    """Nanoseconds of one iteration: the scaler's by part, and all of it."""

    scale: int
    step: int
    update: int
    whole: int

    @property
    def scaler(self) -> int:
        return self.scale + self.step + self.update


class Loop:
    """Contender: a training loop with its own net, optimizer and scaler."""

    def __init__(self, net: Net, call: str, provider: str) -> None:
        self.contender = Contender(call, provider, lambda number: self.step())
        self.kind = kind = KINDS[call]
        device = torch.device("cpu")
        self._lesson = Lesson(*net.made(device), DTYPE)
        self._parameters = list(self._lesson.module.parameters())
        self._optimizer = TimedAdamW(self._parameters, **net.options, **kind.optimizer)
        self._schedule = None
        if kind.scheduled:
            decay = torch.optim.lr_scheduler.LambdaLR
            self._schedule = decay(self._optimizer, lambda step: 0.9999**step)
        if provider == "torch":
            self._scaler = make_scaler(provider, device, SCALE)
        elif kind.guards:
            self._scaler = ampfast.StepGuard("cpu", backend=provider)
            self._scaler.scale(torch.zeros(()))
        else:
            group = {"process_group": torch.distributed.group.WORLD} if kind.grouped else {}
            self._scaler = make_scaler(provider, device, SCALE, **kind.features, **group)
        self.steps: list[Step] = []

    def step(self, bad: bool = False) -> Step:
        """One iteration; with an infinite gradient if `bad`."""
        now = time.perf_counter_ns
        lesson, scaler, optimizer = self._lesson, self._scaler, self._optimizer
        optimizer.steps_ns.clear()
        begun = now()
        optimizer.zero_grad()
        loss = lesson.loss()
        start = now()
        scaled = scaler.scale(loss)
        scale = now() - start
        scaled.backward()
        # Else the scaler's time would include freeing the rest of the graph.
        del loss, scaled
        if bad:
            self._parameters[0].grad.view(-1)[-1] = math.inf
        start = now()
        scaler.step(optimizer)
        middle = now()
        scaler.update()
        end = now()
        if self._schedule is not None:
            self._schedule.step()
        own = sum(optimizer.steps_ns)
        return Step(scale, middle - start - own, end - middle, end - begun)

    def timed(self) -> float:
        """Seconds of the scaler in one iteration, which is recorded."""
        self.steps.append(self.step())
        return self.steps[-1].scaler / 1e9

    def state(self) -> list[Tensor]:
        """Scale, tracker and parameters, those that are to equal torch's."""
        state = scaler_state(self._scaler) if self.kind.follows_torch else []
        return [*state, *self._parameters]

    def scale(self) -> float:
        return self._scaler.get_scale()


def jobs(on: Setting) -> list[Job]:
    """One job for each net and kind of loop."""
    return [
        Job(f"{net.name}, {call}", functools.partial(measure, net, call, on, limits))
        for net, limits in GOALS
        for call in limits
    ]


def measure(net: Net, call: str, on: Setting, limits: Mapping[str, float | None]) -> Measured:
    """Trains with torch's scaler and with ampfast's, step by step in turn."""
    if not KINDS[call].grouped:
        return _measure(net, call, on, limits.get(call))
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        return Measured(notes=[f"loops: left out {call}, since this torch has no gloo"])
    with group_of_one():
        return _measure(net, call, on, limits.get(call))


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Default process group of this process alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _measure(net: Net, call: str, on: Setting, limit: float | None) -> Measured:
    ours = backends.default_for(torch.device("cpu"))
    loops = [Loop(net, call, provider) for provider in ("torch", ours)]
    what = f"{net.name}, {call}"
    for number in range(PARITY_STEPS):
        for loop in loops:
            loop.step(number == BAD_STEP)
        _assert_same(loops, f"{what}, step {number}")
    scale = loops[0].scale()
    loop_of = {loop.contender.key: loop for loop in loops}
    samples = interleave(
        [loop.contender for loop in loops],
        # A round has one step of each contender.
        replace(on.effort, sample_s=0.0),
        cycle=1,
        timer=lambda contender, calls: loop_of[contender.key].timed(),
    )
    _assert_same(loops, f"{what}, after it was timed")
    if loops[0].scale() != scale:
        raise AssertionError(f"{what}: a step was skipped while timed")

    contenders = [loop.contender for loop in loops]
    timed = Timed("loops", GradCase(net.name, net.shapes()), DTYPE, contenders, samples)
    rows = [_with_parts(row, loop) for row, loop in zip(timed.rows(), loops, strict=True)]
    if limit is None:
        return Measured(rows)
    return Measured(rows, timed.goal((call, ours), (call, "torch"), limit))


def _assert_same(loops: list[Loop], what: str) -> None:
    """Raises unless both have trained alike, at scales that lose no bit of a gradient."""
    theirs, ours = loops
    assert_same(ours.state(), theirs.state(), what)
    for loop in loops:
        if math.frexp(loop.scale())[0] != 0.5:
            raise AssertionError(f"{what}: the scale {loop.scale()} is no power of two")


def _with_parts(row: Row, loop: Loop) -> Row:
    # Without warm-up.
    steps = loop.steps[-row.rounds :]
    shapes = [parameter.shape for parameter in loop._parameters]
    return replace(
        row,
        ms=None,
        timer=None,
        list_bytes=None,
        host_us=Spread(*(1e3 * ms for ms in row.ms)),
        parts_us=tuple(
            statistics.median(getattr(step, part) for step in steps) / 1e3
            for part in ("scale", "step", "update")
        ),
        share=statistics.median(step.scaler / step.whole for step in steps),
        tensors=len(shapes),
        elements=sum(shape.numel() for shape in shapes),
    )
