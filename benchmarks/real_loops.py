"""The scaler's own time in training loops: `scale`, `step` less the optimizer's, and `update`."""

from __future__ import annotations

import functools
import math
import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from ampfast import backends, demo

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
# Warm-up iterations; an infinity in one of them halves the scale.
PARITY_STEPS = 5
BAD_STEP = 2

ADAMW = "AdamW"
FUSED_ADAMW = "fused AdamW"
OPTIMIZERS = {ADAMW: {"foreach": False}, FUSED_ADAMW: {"fused": True}}


class Classifier(nn.Module):
    """The conv net of the demo, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = demo.network()

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(images), classes)


CONV_NET = Net(
    "conv net",
    Classifier,
    lambda: (torch.rand(64, 1, 8, 8), torch.randint(10, (64,))),
    demo.TimedAdamW,
    {"lr": 1e-4},
)
perceptron = functools.partial(models.perceptron, optimizer=demo.TimedAdamW, lr=1e-4)
# By optimizer, limit of ampfast's time as a fraction of torch's.
GOALS: tuple[tuple[Net, dict[str, float]], ...] = (
    (CONV_NET, {ADAMW: 0.40, FUSED_ADAMW: 0.35}),
    (perceptron(31, 32, 64), {ADAMW: 0.50, FUSED_ADAMW: 0.40}),
    (perceptron(74, 32, 64), {ADAMW: 0.45, FUSED_ADAMW: 0.40}),
    (perceptron(500, 32, 64), {}),
    (perceptron(3, 512, 128), {ADAMW: 0.60, FUSED_ADAMW: 0.60}),
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

    def __init__(self, net: Net, optimizer: str, provider: str) -> None:
        self.contender = Contender(optimizer, provider, lambda call: self.step())
        device = torch.device("cpu")
        self._lesson = Lesson(*net.made(device), DTYPE)
        self._parameters = list(self._lesson.module.parameters())
        self._optimizer = demo.TimedAdamW(self._parameters, **net.options, **OPTIMIZERS[optimizer])
        self._scaler = make_scaler(provider, device, SCALE)
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
        own = sum(optimizer.steps_ns)
        return Step(scale, middle - start - own, end - middle, end - begun)

    def timed(self) -> float:
        """Seconds of the scaler in one iteration, which is recorded."""
        self.steps.append(self.step())
        return self.steps[-1].scaler / 1e9

    def state(self) -> list[Tensor]:
        return [*scaler_state(self._scaler), *self._parameters]


def jobs(on: Setting) -> list[Job]:
    """One job for each net and optimizer."""
    return [
        Job(f"{net.name}, {optimizer}", functools.partial(measure, net, optimizer, on, limits))
        for net, limits in GOALS
        for optimizer in OPTIMIZERS
    ]


def measure(net: Net, optimizer: str, on: Setting, limits: dict[str, float]) -> Measured:
    """Trains with torch's scaler and with ampfast's, step by step in turn."""
    ours = backends.default_for(torch.device("cpu"))
    loops = [Loop(net, optimizer, provider) for provider in ("torch", ours)]
    what = f"{net.name}, {optimizer}"
    for number in range(PARITY_STEPS):
        for loop in loops:
            loop.step(number == BAD_STEP)
        assert_same(loops[1].state(), loops[0].state(), f"{what}, step {number}")
    scale = loops[0].state()[0].item()
    loop_of = {loop.contender.key: loop for loop in loops}
    samples = interleave(
        [loop.contender for loop in loops],
        # A round has one step of each contender.
        replace(on.effort, sample_s=0.0),
        cycle=1,
        timer=lambda contender, calls: loop_of[contender.key].timed(),
    )
    assert_same(loops[1].state(), loops[0].state(), f"{what}, after it was timed")
    if loops[0].state()[0].item() != scale:
        raise AssertionError(f"{what}: a step was skipped while timed")

    contenders = [loop.contender for loop in loops]
    timed = Timed("loops", GradCase(net.name, net.shapes()), DTYPE, contenders, samples)
    rows = [_with_parts(row, loop) for row, loop in zip(timed.rows(), loops, strict=True)]
    if optimizer not in limits:
        return Measured(rows)
    return Measured(rows, timed.goal((optimizer, ours), (optimizer, "torch"), limits[optimizer]))


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
