"""A small dose of each part of `make hostile`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import allocations
import clips
import conditions
import crowds
import interrupts
import pytest
import sanitizers
import torch
from atomic import SCENARIOS, Scenario, Trials
from support.launchers import VARIABLE
from support.processes import threads
from tally import Tally

pytestmark = pytest.mark.skipif(VARIABLE in os.environ, reason="of the CPU's kernels")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield
    # An interrupt between the lines of `torch.no_grad()` leaves gradients disabled.
    torch.set_grad_enabled(True)


def test_clips_at_extreme_magnitudes() -> None:
    clips.run(300).require_success()


def test_conditions_that_change_nothing() -> None:
    conditions.run(100).require_success()


def test_threads_side_by_side() -> None:
    crowds.run(2).require_success()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("track", [None, "overflow"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_every_call(scenario: Scenario, track: str | None) -> None:
    tally = Tally("interrupts")
    tally.add(Trials(scenario, track=track).all_points(interrupts.raised_at, 3))
    tally.require_success()


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer allocates between statements")
def test_failing_allocations() -> None:
    pytest.importorskip("_testcapi", reason="lets Python's allocations fail")
    tally = Tally("failing allocations")
    allocations.run_in_process({}, 4, tally)
    tally.require_success()


def test_sanitized_tests_exist() -> None:
    files = [f"tests/{name}.py" for name in sanitizers.TESTS]
    assert [file for file in files if not (sanitizers.ROOT / file).exists()] == []
