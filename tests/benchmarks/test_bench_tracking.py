"""Benchmark of tracking: parity, timed passes and goals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated import CPU, HostQueue, on

from benchmarks import goals, kernels, tracking
from benchmarks.cases import CASES
from benchmarks.harness import FULL, Setting

CASE = CASES["1000x1k"]


def test_every_path_is_timed() -> None:
    measured = tracking.measure(CASE, torch.float32, on())
    paths = [*goals.TRACKED_CHECKS, *goals.TRACKED_UNSCALES]
    assert [row.call for row in measured.rows] == paths
    assert all(row.subject == "tracking" and row.ms for row in measured.rows)
    assert measured.goals == [], "nothing is promised on a CPU"
    assert [row.over_none is None for row in measured.rows] == [True, False] * 2


@pytest.mark.parametrize("broken", ["marks", "gradients"])
def test_nothing_is_timed_that_is_wrong(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracking.run

    def faulty(path: str, kernels: Any, grads: Any, inverse: Any, track: Any) -> Any:
        found = run(path, kernels, grads, inverse, track)
        if track is not None and broken == "marks":
            track.marks[3, 2] = 1
        return found + (track is not None and broken == "gradients")

    monkeypatch.setattr(tracking, "run", faulty)
    with pytest.raises(AssertionError):
        tracking.measure(CASE, torch.float16, on())


def test_a_cpu_has_fewer_lists_than_a_gpu() -> None:
    lists = [job.label for job in tracking.jobs(Setting(CPU, FULL))]
    assert lists == ["bert_base float32", "bert_base float16"]
    gpu = Setting(CPU, FULL, HostQueue())
    assert len(tracking.jobs(gpu)) == len(kernels.chosen(gpu)) == 21
