"""An end for a training whose steps are all skipped."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.captures import counters_on_gpu, pretend_capture
from support.comparison import HookedUnscale
from support.steps import Training, adamw

import ampfast

# By kind: scaler, optimizer, and how it steps.
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "plain": (ampfast.GradScaler, adamw, "step"),
    "fused": (ampfast.GradScaler, partial(adamw, fused=True), "step"),
    "guard": (ampfast.StepGuard, adamw, "step"),
    "at once": (ampfast.GradScaler, adamw, "together"),
    "clip": (ampfast.GradScaler, adamw, "clip"),
    "hooked": (HookedUnscale, adamw, "step"),
}


def training_of(kind: str = "plain", **arguments: Any) -> Training:
    scaler, make, way = KINDS[kind]
    return Training(scaler("cpu", **arguments), make, way=way)


def end_of(training: Training, steps: str, bad: float = math.nan) -> int | None:
    """Number of the step whose update raises; None if none does."""
    for number, each in enumerate(steps):
        try:
            training.step(bad if each == "x" else 1.0)
        except FloatingPointError:
            return number
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_after_so_many_steps_in_a_row(kind: str) -> None:
    for steps, limit, expected in (
        *(("xxxx", 1, 0), ("..xxx", 3, 4), ("xx.xx.xxx", 3, 8)),
        *(("x.x.x.x.", 2, None), ("xx", 3, None), ("xxxxxxxxx", None, None)),
    ):
        assert end_of(training_of(kind, max_skips=limit), steps) == expected
    if kind not in ("at once", "hooked"):
        training = training_of(kind, max_skips=2, skip_above=10.0)
        assert end_of(training, ".x.xx", 20.0) == 4, "steps skipped for their norm"
        assert training.scaler.stats().spikes == 3
    if kind != "guard":
        assert end_of(training_of(kind, enabled=False, max_skips=1), "xxx") is None


def test_the_error_has_counts_and_report() -> None:
    training = training_of(max_skips=2, track="overflow", init_scale=8.0)
    model = torch.nn.ParameterDict({"name": training.param})
    training.scaler.name_parameters(model)
    assert end_of(training, ".x", math.inf) is None
    with pytest.raises(FloatingPointError) as caught:
        training.step(math.inf)
    first, _, report = str(caught.value).partition("\n")
    assert first == (
        "2 steps in a row were skipped, and max_skips is 2. Of 3 steps 2 were skipped, 0 of them "
        "for their norm; the scale is 2."
    )
    assert report == str(training.scaler.overflow_report()) and "\nname " in report
    # The iteration is over: training may go on, and each further skip raises.
    with pytest.raises(FloatingPointError, match=r"^3 steps in a row"):
        training.step(math.inf)
    assert end_of(training, ".x", math.inf) is None


def test_the_error_tells_why_it_has_no_report() -> None:
    """It is no other error, for which a handler would not be made."""
    training = training_of(max_skips=1)
    training.scaler.name_parameters(torch.nn.Linear(1, 1))
    with pytest.raises(FloatingPointError, match="track='overflow' the parameters"):
        training.step(math.inf)
    training = training_of("guard", max_skips=1, skip_above=10.0)
    with pytest.raises(FloatingPointError, match=r" norm\.\nWhere .* set a higher skip_above\.$"):
        training.step(20.0)

    # Nor that of an override, which may take no argument.
    kind: Any = type("Own", (ampfast.GradScaler,), {"overflow_report": lambda self: None})
    training = Training(kind("cpu", max_skips=1, track="overflow"), adamw)
    with pytest.raises(FloatingPointError, match="1 parameter's gradient was not finite"):
        training.step(math.inf)


def test_a_checkpoint_that_is_loaded_begins_a_new_series() -> None:
    training = training_of(max_skips=2)
    training.step(1.0)
    good = training.scaler.state_dict()
    for _ in range(3):
        assert end_of(training, "xx") == 1
        training.scaler.load_state_dict(good)
        assert training.scaler.stats().consecutive_skips == 0


def test_counts_of_a_gpu_are_told_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied without a wait, not under capture, and forgotten where a state is loaded."""
    training = training_of(max_skips=2)
    training.scaler.scale(torch.ones(()))
    copies, saved = counters_on_gpu(training.scaler, monkeypatch), training.scaler.state_dict()
    training.step(math.inf, math.inf)
    copies[0].set()
    with monkeypatch.context() as patch:
        pretend_capture(patch)
        training.step(math.inf)
    training.scaler.load_state_dict(saved)
    training.step(math.inf, math.inf)
    copies[1].set()
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        training.step(math.inf)
    # Ranks wait for those of the step before, so that all end at the same step.
    training.scaler.max_skips = 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(FloatingPointError, match="5 steps in a row"):
        training.step(math.inf, math.inf)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_the_limit_is_an_attribute_and_is_copied(copied: Callable[[Any], Any]) -> None:
    training = training_of()
    assert training.scaler.max_skips is None
    training.scaler.max_skips = 3
    training.step(math.nan)
    training.scaler = copied(training.scaler)
    assert training.scaler.max_skips == 3
    assert end_of(training, "xx") == 1
    training.scaler.max_skips = None
    assert end_of(training, "xxxx") is None


@pytest.mark.parametrize("kind", KINDS)
def test_very_many_in_a_row_warn_once(kind: str) -> None:
    training = training_of(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.step(math.nan, 1.0, *[math.nan] * 60)
        training.scaler = copy.copy(training.scaler)  # with its counts
        training.step(*[math.nan] * 39)
        assert not caught
        training.step(*[math.nan] * 111)
    (told,) = map(str, (each.message for each in caught))
    counts = "100 steps in a row were skipped. Of 102 steps 101 were skipped, 0 of them for their"
    assert told.startswith(counts) and "find_nonfinite(model)" in told and "skip_above" not in told


@pytest.mark.parametrize(("most", "ends", "warns"), [(None, None, 1), (101, 100, 1), (100, 99, 0)])
def test_an_earlier_end_does_not_warn(most: int | None, ends: int | None, warns: int) -> None:
    training = training_of("guard", max_skips=most, skip_above=10.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert end_of(training, "x" * 120, 20.0) == ends
    assert len(caught) == warns
    for each in caught:
        assert "100 of them for their norm. Where every norm is above the limit, set" in str(each)


@pytest.mark.parametrize("most", [None, 150])
def test_on_a_gpu_it_waits_for_nothing(most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    training = training_of(max_skips=most)
    training.step(1.0)
    copies = counters_on_gpu(training.scaler, monkeypatch)
    for turn in range(700):
        training.step(1.0)
        if turn % 2:
            for copy_of in copies:
                copy_of.set()
    assert len(copies) <= 8, "one in about a hundred steps"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.step(*[math.nan] * 140)
    for copy_of in copies:
        copy_of.set()
    with pytest.warns(UserWarning, match="steps in a row were skipped"):
        for _ in range(3):
            training.step(math.nan)
            copies[-1].set()


@pytest.mark.parametrize("enabled", [True, False])
def test_other_limits_are_refused(enabled: bool) -> None:
    scaler: Any = ampfast.GradScaler("cpu", enabled=enabled, max_skips=2)
    for wrong, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match=r"max_skips must be (an int|from 1 to 2147483647), got"):
            ampfast.GradScaler("cpu", enabled=enabled, max_skips=wrong)
        with pytest.raises(error, match="max_skips must be"):
            scaler.max_skips = wrong
        assert scaler.max_skips == 2
