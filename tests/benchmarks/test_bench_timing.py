"""Timers: fair turns, medians of ratios, device time apart from host time; time of launches."""

from __future__ import annotations

import pytest
import torch
from support.cuda_kernels import NVCC
from support.processes import python

from benchmarks import timing
from benchmarks.cases import GradCase
from benchmarks.results import Spread
from benchmarks.timing import Effort, HostQueue, Subject


def test_contenders_take_turns_and_samples_are_whole_cycles():
    turns = []

    def timer(call, numbers):
        turns.append((call, len(numbers)))
        return {"a": 2.0, "b": 1.0}[call]

    contenders = {("p", name): name for name in "ab"}
    effort = Effort(quick=True, comparison_s=0.0, sample_s=30.0)
    samples = timing.interleave(contenders, effort, cycle=4, timer=timer)
    # After a warm-up, one trial per contender sets the number of cycles per sample.
    assert turns[:4] == [("a", 4), ("a", 4), ("b", 4), ("b", 4)]
    forwards = [("a", 16), ("b", 32)]
    assert turns[4:] == effort.rounds // 2 * (forwards + forwards[::-1])
    assert samples == {("p", "a"): 6 * [2.0], ("p", "b"): 6 * [1.0]}


@pytest.mark.parametrize("is_host", [False, True])
def test_rows_have_medians_and_the_median_of_torchs_time_over_ours_by_round(is_host):
    samples = {("new", "cpu"): [1.0, 10.0, 100.0], ("old", "torch"): [2.0, 30.0, 400.0]}
    over = Subject("kernels", GradCase("list", ((4,),)), torch.float16, 2, is_host, {"new": "old"})
    ours, theirs = timing.replace(over, without=("old", "torch")).rows(samples)
    assert ours.name == ("kernels", "list, cold", "float16", "new", "ampfast")
    assert (ours.vs_torch, ours.replaces, ours.rounds) == (3.0, "old", 3)
    assert ours.over_none == pytest.approx(1 / 3)
    assert (theirs.side, theirs.vs_torch, theirs.over_none) == ("torch", None, None)
    wall, host = ((4600.0, 10_000.0, 64_000.0), "wall", None), (None, None, (4.6e6, 1e7, 6.4e7))
    assert (ours.ms, ours.timer, ours.host_us) == (host if is_host else wall)
    assert Spread.of([float(value) for value in range(11)]) == Spread(2.0, 5.0, 8.0)


def test_the_first_calls_of_a_sample_are_not_timed(monkeypatch):
    now, calls, untimed = [0.0], [], 4
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(number):
        calls.append(number)
        now[0] += 9 if len(calls) <= untimed else 1 + number

    timer = timing.device_timer(HostQueue(), {("p", "a"): call}, 4, graphs=True)
    assert timer(call, range(8)) == 2.5 and calls == 3 * [0, 1, 2, 3]
    calls, untimed = [], 1
    assert timing.time_on_host(call, range(4)) == 3.0
    calls, untimed = [], 0
    assert timing.host_timer(HostQueue())(call, range(2)) == 1.5


# Host time of launches over a driver that does nothing: what is timed, and what is printed


PROGRAM = """
import sys, torch
from ampfast import GradScaler
from benchmarks import launches
from benchmarks.steps import optimizer_over

launches.main([sys.argv[1], "--rounds", "1", "--calls", "2"])
gradient, scaler = torch.full((4,), 8.0), GradScaler("cpu", init_scale=4.0)
scaler.scale(torch.ones(()))
scaler.unscale_(optimizer_over([gradient], False))
print(gradient.tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["triton", pytest.param("cuda", marks=pytest.mark.sweep), "torch"])
def test_a_row(kind):
    if kind == "triton":
        pytest.importorskip("triton")
    if kind == "cuda" and NVCC is None:
        pytest.skip("nvcc is not on the PATH")
    if kind != "torch" and torch.version.cuda is not None:
        pytest.skip("a CUDA build of torch calls the idle driver itself")
    done = python("-c", PROGRAM, kind, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    said, _, header, _, *rows, left = done.stdout.splitlines()
    if kind == "cuda":
        *rows, _, watched = rows
        assert watched.startswith("A tensor under find_nonfinite: ")
    assert "host time only" in said and len(rows) == (4 if kind == "torch" else 6)
    for row in rows:
        assert header.count("|") == row.count("|") == 6
        assert all(float(cell) > 0 for cell in row.split("|")[3:6])
    # Nothing is unscaled where no kernel runs.
    assert left == str(4 * [2.0 if kind == "torch" else 8.0])
