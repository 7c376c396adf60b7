"""Each skipped step has a line in Python's logger "ampfast"."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
from support.captures import counters_on_gpu
from support.steps import Training

import ampfast

WINDOW = ampfast.Sigmas(6, window=4)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{each.levelname} {each.getMessage()}" for each in caplog.records]


def test_level_reason_norm_limit_and_parameter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ampfast")
    guard = ampfast.StepGuard(skip_above=WINDOW, track="overflow")
    Training(guard).step(1.0, 1.0, 1.0, 1.0, 9.0, math.nan, 1.0)
    scaler = ampfast.GradScaler("cpu", init_scale=8.0)
    training = Training(scaler).step(math.inf, 1.0, 1.0)
    training.backward(30.0)
    scaler.clip_grad_norm_(training.optimizer, 1.0, skip_above=20)
    scaler.step_and_update(training.optimizer)
    spike, nan, overflow, clipped = lines(caplog)
    assert (
        spike == "WARNING step 4 was skipped: a spike, its gradient norm is 9, above the limit 1.06"
    )
    assert nan.startswith("WARNING step 5 was skipped: inf or NaN in its gradients: group 0, par")
    assert overflow == "INFO step 0 was skipped: inf or NaN in its gradients; the scale was 8"
    assert clipped.startswith("WARNING step 3 was skipped: a spike, its gradient norm is 30, above")
    assert clipped.endswith("the limit 20; the scale was 4")


def test_after_ten_lines_one_in_a_hundred_steps(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(ampfast.StepGuard(max_skips=None)).step(*[math.nan, 1.0] * 200)
    assert len(training.scaler.history()) == 400
    steps = [int(line.split()[2]) for line in lines(caplog)]
    assert steps == [*range(0, 20, 2), 118, 218, 318]


@pytest.mark.parametrize("level", [logging.ERROR, logging.WARNING])
def test_on_a_gpu_it_waits_for_nothing(
    level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And reads nothing where the logger is not enabled; the line comes some steps late."""
    caplog.set_level(level, "ampfast")
    training = Training(ampfast.StepGuard()).step(1.0)
    copies = counters_on_gpu(training.scaler, monkeypatch)
    for step in range(80):
        training.step(math.nan if step == 20 else 1.0)
        for copy in copies:
            copy.set()
    if level == logging.ERROR:
        assert copies == lines(caplog) == []
    else:
        assert len(copies) <= 80 / 16 + 2
        assert lines(caplog) == ["WARNING step 21 was skipped: inf or NaN in its gradients"]


def test_a_scalers_overflows_are_not_read_by_default(monkeypatch: Any) -> None:
    training = Training(ampfast.GradScaler("cpu")).step(math.inf)
    monkeypatch.setattr(training.scaler._skip_log, "_write", pytest.fail)
    training.step(*[math.inf] * 30)


@pytest.mark.parametrize("backend", [None, "aten"])
@pytest.mark.parametrize("by_clip", [False, True])
def test_the_limit_can_be_asked(by_clip: bool, backend: str | None) -> None:
    guard = ampfast.StepGuard(backend=backend, skip_above=None if by_clip else WINDOW)
    training = Training(guard)
    optimizer, found = training.optimizer, []

    def step(norm: float) -> str | None:
        training.backward(norm)
        if by_clip:
            guard.clip_grad_norm_(optimizer, 1.0, skip_above=WINDOW)
        guard.step_and_update(optimizer)
        found.append(guard.skip_limit(optimizer))
        return guard.skip_reason(optimizer)

    for norm in (1.0, 2.0, 1.0, 2.0):
        step(norm)
    with pytest.raises(LookupError, match="never checked"):
        guard.skip_limit(Training(guard).optimizer)
    assert found[:3] == [None] * 3 and found[-1] == pytest.approx(1.5 + 6 * (1 / 3) ** 0.5)
    assert step(found[-1] * 1.001) == "spike" and found[-1] == found[-2]
    assert ampfast.report.figures(guard)["skip_limit"] == guard.skip_limit() == found[-1]
    assert step(found[-1] * 0.999) is None
    wrapper: Any = SimpleNamespace(optimizer=optimizer)  # as Accelerate's
    assert (guard.skip_limit(wrapper), guard.skip_reason(wrapper)) == (guard.skip_limit(), None)
    resumed = ampfast.StepGuard(backend=backend, skip_above=WINDOW)
    resumed.load_state_dict(guard.state_dict())
    assert resumed.skip_limit() == guard.skip_limit()
    guard.skip_above = 7
    assert guard.skip_limit(optimizer) == 7
