"""Steps with float32 master weights without the optimizer's own, beside those by hand."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import ampfast
from ampfast import backends

from .cases import CASES, GradCase, make_gradients
from .machine import require_memory
from .providers import exact_norm
from .steps import NoOptimizer, make_scaler, scaler_state
from .timing import LOOP, Contender, Job, Measured, Setting, Subject, assert_same, interleave

MASTERS, CLIPPED_MASTERS = "master weights", "master weights, clip"
LISTS = (
    GradCase("1000x4", 1000 * ((4,),)),
    CASES["1000x1k"],
    CASES["resnet50"],
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


class Ours:
    """`master_weights_` and `ampfast.GradScaler`."""

    def __init__(self, weights: Sequence[Tensor], optimizer: Optimizer, limit: float | None):
        self.parameters = [weight.clone().requires_grad_() for weight in weights]
        self._limit = limit
        self._optimizer: Any = ampfast.master_weights_(optimizer(self.parameters))
        self.scaler = make_scaler(backends.default_for(CPU), CPU, SCALE)

    def step(self) -> None:
        if self._limit is not None:
            self.scaler.clip_grad_norm_(self._optimizer, self._limit)
        self.scaler.step(self._optimizer)
        self.scaler.update()

    def masters(self) -> list[Tensor]:
        return [self._optimizer.master_weights[each] for each in self.parameters]


class ByHand:
    """The same by torch: copies around its scaler, by foreach into gradients that are kept."""

    def __init__(self, weights: Sequence[Tensor], optimizer: Optimizer, limit: float | None):
        self.parameters = [weight.clone().requires_grad_() for weight in weights]
        self._limit = limit
        self._masters = [each.detach().float().requires_grad_() for each in self.parameters]
        self._wide = [torch.empty_like(master) for master in self._masters]
        for master, gradient in zip(self._masters, self._wide, strict=True):
            master.grad = gradient
        self._optimizer = optimizer(self._masters)
        self.scaler = make_scaler("torch", CPU, SCALE)

    @torch.no_grad()
    def step(self) -> None:
        self._cast()
        if self._limit is not None:
            self.scaler.unscale_(self._optimizer)
            torch.nn.utils.clip_grad_norm_(self._masters, self._limit)
        self.scaler.step(self._optimizer)
        self.scaler.update()
        self._round()

    def _cast(self) -> None:
        torch._foreach_copy_(self._wide, [each.grad for each in self.parameters])

    def _round(self) -> None:
        torch._foreach_copy_(self.parameters, self._masters)

    def masters(self) -> list[Tensor]:
        return [master.detach() for master in self._masters]


class Loop(ByHand):
    """The same with copies one by one, and new float32 gradients."""

    def _cast(self) -> None:
        for master, parameter in zip(self._masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()

    def _round(self) -> None:
        for master, parameter in zip(self._masters, self.parameters, strict=True):
            parameter.copy_(master)


def sides_over(
    weights: Sequence[Tensor], optimizer: Optimizer, limit: float | None
) -> dict[str, Any]:
    """Sides by provider, with parameters of their own."""
    kinds = {"torch": ByHand, LOOP: Loop, backends.default_for(CPU): Ours}
    return {name: kind(weights, optimizer, limit) for name, kind in kinds.items()}


def timed_step(side: Any, gradients: Sequence[Tensor]) -> float:
    """Seconds of the calls between backward, which leaves new gradients, and their release."""
    torch.autograd.backward(side.parameters, gradients)
    start = time.perf_counter()
    side.step()
    seconds = time.perf_counter() - start
    for parameter in side.parameters:
        parameter.grad = None
    return seconds


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
    contenders = [Contender(call, name, lambda number: None) for name in sides]

    def timer(contender: Contender, calls: range) -> float:
        return timed_step(sides[contender.provider], gradients)

    # One step of each side in a round.
    samples = interleave(contenders, replace(on.effort, sample_s=0.0), 1, timer)
    for name, side in sides.items():
        assert_same(side.parameters, weights, f"{what}, by {name}, after it was timed")
        if side.scaler.get_scale() != SCALE:
            raise AssertionError(f"{what}, by {name}: a step was skipped while timed")
    return Measured(Subject("masters", case, DTYPE).rows(contenders, samples))


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
            timed_step(side, bad if number == BAD_STEP else gradients)
            where, masters = f"{what}, by {name}, step {number}", side.masters()
            states = scaler_state(side.scaler), scaler_state(theirs.scaler)
            assert_same(*states, f"scale of {where}")
            rounded = [each.to(DTYPE) for each in masters]
            assert_same(side.parameters, rounded, f"parameters of {where}")
            if limit is None:
                assert_same(masters, theirs.masters(), f"master weights of {where}")
                continue
            for our, their in zip(masters, theirs.masters(), strict=True):
                torch.testing.assert_close(our, their, rtol=CLIP_TOLERANCE, atol=0)
