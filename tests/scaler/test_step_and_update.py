"""`step_and_update` against `step` for each optimizer and then `update`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import TorchScaler, assert_same, outcome
from support.steps import assert_sides_same, side

from ampfast import GradScaler


class Trial:
    """Several small models that share one scaler."""

    def __init__(self, scaler_type: type, kinds: tuple[str, ...]) -> None:
        arguments = {"init_scale": 2.0**10, "growth_interval": 2, "growth_factor": 1.7}
        self.sides = [side(scaler_type, kind, i, **arguments) for i, kind in enumerate(kinds)]
        self.scaler: Any = self.sides[0].scaler
        for each in self.sides:
            each.scaler = self.scaler
        self.optimizers = [each.optimizer for each in self.sides]

    def backward(self, seed: int, bad: bool = False) -> None:
        for each in self.sides:
            each.optimizer.zero_grad()
            self.scaler.scale(each.loss(seed)).backward()
        if bad:
            next(self.sides[0].model.parameters()).grad.view(-1)[3] = math.inf

    def end(self) -> list[Any]:
        """In one call of ours, in several of torch's."""
        if isinstance(self.scaler, GradScaler):
            return self.scaler.step_and_update(*self.optimizers)
        results = [self.scaler.step(optimizer) for optimizer in self.optimizers]
        self.scaler.update()
        return results

    def same_as(self, other: Trial) -> None:
        for ours, theirs in zip(self.sides, other.sides, strict=True):
            assert_sides_same(ours, theirs)


@pytest.fixture(params=["cpu", "launcher"])
def kernels(request: pytest.FixtureRequest) -> None:
    """Those of the CPU, or of a device, where the update rides in the last check."""
    if request.param == "launcher":
        request.getfixturevalue("launcher")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kinds", [("sgd", "adam"), ("fused_sgd", "fused_adam")], ids="+".join)
def test_a_step_that_raises_leaves_the_scale_alone(kinds: tuple[str, ...], index: int) -> None:
    def step(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room")

    ours, theirs = Trial(GradScaler, kinds), Trial(TorchScaler, kinds)
    for trial in (ours, theirs):
        trial.backward(0)
        trial.end()
        trial.backward(1)
        trial.optimizers[index].step = step
        with pytest.raises(MemoryError, match="no room"):
            trial.end()
        assert [trial.scaler._scale, trial.scaler._growth_tracker] == [2.0**10, 1]
        for optimizer in trial.optimizers:
            # Not compared: the test's stand-in, and attributes that torch's scaler leaves on a
            # fused optimizer.
            for name in ("step", "grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)
    assert ours.scaler.stats().steps == 1
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


def unscaled(trial: Trial) -> None:
    trial.backward(0, bad=True)
    trial.scaler.unscale_(trial.optimizers[0])


def checked(trial: Trial) -> None:
    """By a check of the same optimizer that does not count."""
    trial.backward(0, bad=True)
    trial.scaler._check_inf_per_device(trial.optimizers[0])
    trial.backward(0)


def without_optimizers(trial: Trial) -> None:
    trial.backward(0, bad=True)
    trial.scaler.step(trial.optimizers[0])
    trial.optimizers = []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("prepare", [no_gradients, stepped, unscaled, checked, without_optimizers])
@pytest.mark.parametrize("kinds", [("sgd",), ("fused_adam",), ("fused_adam", "sgd")], ids="+".join)
def test_errors_and_states_match_separate_calls(
    kinds: tuple[str, ...], prepare: Callable[[Trial], None]
) -> None:
    ours, theirs = Trial(GradScaler, kinds), Trial(TorchScaler, kinds)
    for trial in (ours, theirs):
        prepare(trial)
    assert_same(*(outcome(trial.end).comparable()[:2] for trial in (ours, theirs)))
    ours.same_as(theirs)
    # An update that could not ride rides in no later check.
    for trial in (ours, theirs):
        trial.scaler._per_optimizer_states.clear()
        trial.backward(1)
        for each in trial.sides:
            trial.scaler.step(each.optimizer)
        trial.scaler.update()
    ours.same_as(theirs)
