"""Benchmark of tracking: parity, timed passes and goals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated import BRIEF, CPU

from benchmarks import goals, report, tracking
from benchmarks.cases import CASES
from benchmarks.harness import Samples

CASE = CASES["1000x1k"]


def test_every_path_is_timed() -> None:
    measured = tracking.measure(CASE, torch.float32, CPU, BRIEF)
    paths = [*goals.TRACKED_CHECKS, *goals.TRACKED_UNSCALES]
    assert [row.path for row in measured.rows] == paths
    assert all(row.subject == "tracking" and row.ms_p50 for row in measured.rows)
    assert measured.goals == [], "nothing is promised on a CPU"
    table = report.tracking_table("", measured.rows)
    over = [line[-1] for line in table.lines]
    assert [cell == "-" for cell in over] == [True, False, False] * 2


def test_goals_are_for_large_lists_on_a_gpu() -> None:
    paths = (*goals.TRACKED_CHECKS, *goals.TRACKED_UNSCALES)
    times = {path: 1.0 + 0.2 * (path == goals.TRACKED_UNSCALES[1]) for path in paths}
    samples = Samples({(path, "triton"): [time] * 9 for path, time in times.items()})
    for dtype, size, tensors, verdicts in (
        ("float32", 256_000_000, 0, [True, False]),
        ("float16", 256_000_000, 0, [True] * 2),
        ("float16", 255_000_000, 0, []),
        ("float64", 256_000_000, 0, []),
        ("float32", 256_000_000, None, []),
    ):
        place = goals.Place("bert_large", "bert_large", dtype, size, tensors)
        found = goals.of_tracking(place, "triton", samples)
        assert [goal.met for goal in found] == verdicts


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
        tracking.measure(CASE, torch.float16, CPU, BRIEF)


def test_lists_that_are_chosen() -> None:
    lists = [(CASES[name], dtype) for name in CASES for dtype in (torch.float32, torch.float64)]
    chosen = tracking.chosen(lists, False, None)
    assert [(case.name, dtype) for case, dtype in chosen] == [
        (case.name, torch.float32)
        for case, dtype in lists
        if case.name in tracking.CPU_CASES and dtype is torch.float32
    ]
    assert tracking.chosen(lists, True, None) == tracking.chosen(lists, False, ("x",)) == lists
