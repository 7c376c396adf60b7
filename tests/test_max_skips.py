"""An end for a training whose steps are all skipped."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ampfast


class Hooked(ampfast.GradScaler):
    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)


# By kind: scaler, whether the optimizer is fused, and how it steps.
KINDS: dict[str, tuple[Callable[..., Any], bool, str]] = {
    "plain": (ampfast.GradScaler, False, "step"),
    "fused": (ampfast.GradScaler, True, "step"),
    "guard": (ampfast.StepGuard, False, "step"),
    "at once": (ampfast.GradScaler, False, "step_and_update"),
    "clip": (ampfast.GradScaler, False, "clip"),
    "hooked": (Hooked, False, "step"),
}


class Training:
    """A parameter, its optimizer and a scaler."""

    def __init__(self, kind: str = "plain", **arguments: Any) -> None:
        make, fused, self.call = KINDS[kind]
        self.scaler = make("cpu", **arguments)
        self.param = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.AdamW([self.param], fused=fused)

    def step(self, value: float) -> None:
        self.param.grad = self.scaler.scale(torch.ones(())) * torch.full((3,), value)
        if self.call == "step_and_update":
            self.scaler.step_and_update(self.optimizer)
            return
        if self.call == "clip":
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def ends_at(self, steps: str, bad: float = math.nan) -> int | None:
        """Number of the step whose update raises; None if none does."""
        for number, each in enumerate(steps):
            try:
                self.step(bad if each == "x" else 1.0)
            except FloatingPointError:
                return number
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_after_so_many_steps_in_a_row(kind: str) -> None:
    for steps, limit, expected in (
        *(("xxxx", 1, 0), ("..xxx", 3, 4), ("xx.xx.xxx", 3, 8)),
        *(("x.x.x.x.", 2, None), ("xx", 3, None), ("xxxxxxxxx", None, None)),
    ):
        assert Training(kind, max_skips=limit).ends_at(steps) == expected
    if kind not in ("at once", "hooked"):
        training = Training(kind, max_skips=2, skip_above=10.0)
        assert training.ends_at(".x.xx", 20.0) == 4, "steps skipped for their norm"
        assert training.scaler.stats().spikes == 3
    if kind != "guard":
        assert Training(kind, enabled=False, max_skips=1).ends_at("xxx") is None


def test_the_error_has_counts_and_report() -> None:
    training = Training(max_skips=2, track="overflow", init_scale=8.0)
    training.scaler.name_parameters([("a name", training.param)])
    assert training.ends_at(".x", math.inf) is None
    with pytest.raises(FloatingPointError) as caught:
        training.step(math.inf)
    first, _, report = str(caught.value).partition("\n")
    assert first == (
        "2 steps in a row were skipped, and max_skips is 2. Of 3 steps 2 were skipped, 0 of them "
        "for their norm; the scale is 2."
    )
    assert report == str(training.scaler.overflow_report()) and "a name" in report
    # The iteration is over: training may go on, and each further skip raises.
    with pytest.raises(FloatingPointError, match=r"^3 steps in a row"):
        training.step(math.inf)
    assert training.ends_at(".x", math.inf) is None


@pytest.mark.parametrize("track", [None, "overflow"])
def test_the_error_tells_why_it_has_no_report(track: Any) -> None:
    """It is no other error, for which a handler would not be made."""
    training = Training(max_skips=1, track=track)
    training.scaler.name_parameters(torch.nn.Linear(1, 1))
    why = "none of the optimizers' 1 parameters has a name" if track else "made with track='overfl"
    with pytest.raises(FloatingPointError, match=why):
        training.step(math.inf)


def test_a_checkpoint_that_is_loaded_begins_a_new_series() -> None:
    training = Training(max_skips=2)
    training.step(1.0)
    good = training.scaler.state_dict()
    for _ in range(3):
        assert training.ends_at("xx") == 1
        training.scaler.load_state_dict(good)
        assert training.scaler.stats().consecutive_skips == 0


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_the_limit_is_an_attribute_and_is_copied(copied: Callable[[Any], Any]) -> None:
    training = Training()
    assert training.scaler.max_skips is None
    training.scaler.max_skips = 3
    training.step(math.nan)
    training.scaler = copied(training.scaler)
    assert training.scaler.max_skips == 3
    assert training.ends_at("xx") == 1
    training.scaler.max_skips = None
    assert training.ends_at("xxxx") is None


@pytest.mark.parametrize("enabled", [True, False])
def test_other_limits_are_refused(enabled: bool) -> None:
    scaler: Any = ampfast.GradScaler("cpu", enabled=enabled, max_skips=2)
    for wrong, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match=r"max_skips must be (an int or None|at least 1), got"):
            ampfast.GradScaler("cpu", enabled=enabled, max_skips=wrong)
        with pytest.raises(error, match="max_skips must be"):
            scaler.max_skips = wrong
        assert scaler.max_skips == 2
