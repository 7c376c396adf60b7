"""`step_and_update` against `step` for each optimizer and then `update`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.optimizers import OPTIMIZERS
from support.outcomes import outcome
from support.scalers import TorchScaler
from support.twins import assert_sides_same, side

from ampfast import GradScaler

GROUPS = [
    ("sgd",),
    ("fused_adam",),
    ("momentum", "adam"),
    ("fused_sgd", "fused_adamw", "fused_adagrad"),
    ("adam", "fused_adam"),
    ("fused_sgd", "sgd", "momentum"),
]
# Optimizers with a bad gradient, step by step.
PATTERNS = [(), (0,), (), (-1,), (0, -1), (), (), ()]


class Trial:
    """Several small models that share one scaler."""

    def __init__(self, scaler_type: type, kinds: tuple[str, ...], **arguments: Any) -> None:
        defaults = {"init_scale": 2.0**10, "growth_interval": 2, "growth_factor": 1.7}
        self.sides = [
            side(scaler_type, kind, seed, **{**defaults, **arguments})
            for seed, kind in enumerate(kinds)
        ]
        self.scaler: Any = self.sides[0].scaler
        for each in self.sides:
            each.scaler = self.scaler

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each.optimizer for each in self.sides]

    def backward(self, seed: int, bad: tuple[int, ...] = (), value: float = math.inf) -> None:
        for each in self.sides:
            each.optimizer.zero_grad()
            self.scaler.scale(each.loss(seed)).backward()
        for index in bad:
            next(self.sides[index].model.parameters()).grad.view(-1)[3] = value

    def apart(self) -> list[Any]:
        results = [self.scaler.step(optimizer) for optimizer in self.optimizers]
        self.scaler.update()
        return results

    def at_once(self) -> list[Any]:
        return self.scaler.step_and_update(*self.optimizers)

    def same_as(self, other: Trial) -> None:
        for ours, theirs in zip(self.sides, other.sides, strict=True):
            assert_sides_same(ours, theirs)


Prepare = Callable[[Trial], object]


def trials(kinds: tuple[str, ...], prepare: Prepare | None = None) -> tuple[Trial, Trial]:
    """Ours and torch's, both prepared."""
    both = Trial(GradScaler, kinds), Trial(TorchScaler, kinds)
    if prepare is not None:
        for trial in both:
            prepare(trial)
    return both


def assert_end_alike(ours: Trial, theirs: Trial) -> None:
    """Ends the iteration of ours in one call."""
    ends = outcome(ours.at_once), outcome(theirs.apart)
    assert_same(ends[0].comparable()[:2], ends[1].comparable()[:2])
    ours.same_as(theirs)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("explicit", [(), (0,), (-1,), (0, -1)])
@pytest.mark.parametrize("kinds", GROUPS, ids="+".join)
def test_equals_step_then_update(
    kinds: tuple[str, ...], explicit: tuple[int, ...], value: float
) -> None:
    ours, theirs = trials(kinds)
    for seed, bad in enumerate(PATTERNS):
        for trial in (ours, theirs):
            trial.backward(seed, bad, value)
            for index in {i % len(kinds) for i in explicit}:
                trial.scaler.unscale_(trial.optimizers[index])
        results = ours.at_once()
        assert type(results) is list
        assert results == theirs.apart()
        ours.same_as(theirs)
        for index, optimizer in enumerate(ours.optimizers):
            hit = index in {i % len(kinds) for i in bad}
            assert ours.scaler.step_skipped(optimizer) is hit
            assert ours.scaler.found_inf(optimizer).item() == float(hit)


def raises_in_step(trial: Trial, index: int) -> None:
    def step(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room")

    trial.optimizers[index].step = step


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kinds", [("sgd", "adam"), ("fused_sgd", "fused_adam")], ids="+".join)
def test_a_step_that_raises_leaves_the_scale_alone(kinds: tuple[str, ...], index: int) -> None:
    arguments = {"growth_interval": 1}
    ours, theirs = (Trial(kind, kinds, **arguments) for kind in (GradScaler, TorchScaler))
    before = [2.0**10, 0]
    for trial, call in ((ours, ours.at_once), (theirs, theirs.apart)):
        trial.backward(0)
        raises_in_step(trial, index)
        with pytest.raises(MemoryError, match="no room"):
            call()
        assert [trial.scaler._scale, trial.scaler._growth_tracker] == before
        for optimizer in trial.optimizers:
            # Not compared: the test's stand-in, and attributes that torch's scaler leaves on a
            # fused optimizer.
            for name in ("step", "grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)
    ours.same_as(theirs)
    # A loop that catches the error goes on with update().
    for trial in (ours, theirs):
        trial.scaler.update()
    ours.same_as(theirs)


def no_gradients(trial: Trial) -> None:
    trial.scaler.scale(torch.ones(()))


def stepped(trial: Trial) -> None:
    trial.backward(0)
    trial.scaler.step(trial.optimizers[0])


def overflowed(trial: Trial) -> None:
    trial.backward(0, (0,))
    trial.scaler.step(trial.optimizers[0])


def unscaled(trial: Trial) -> None:
    trial.backward(0, (0,))
    trial.scaler.unscale_(trial.optimizers[0])


def checked(trial: Trial) -> None:
    """By a check of the same optimizer that does not count."""
    trial.backward(0, (0,))
    trial.scaler._check_inf_per_device(trial.optimizers[0])
    trial.backward(0)


CASES = [(prepare, "cpu") for prepare in (no_gradients, stepped, unscaled, None)]
CASES += [(prepare, "launcher") for prepare in (unscaled, checked)]


@pytest.mark.parametrize(("prepare", "kernels"), CASES)
@pytest.mark.parametrize("kinds", [("sgd",), ("fused_adam",), ("fused_adam", "sgd")], ids="+".join)
def test_errors_and_states_match_separate_calls(
    kinds: tuple[str, ...], prepare: Prepare | None, kernels: str, request: pytest.FixtureRequest
) -> None:
    if kernels == "launcher":
        request.getfixturevalue("launcher")
    ours, theirs = trials(kinds, prepare)
    assert_end_alike(ours, theirs)
    if kernels == "launcher":
        # An update that could not ride rides in no later check.
        for trial in (ours, theirs):
            trial.backward(1)
            trial.apart()
        ours.same_as(theirs)


@pytest.mark.parametrize("kernels", ["cpu", "launcher"])
def test_without_optimizers_it_is_update(kernels: str, request: pytest.FixtureRequest) -> None:
    if kernels == "launcher":
        request.getfixturevalue("launcher")
    ours, theirs = trials(("sgd",), overflowed)
    assert ours.scaler.step_and_update() == []
    theirs.scaler.update()
    ours.same_as(theirs)
    assert ours.scaler.get_scale() == 2.0**9
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        ours.scaler.step_and_update()


def test_every_kind_of_optimizer_was_tried() -> None:
    assert {kind for kinds in GROUPS for kind in kinds} == set(OPTIMIZERS)
