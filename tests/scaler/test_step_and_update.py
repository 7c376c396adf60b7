"""`step_and_update` against `step` for each optimizer and then `update`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.comparison import TorchScaler, assert_same, outcome
from support.optimizers import OPTIMIZERS
from support.steps import Training, step_together

from ampfast import GradScaler


class Trial(Training):
    """Several optimizers that share one scaler."""

    def __init__(self, scaler_type: type, kinds: tuple[str, ...]) -> None:
        scaler = scaler_type("cpu", init_scale=2.0**10, growth_interval=2, growth_factor=1.7)
        super().__init__(scaler, [OPTIMIZERS[kind] for kind in kinds])
        self.given = self.optimizers

    def end(self) -> list[Any]:
        return step_together(self.scaler, self.given)


def assert_ends_alike(trials: Sequence[Trial]) -> None:
    assert_same(*(each.observe() for each in trials))


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

    trials = [Trial(each, kinds) for each in (GradScaler, TorchScaler)]
    for trial in trials:
        trial.backward(1.0, 2.0)
        trial.end()
        trial.backward(3.0, 1.0)
        trial.optimizers[index].step = step
        with pytest.raises(MemoryError, match="no room"):
            trial.end()
        assert [trial.scaler._scale, trial.scaler._growth_tracker] == [2.0**10, 1]
        for optimizer in trial.optimizers:
            # Not compared: the test's stand-in, and attributes that torch's scaler leaves on a
            # fused optimizer.
            for name in ("step", "grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)
    assert trials[0].scaler.stats().steps == 1
    assert_ends_alike(trials)
    # A loop that catches the error goes on with update().
    for trial in trials:
        trial.scaler.update()
    assert_ends_alike(trials)


def no_gradients(trial: Trial) -> None:
    trial.scaler.scale(torch.ones(()))


def stepped(trial: Trial) -> None:
    trial.backward(1.0, 2.0)
    trial.scaler.step(trial.optimizers[0])


def unscaled(trial: Trial) -> None:
    trial.backward(math.inf, 2.0)
    trial.scaler.unscale_(trial.optimizers[0])


def checked(trial: Trial) -> None:
    """By a check of the same optimizer that does not count."""
    trial.backward(math.inf, 2.0)
    trial.scaler._check_inf_per_device(trial.optimizers[0])
    trial.backward(1.0, 2.0)


def without_optimizers(trial: Trial) -> None:
    trial.backward(math.inf, 2.0)
    trial.scaler.step(trial.optimizers[0])
    trial.given = []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("prepare", [no_gradients, stepped, unscaled, checked, without_optimizers])
@pytest.mark.parametrize("kinds", [("sgd",), ("fused_adam",), ("fused_adam", "sgd")], ids="+".join)
def test_errors_and_states_match_separate_calls(
    kinds: tuple[str, ...], prepare: Callable[[Trial], None]
) -> None:
    trials = [Trial(each, kinds) for each in (GradScaler, TorchScaler)]
    for trial in trials:
        prepare(trial)
    assert_same(*(outcome(trial.end).comparable()[:2] for trial in trials))
    assert_ends_alike(trials)
    # An update that could not ride rides in no later check.
    for trial in trials:
        trial.scaler._per_optimizer_states.clear()
        trial.backward(3.0, 1.0)
        for optimizer in trial.optimizers:
            trial.scaler.step(optimizer)
        trial.scaler.update()
    assert_ends_alike(trials)
