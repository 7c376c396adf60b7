"""Checkpoints of `LateScheduler` with a pending decision."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from schedule_support import INF, KINDS, STEPS, late, late_one, rates, trained
from support.comparison import assert_same


def saved(*things: Any) -> list[Any]:
    """State dicts, saved to and loaded from a file."""
    file = io.BytesIO()
    torch.save([thing.state_dict() for thing in things], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("schedule", ["ExponentialLR", "SequentialLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_at_any_step(kind: str, schedule: str) -> None:
    """Checkpoints include the pending decision, and saving does not resolve it."""
    whole, scheduler = late_one(kind, schedule)
    expected = [*trained(whole, scheduler, late), rates(whole.optimizer)]
    for end in range(STEPS + 1):
        first, scheduler = late_one(kind, schedule)
        seen = trained(first, scheduler, late, range(end))
        states = saved(first.model, first.optimizer, first.scaler, scheduler)
        second, scheduler = late_one(kind, schedule, seed=1)
        for thing, state in zip(
            (second.model, second.optimizer, second.scaler, scheduler), states, strict=True
        ):
            thing.load_state_dict(state)
        seen += trained(second, scheduler, late, range(end, STEPS))
        assert_same([*seen, rates(second.optimizer)], expected)
        assert_same(
            [first.losses + second.losses, second.observe()["parameters"]],
            [whole.losses, whole.observe()["parameters"]],
        )


def test_arguments_by_keyword_are_saved() -> None:
    one, scheduler = late_one("adam", "ReduceLROnPlateau")
    for step, metrics in enumerate((1.0, 2.0)):
        one.train(step)
        scheduler.step(metrics=metrics)
    (state,) = saved(scheduler)
    assert state["outstanding"] == ((), {"metrics": 2.0})
    another, resumed = late_one("adam", "ReduceLROnPlateau")
    resumed.load_state_dict(state)
    resumed.flush()
    assert another.optimizer.param_groups[0]["lr"] == 0.05
    assert one.optimizer.param_groups[0]["lr"] == 0.1, "saving has decided"


def test_resumed_after_the_first_step_before_one_that_is_skipped() -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    one.train(1)
    scheduler.step()
    (state,) = saved(scheduler)
    another, resumed = late_one("adam", "ExponentialLR")
    resumed.load_state_dict(state)
    with warnings.catch_warnings():
        # Of a scheduler created before its optimizer, as in this process.
        warnings.simplefilter("error")
        another.train(0, INF)
        resumed.step()
    assert resumed.last_epoch == 1


def test_loading_drops_a_pending_decision() -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    fresh = scheduler.state_dict()
    one.train(1)
    scheduler.step()
    scheduler.load_state_dict(fresh)
    scheduler.flush()
    assert scheduler.last_epoch == 0


def test_a_checkpoint_of_the_scheduler_alone() -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    trained(one, scheduler, late)
    scheduler.flush()
    alone = scheduler.scheduler.state_dict()
    _, resumed = late_one("adam", "ExponentialLR")
    resumed.load_state_dict(copy.deepcopy(alone))
    assert_same(resumed.state_dict(), {"scheduler": alone, "outstanding": None})
