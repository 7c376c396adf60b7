"""Training loops: the scaler's own time in them, `scale`, `step` less the optimizer's, `update`."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

import ampfast
from ampfast import backends

from .cases import GradCase
from .nets import Lesson, Net, conv_net, perceptron
from .results import NO_SCALER, OTHERS
from .steps import make_scaler, scaler_state
from .timing import Job, Measured, Setting, Subject, assert_same

SCALE = 2.0**10
# Of the comparison; an infinity in one of its steps makes torch's scale back off.
PARITY_STEPS = 5
BAD_STEP = 2
# Relative tolerance of a clipped update, whose norm is in float64 instead of float32.
CLIP_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Kind:
    """What a loop does."""

    fused: bool = False  # its optimizer takes scale and flag
    clip: bool = False
    max_norm: float = 0.1
    by_scaler: bool = False  # ampfast's scaler clips, not torch's function
    in_place: bool = False  # also where a fused optimizer could multiply by the coefficient
    schedule: bool = False  # whose wrapper of `step` counts as the scaler's time on both sides
    feature: str = ""  # name of what ampfast's scaler does besides, and torch's does not
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the feature
    follows_torch: bool = True  # scale and growth tracker are torch's, too

    def call(self, net: Net) -> str:
        """Name of the loop, the same for all sides."""
        name = f"{'fused ' if self.fused else ''}{net.optimizer.__name__}"
        clip = f"clip{' by the scaler' if self.by_scaler else ''}" if self.clip else ""
        clip += ", in place" if self.in_place else ""
        return ", ".join(filter(None, (name, self.schedule and "schedule", clip, self.feature)))


GROUP = "group of one"
GUARD = "StepGuard"
# The usual training, the same without a schedule, and what a feature costs.
SCHEDULED = (Kind(schedule=True), Kind(fused=True, schedule=True))
WITHOUT_SCHEDULE = (Kind(), Kind(fused=True))
FEATURES = (
    Kind(feature='track="overflow"', options={"track": "overflow"}),
    Kind(
        feature="limits",
        options={"min_scale": 1.0, "max_scale": 2.0**24, "hysteresis": 2},
        follows_torch=False,
    ),
    Kind(feature=GUARD, follows_torch=False),
    Kind(feature=GROUP),
)
LOOPS: tuple[tuple[Net, tuple[Kind, ...]], ...] = (
    (conv_net(), (*WITHOUT_SCHEDULE, *SCHEDULED, *FEATURES)),
    (perceptron(31, 32, 64), (*WITHOUT_SCHEDULE, *SCHEDULED, *FEATURES)),
    (perceptron(74, 32, 64), (*WITHOUT_SCHEDULE, *SCHEDULED)),
    (perceptron(500, 32, 64), SCHEDULED),
    (perceptron(3, 512, 128), SCHEDULED),
)


def optimizer_over(net: Net, kind: Kind, parameters: Sequence[Tensor]) -> Any:
    """The net's optimizer, which adds up the nanoseconds of its steps."""
    plain: Any = net.optimizer

    class Timing(plain):
        steps_ns = 0

        def step(self, closure: Callable[[], float] | None = None) -> Any:
            start = time.perf_counter_ns()
            result = super().step(closure)
            self.steps_ns += time.perf_counter_ns() - start
            return result

        # Keeps out torch's wrapper for its profiler, whose time would count as the scaler's.
        step.hooked = True  # type: ignore[attr-defined]

    return Timing(parameters, **net.options, fused=kind.fused or None)


class Loop:
    """One side's training: its scaler, if any, and its optimizer, or one that others use, too."""

    def __init__(
        self,
        net: Net,
        kind: Kind,
        provider: str,
        lesson: Lesson,
        parameters: Sequence[Tensor] = (),
        optimizer: Any = None,
    ) -> None:
        self.kind, self.lesson, self.key = kind, lesson, (kind.call(net), provider)
        self.parameters = parameters or list(lesson.module.parameters())
        self.optimizer = optimizer or optimizer_over(net, kind, self.parameters)
        self._schedule = None
        if kind.schedule:
            decay = torch.optim.lr_scheduler.LambdaLR
            self._schedule = decay(self.optimizer, lambda step: 0.9999**step)
        device, self.scaler = lesson.inputs[0].device, None
        if provider not in OTHERS and kind.feature == GUARD:
            self.scaler = ampfast.StepGuard(device.type, backend=provider)
            self.scaler.scale(torch.zeros((), device=device))
        elif provider != NO_SCALER:
            group = {"process_group": distributed.group.WORLD} if kind.feature == GROUP else {}
            self.scaler = make_scaler(provider, device, SCALE, **kind.options, **group)

    def step(self, number: int = 0) -> float:
        """One iteration; returns seconds of the scaler."""
        now = time.perf_counter_ns
        self.optimizer.zero_grad()
        loss = self.lesson.loss()
        start = now()
        scaled = self.scaled(loss)
        scale = now() - start
        scaled.backward()
        # Else the scaler's time would include freeing the rest of the graph.
        del loss, scaled
        self.optimizer.steps_ns = 0
        start = now()
        self.finish()
        seconds = (scale + now() - start - self.optimizer.steps_ns) / 1e9
        if self._schedule is not None:
            self._schedule.step()
        return seconds

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def finish(self) -> None:
        """The scaler's calls after the backward pass, and the optimizer's."""
        scaler, optimizer = self.scaler, self.optimizer
        if self.kind.by_scaler:
            # Gradients that a fused optimizer unscales are only read.
            in_place = self.kind.in_place or not self.kind.fused
            scaler.clip_grad_norm_(optimizer, self.kind.max_norm, in_place=in_place)
        elif self.kind.clip:
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.kind.max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def assert_parity(net: Net, lesson: Lesson, kinds: Sequence[Kind], names: Sequence[str]) -> None:
    """Trains the module with torch's scaler, and copies of its parameters with each of ours.

    All use the gradients of one backward pass, which is not deterministic on a GPU. The scale grows
    and backs off. Bits are compared, but for clips by the scaler, whose norm is more exact.
    """
    torchs = list(lesson.module.parameters())
    theirs = Loop(net, kinds[0], "torch", lesson, torchs)
    ours = [
        Loop(net, kind, name, lesson, [p.detach().clone().requires_grad_() for p in torchs])
        for name in names
        for kind in kinds
    ]
    for each in (theirs, *ours):
        if each.kind.follows_torch:
            each.scaler.set_growth_interval(2)
    for step in range(PARITY_STEPS):
        theirs.optimizer.zero_grad()
        loss = lesson.loss()
        scaled = theirs.scaled(loss)
        scaled.backward()
        if step == BAD_STEP:
            torchs[len(torchs) // 2].grad.view(-1)[-1] = math.inf
        for each in ours:
            what = f"loss of {net.name}, {' by '.join(each.key)}, step {step}"
            # A power of two, so that no bit of a gradient is lost.
            factor = each.scaler.get_scale() / theirs.scaler.get_scale()
            assert_same([each.scaled(loss.detach())], [scaled.detach() * factor], what)
            for parameter, their in zip(each.parameters, torchs, strict=True):
                parameter.grad = their.grad * factor
        for each in (theirs, *ours):
            each.finish()
        for each in ours:
            _assert_same(each, theirs, f"{net.name}, {' by '.join(each.key)}, step {step}")
    theirs.optimizer.zero_grad()


def _assert_same(ours: Loop, theirs: Loop, what: str) -> None:
    if ours.kind.follows_torch:
        states = scaler_state(ours.scaler), scaler_state(theirs.scaler)
        assert_same(*states, f"scale and tracker of {what}")
    if not ours.kind.by_scaler:
        assert_same(ours.parameters, theirs.parameters, f"parameters of {what}")
        return
    most = CLIP_TOLERANCE * theirs.optimizer.param_groups[0]["lr"]
    for parameter, their in zip(ours.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(parameter, their, rtol=1e-5, atol=most)


def jobs(on: Setting) -> list[Job]:
    """One job for each net and kind of loop, on a CPU."""
    return [
        Job(f"{net.name}, {kind.call(net)}", functools.partial(measure, net, kind, on))
        for net, kinds in LOOPS
        for kind in kinds
        if on.queue is None
    ]


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Default process group of this process alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def measure(net: Net, kind: Kind, on: Setting) -> Measured:
    """Trains with torch's scaler and with ampfast's, step by step in turn."""
    if kind.feature == GROUP and not distributed.is_initialized():
        with group_of_one():
            return measure(net, kind, on)
    ours, what = backends.default_for(on.device), f"{net.name}, {kind.call(net)}"
    assert_parity(net, net.lesson(on.device), [kind], [ours])
    sides = theirs, own = [Loop(net, kind, name, net.lesson(on.device)) for name in ("torch", ours)]
    for loop in sides:
        loop.step()
    subject = Subject("loops", GradCase.of(net), own.lesson.dtype, is_host=True)
    contenders = {loop.key: loop.step for loop in sides}
    rows = subject.time(contenders, on, timer=lambda step, numbers: step(0))
    _assert_same(own, theirs, f"{what}, after it was timed")
    assert_no_skip(net, [theirs])
    return Measured(rows)


def assert_no_skip(net: Net, loops: Sequence[Loop]) -> None:
    """Raises if a step was skipped: it lacks the optimizer's work, which would flatter its time."""
    for loop in loops:
        if loop.scaler is not None and loop.scaler.get_scale() != SCALE:
            told = f"{net.name}, {' by '.join(loop.key)}: a step was skipped while timed"
            raise AssertionError(told)
    largest = torch.stack([each.detach().abs().max() for each in loops[0].parameters])
    if not bool(largest.isfinite().all()):
        raise AssertionError(f"{net.name}: parameters overflowed while timed")
