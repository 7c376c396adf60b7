"""Benchmark of tracking: parity, timed passes and goals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated import on

from benchmarks import goals, tracking
from benchmarks.cases import CASES

CASE = CASES["1000x1k"]


def test_every_path_is_timed() -> None:
    measured = tracking.measure(CASE, torch.float32, on())
    paths = [*goals.TRACKED_CHECKS, *goals.TRACKED_UNSCALES]
    assert [row.call for row in measured.rows] == paths
    assert all(row.subject == "tracking" and row.ms for row in measured.rows)
    assert measured.goals == [], "nothing is promised on a CPU"
    assert [row.over_none is None for row in measured.rows] == [True, False, False] * 2


@pytest.mark.parametrize("broken", ["marks", "health", "gradients"])
def test_nothing_is_timed_that_is_wrong(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracking.run

    def faulty(path: str, kernels: Any, grads: Any, inverse: Any, track: Any) -> Any:
        found = run(path, kernels, grads, inverse, track)
        if track is not None and broken == "marks":
            track.marks[3, 2] = 1
        if track is not None and track.health is not None and broken == "health":
            track.health[3, 3] += 1
        return found + (track is not None and broken == "gradients")

    monkeypatch.setattr(tracking, "run", faulty)
    with pytest.raises(AssertionError):
        tracking.measure(CASE, torch.float16, on())


def test_lists_that_are_chosen() -> None:
    lists = [(CASES[name], dtype) for name in CASES for dtype in (torch.float32, torch.float64)]
    chosen = tracking.chosen(lists, False, None)
    assert [(case.name, dtype) for case, dtype in chosen] == [
        (case.name, torch.float32)
        for case, dtype in lists
        if case.name in tracking.CPU_CASES and dtype is torch.float32
    ]
    assert tracking.chosen(lists, True, None) == tracking.chosen(lists, False, ("x",)) == lists
