"""Steps with float32 master weights without the optimizer's own, beside those by hand."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import ampfast
from ampfast import backends

from .cases import CASES, GradCase, make_gradients
from .machine import require_memory
from .providers import exact_norm
from .steps import NoOptimizer, make_scaler, scaler_state
from .timing import LOOP, Job, Measured, Setting, Subject, assert_same

MASTERS, CLIPPED_MASTERS = "master weights", "master weights, clip"
LISTS = (
    *(GradCase("1000x4", 1000 * ((4,),)), CASES["1000x1k"], CASES["resnet50"]),
    CASES["bert_base"],
)
CPU, DTYPE, SCALE = torch.device("cpu"), torch.float16, 2.0**7
PARITY_STEPS, BAD_STEP = 4, 2
# Relative tolerance of clipped weights: torch sums the norm of up to 1e8 values in float32, which
# on a CPU differs by 2e-5 there.
CLIP_TOLERANCE = 1e-4
# Of SGD: weights from 0.5 on stay far from 0, where the tolerance would be.
LEARNING_RATE = 8.0
# Parameters and master weights with their gradients, for three sides; both lists, and copies.
BYTES_PER_ELEMENT = 3 * 12 + 3 * 2 + 4

Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class Side:
    """Float16 parameters and master weights, by ampfast or by hand around torch's scaler.

    By hand, foreach copies into gradients that are kept, or a loop, one by one, makes new ones.
    """

    def __init__(
        self, name: str, weights: Sequence[Tensor], optimizer: Optimizer, limit: float | None
    ) -> None:
        self.name, self._limit, self._is_ours = name, limit, name not in ("torch", LOOP)
        self.parameters = [weight.clone().requires_grad_() for weight in weights]
        self.scaler = make_scaler(name if self._is_ours else "torch", CPU, SCALE)
        self._optimizer: Any
        if self._is_ours:
            self._optimizer = ampfast.master_weights_(optimizer(self.parameters))
            self.masters = [self._optimizer.master_weights[each] for each in self.parameters]
            self.zero_grad = self._optimizer.zero_grad
            return
        self.masters = [each.detach().float().requires_grad_() for each in self.parameters]
        self._wide = [torch.empty_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self._wide, strict=True):
            master.grad = gradient
        self._optimizer = optimizer(self.masters)
        # The gradients of the parameters alone.
        self.zero_grad = NoOptimizer(self.parameters).zero_grad

    @torch.no_grad()
    def step(self) -> None:
        """The calls of an iteration between backward and `zero_grad`."""
        scaler, optimizer = self.scaler, self._optimizer
        if self.name == "torch":
            torch._foreach_copy_(self._wide, [each.grad for each in self.parameters])
        elif self.name == LOOP:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = parameter.grad.float()
        if self._limit is not None and self._is_ours:
            scaler.clip_grad_norm_(optimizer, self._limit)
        elif self._limit is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.masters, self._limit)
        scaler.step(optimizer)
        scaler.update()
        if self.name == "torch":
            torch._foreach_copy_(self.parameters, self.masters)
        elif self.name == LOOP:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)

    def timed_step(self, gradients: Sequence[Tensor]) -> float:
        """Seconds of a step with new gradients."""
        torch.autograd.backward(self.parameters, gradients)
        start = time.perf_counter()
        self.step()
        seconds = time.perf_counter() - start
        self.zero_grad()
        return seconds


def sides_over(
    weights: Sequence[Tensor], optimizer: Optimizer, limit: float | None
) -> dict[str, Side]:
    """Sides by provider, with parameters of their own."""
    names = ("torch", LOOP, backends.default_for(CPU))
    return {name: Side(name, weights, optimizer, limit) for name in names}


def jobs(on: Setting) -> list[Job]:
    """One job for each list, unclipped and clipped; none on a GPU."""
    return [
        Job(f"{call}, {case.name}", functools.partial(measure, case, call, on))
        for case in (LISTS[:2] if on.effort.quick else LISTS)
        for call in (MASTERS, CLIPPED_MASTERS)
        if on.queue is None
    ]


def measure(case: GradCase, call: str, on: Setting) -> Measured:
    """Times steps, each with new gradients."""
    require_memory(BYTES_PER_ELEMENT * case.elements, on.device)
    weights, gradients = (make_gradients(case, DTYPE, on.device) for _ in range(2))
    limit = exact_norm(gradients) / SCALE / 2 if call == CLIPPED_MASTERS else None
    what = f"{call}, {case.name}"
    assert_parity(weights, gradients, limit, what)
    sides = sides_over(weights, NoOptimizer, limit)
    steps = {(call, name): side.timed_step for name, side in sides.items()}
    subject = Subject("masters", case, DTYPE)
    rows = subject.time(steps, on, timer=lambda step, numbers: step(gradients))
    for name, side in sides.items():
        assert_same(side.parameters, weights, f"{what}, by {name}, after it was timed")
        if side.scaler.get_scale() != SCALE:
            raise AssertionError(f"{what}, by {name}: a step was skipped while timed")
    return Measured(rows)


def assert_parity(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], limit: float | None, what: str
) -> None:
    """Compares master weights, parameters and scale after each step of SGD; one step is skipped."""
    sides = sides_over(weights, functools.partial(torch.optim.SGD, lr=LEARNING_RATE), limit)
    theirs = sides["torch"]
    bad = [*gradients[:-1], gradients[-1].clone()]
    bad[-1].view(-1)[-1] = math.inf
    for number in range(PARITY_STEPS):
        for name, side in sides.items():
            side.timed_step(bad if number == BAD_STEP else gradients)
            where = f"{what}, by {name}, step {number}"
            masters, torchs = ([each.detach() for each in of.masters] for of in (side, theirs))
            states = scaler_state(side.scaler), scaler_state(theirs.scaler)
            assert_same(*states, f"scale of {where}")
            rounded = [each.to(DTYPE) for each in masters]
            assert_same(side.parameters, rounded, f"parameters of {where}")
            if limit is None:
                assert_same(masters, torchs, f"master weights of {where}")
            for our, their in zip(masters, torchs, strict=True):
                torch.testing.assert_close(our, their, rtol=CLIP_TOLERANCE, atol=0)
