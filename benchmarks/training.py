"""Training steps of real nets: without a scaler, with torch's and with ampfast's."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from . import goals, providers
from .cases import GradCase
from .harness import Contender, Job, Measured, Setting, assert_same
from .machine import require_memory
from .models import Net, autocast_dtype, nets, perceptron
from .steps import make_scaler, scaler_state
from .timing import WITHOUT, time_contenders

SCALE = 2.0**10
MAX_NORM = 0.1
PARITY_STEPS = 5
BAD_STEP = 2
# Relative tolerance of a clipped update, whose norm is in float64 instead of float32.
CLIP_TOLERANCE = 1e-3

# Steps are long, so samples have few of them and more time in total: most on a CPU, where the time
# of the same step varies by a third.
STEPS_IN_TURN = 3
LONGER = {"cpu": 5.0, "cuda": 2.0}
# Three ways to clip differ by a hundredth of a step.
CLIP_LONGER = 3.0
# Parameter, gradient and two optimizer states, in float32.
BYTES_PER_ELEMENT = 16


@dataclass(frozen=True)
class Plan:
    """Net, with fused optimizer or not, clipped or not, and without autocast, too, or not."""

    net: Net
    fused: bool
    clip: bool
    subject: str = "training"

    @property
    def path(self) -> str:
        """Loop of all providers, with one of the scalers or none."""
        name = self.net.optimizer.__name__
        return f"{'fused ' if self.fused else ''}{name}{', clip' if self.clip else ''}"

    @property
    def at_once(self) -> str:
        """Loop of ampfast's scaler alone, which replaces `unscale_` and torch's `clip_grad_norm_`.

        Gradients that a fused optimizer unscales are only read.
        """
        return f"{self.path} by the scaler"

    def paths(self, provider: str) -> list[str]:
        ours = provider not in (WITHOUT, "torch")
        return [self.path, *([self.at_once] if ours and self.clip else [])]

    def optimizer(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        kind: Any = self.net.optimizer
        return kind(parameters, fused=self.fused or None, **self.net.options)


@dataclass(frozen=True)
class Lesson:
    """Module with its batch and autocast dtype."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    dtype: torch.dtype

    def loss(self) -> Tensor:
        """Loss of a forward pass: 0-dim float32, on the device of the inputs."""
        enabled = self.dtype is not torch.float32
        with torch.autocast(self.inputs[0].device.type, self.dtype, enabled):
            return self.module(*self.inputs)


@dataclass
class Student:
    """Parameters with optimizer and scaler, if any."""

    plan: Plan
    path: str
    provider: str
    lesson: Lesson
    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def step(self, number: int = 0) -> None:
        """One iteration of a training loop; as a contender's call it gets a number."""
        self.optimizer.zero_grad()
        self.scaled(self.lesson.loss()).backward()
        self.finish()

    def finish(self) -> None:
        """Calls after the backward pass."""
        scaler: Any = self.scaler
        optimizer = self.optimizer
        if self.path == self.plan.at_once:
            scaler.clip_grad_norm_(optimizer, MAX_NORM, in_place=not self.plan.fused)
        elif self.plan.clip:
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def jobs(subject: str, on: Setting) -> list[Job]:
    """One job for each net, kind of optimizer, and clipping or not.

    The subject "mlp" is the classic benchmark of mixed precision: a perceptron with plain SGD, with
    and without autocast and scalers.
    """
    if subject == "mlp":
        width, batch = (4096, 512) if on.queue else (512, 128)
        plans = [Plan(perceptron(3, width, batch), False, False, subject)]
    else:
        plans = [
            Plan(net, fused, clip)
            for net in nets(on.device)
            for fused in (False, True)
            for clip in (False, True)
        ]
    return [
        Job(f"{plan.net.name}, {plan.path}", functools.partial(measure, plan, on)) for plan in plans
    ]


def measure(plan: Plan, on: Setting) -> Measured:
    """Times steps of a net with its optimizer and batch, with each scaler in turn."""
    device = on.device
    names, notes = providers.available(device)
    case = GradCase(plan.net.name, plan.net.shapes())
    copies = 1 + sum(len(plan.paths(name)) for name in names)
    require_memory(copies * BYTES_PER_ELEMENT * case.elements + plan.net.step_bytes, device)
    dtype, measured = autocast_dtype(device), Measured(notes=notes)
    module, inputs = plan.net.made(device)
    lesson = Lesson(module, inputs, dtype)
    assert_parity(plan, lesson, names)

    # All step the same parameters with the same optimizer, so only the scaler differs.
    parameters = list(module.parameters())
    optimizer = plan.optimizer(parameters)
    students = [
        Student(
            *(plan, path, name, lesson, parameters, optimizer),
            None if name == WITHOUT else make_scaler(name, device, SCALE),
        )
        for name in (WITHOUT, "torch", *names)
        for path in plan.paths(name)
    ]
    if plan.subject == "mlp":
        path, lesson = f"{plan.path}, float32", Lesson(module, inputs, torch.float32)
        students.append(Student(plan, path, WITHOUT, lesson, parameters, optimizer, None))
    contenders = [
        # Longer than a queue, so none can be queued behind another.
        Contender(student.path, student.provider, student.step, waits=True)
        for student in students
    ]
    times = LONGER[device.type] * (CLIP_LONGER if plan.clip else 1.0)
    longer = replace(on.effort, comparison_s=times * on.effort.comparison_s)
    timed = time_contenders(
        *(plan.subject, case, dtype, contenders, replace(on, effort=longer)),
        cycle=STEPS_IN_TURN,
        replaces={plan.at_once: plan.path},
    )
    if on.queue is not None:
        timed = replace(timed, timer="loop")
    _assert_no_skip(students)

    without = (plan.path, WITHOUT)
    for contender, row in zip(contenders, timed.rows(), strict=True):
        over = None
        if contender.key != without:
            over = timed.samples.ratio(contender.key, without).p50
        measured.rows.append(
            replace(
                row,
                vs_torch=None if contender.provider == WITHOUT else row.vs_torch,
                over_none=over,
                # That of the gradients.
                list_bytes=case.list_bytes(torch.float32),
                tensors=len(case.shapes),
                elements=case.elements,
            )
        )
    for student in students if plan.subject == "training" else ():
        if student.provider in names:
            key = (student.path, student.provider)
            measured.goals += goals.of_training(timed, key, plan.path)
    return measured


def assert_parity(plan: Plan, lesson: Lesson, names: Sequence[str]) -> None:
    """Trains the module with torch's scaler, and copies of its parameters with each of ours.

    All use the gradients of one backward pass, which is not deterministic on a GPU. The scale grows
    and backs off; scale, tracker and parameters are compared after each step: bit for bit, but for
    clipping by the scaler, whose norm is more exact.
    """
    device = lesson.inputs[0].device
    torchs = list(lesson.module.parameters())

    def student(path: str, provider: str, parameters: Sequence[Tensor]) -> Student:
        scaler = make_scaler(provider, device, SCALE)
        scaler.set_growth_interval(2)
        optimizer = plan.optimizer(parameters)
        return Student(plan, path, provider, lesson, parameters, optimizer, scaler)

    theirs = student(plan.path, "torch", torchs)
    ours = [
        student(path, name, [p.detach().clone().requires_grad_() for p in torchs])
        for name in names
        for path in plan.paths(name)
    ]
    for step in range(PARITY_STEPS):
        theirs.optimizer.zero_grad()
        loss = lesson.loss()
        scaled = theirs.scaled(loss)
        scaled.backward()
        if step == BAD_STEP:
            torchs[len(torchs) // 2].grad.view(-1)[-1] = math.inf
        for each in ours:
            what = f"{plan.net.name}, {each.path} by {each.provider}, step {step}"
            assert_same([each.scaled(loss.detach())], [scaled.detach()], f"loss of {what}")
            for parameter, their in zip(each.parameters, torchs, strict=True):
                parameter.grad = their.grad.clone()
        for each in (theirs, *ours):
            each.finish()
        for each in ours:
            what = f"{plan.net.name}, {each.path} by {each.provider}, step {step}"
            states = scaler_state(each.scaler), scaler_state(theirs.scaler)
            assert_same(*states, f"scale and tracker of {what}")
            if each.path == plan.path:
                assert_same(each.parameters, torchs, f"parameters of {what}")
                continue
            most = CLIP_TOLERANCE * plan.net.options["lr"]
            for parameter, their in zip(each.parameters, torchs, strict=True):
                torch.testing.assert_close(parameter, their, rtol=1e-5, atol=most)
    theirs.optimizer.zero_grad()


def _assert_no_skip(students: Sequence[Student]) -> None:
    """Raises if a step was skipped: it lacks the optimizer's work, which would flatter its time."""
    for student in students:
        if student.scaler is not None and student.scaler.get_scale() != SCALE:
            raise AssertionError(
                f"{student.plan.net.name}, {student.path} by {student.provider}: a step was "
                "skipped while timed"
            )
    norms = [parameter.detach().abs().max() for parameter in students[0].parameters]
    if not bool(torch.stack(norms).isfinite().all()):
        raise AssertionError(f"{students[0].plan.net.name}: parameters overflowed while timed")
