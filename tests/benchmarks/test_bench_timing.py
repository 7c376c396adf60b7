"""Timers: fair turns, medians of ratios, device time apart from host time, and equal bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from simulated import HostQueue

from benchmarks import timing
from benchmarks.cases import GradCase
from benchmarks.results import Spread
from benchmarks.timing import Contender, Effort, EventTimer, GraphTimer, Timed


@pytest.fixture
def clock(monkeypatch):
    """Time of all timers; `clock[0] += seconds` advances it."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def taking(clock, seconds_of: Callable[[int], float], **more) -> Contender:
    """Contender whose calls take seconds of a clock, and whose numbers it keeps."""
    calls = []

    def call(number: int) -> None:
        calls.append(number)
        clock[0] += seconds_of(number)

    contender = Contender("p", "a", call, **more)
    object.__setattr__(contender, "calls", calls)
    return contender


def test_contenders_take_turns_in_their_context_and_samples_are_whole_cycles():
    turns, inside = [], []

    class Around:
        def __enter__(self):
            inside.append(True)

        def __exit__(self, *error):
            inside.pop()

    def timer(contender, calls):
        turns.append((contender.provider, len(calls), bool(inside)))
        return {"a": 2.0, "b": 1.0}[contender.provider]

    contenders = [
        Contender("p", "a", lambda call: None, around=Around),
        Contender("p", "b", lambda call: None),
    ]
    effort = Effort(quick=True, comparison_s=0.0, sample_s=30.0)
    samples = timing.interleave(contenders, effort, cycle=4, timer=timer)
    # After a warm-up, one trial per contender sets the number of cycles per sample.
    assert turns[:4] == [("a", 4, True), ("a", 4, True), ("b", 4, False), ("b", 4, False)]
    forwards = [("a", 16, True), ("b", 32, False)]
    assert turns[4:] == effort.rounds // 2 * (forwards + forwards[::-1])
    assert samples == {("p", "a"): 6 * [2.0], ("p", "b"): 6 * [1.0]}


def test_rows_have_medians_and_the_median_of_torchs_time_over_ours_by_round():
    samples = {("new", "cpu"): [1.0, 10.0, 100.0], ("old", "torch"): [2.0, 30.0, 400.0]}
    contenders = [Contender(*key, lambda number: None) for key in samples]
    case = GradCase("list", ((4,), (6,)))
    about = ("kernels", case, torch.float16, contenders, samples)
    timed = Timed(*about, lists=2, replaces={"new": "old"}, host=samples)
    ours, theirs = timed.rows()
    assert ours.name == ("kernels", "list, cold", "float16", "new", "ampfast")
    assert ours.ms == (4600.0, 10_000.0, 64_000.0) == tuple(1e-3 * us for us in ours.host_us)
    assert (ours.vs_torch, ours.host_vs_torch, ours.replaces) == (3.0, 3.0, "old")
    assert (ours.rounds, ours.list_bytes, ours.timer) == (3, 20, "wall")
    assert (theirs.side, theirs.vs_torch, theirs.ms.p50) == ("torch", None, 30_000.0)
    assert timing.ratio(samples, ("new", "cpu"), ("old", "torch")) == pytest.approx(1 / 3)
    assert Spread.of([float(value) for value in range(11)]) == Spread(2.0, 5.0, 8.0)


def test_the_first_call_of_a_sample_is_not_timed(clock):
    contender = taking(clock, lambda number: 9 if number == 0 else 1)
    assert timing.time_on_host(contender, range(4)) == 1.0


def test_host_time_starts_from_an_empty_queue(clock):
    queue = HostQueue()
    contender = taking(clock, lambda number: 2 + number if queue.asked.pop() else 0)
    assert timing.host_timer(queue)(contender, range(2)) == 2.5
    assert queue.asked == ["synchronize"]


def test_a_graph_holds_one_cycle_and_its_first_replay_is_not_timed(clock):
    queue, replays = HostQueue(), [0]

    def seconds(number):
        replays[0] += number == 3
        # The third call of the graph's second replay, the first timed one, is the slow one.
        return 9 if (number, replays[0]) == (2, 2) else 1

    timer = GraphTimer(queue, [contender := taking(clock, seconds)], cycle=4)
    assert queue.asked == ["capture"]
    assert timer(contender, range(8)) == (8 + 8) / 8
    assert replays[0] == 4, "one when it was captured, one untimed"


@pytest.mark.parametrize(("cycle", "parts"), [(1, [8, 4]), (3, [6, 6]), (12, [12])])
def test_calls_are_queued_behind_a_device_that_is_kept_busy(clock, cycle, parts):
    queue = HostQueue()
    contender = taking(clock, lambda number: 1 + number)
    assert EventTimer(queue, cycle)(contender, range(12)) == 6.5
    part = ["hold 200 us", "stamp", "stamp", "synchronize"]
    assert queue.asked == ["synchronize", *len(parts) * part]


@pytest.mark.parametrize(
    ("enough", "holds"), [(700e-6, [200, 400, 800, 800]), (math.inf, [200 << n for n in range(11)])]
)
def test_the_device_is_held_longer_if_it_got_ahead_of_the_host(enough, holds):
    class Late(HostQueue):
        def passed(self, stamp):
            held = [asked for asked in self.asked if asked.startswith("hold")]
            return float(held[-1].split()[1]) < enough * 1e6

    queue, contender = Late(), taking([0.0], lambda number: 0.0)
    timer = EventTimer(queue, 2)
    for _ in range(2 if enough < 1 else 1):
        timer(contender, range(2))
    found = [asked for asked in queue.asked if asked.startswith("hold")]
    assert found == [f"hold {us} us" for us in holds]
    assert contender.calls == len(holds) * [0, 1]


def test_calls_that_wait_are_timed_without_a_hold_and_without_the_first(clock):
    queue = HostQueue()
    contender = taking(clock, lambda number: 100 if number == 0 else 2, waits=True)
    assert EventTimer(queue, 1)(contender, range(4)) == 2.0
    assert queue.asked == ["synchronize", "stamp", "stamp", "synchronize"]


NAN = torch.tensor([1.0, math.nan])


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (NAN, torch.tensor([1.0, -math.nan]), None),
        (NAN, torch.tensor([1.0, 3.0]), "tensor 0: nan, not 3.0"),
        (torch.ones(1), torch.nextafter(torch.ones(1), torch.full((1,), 2.0)), "not 1.00000011"),
        (torch.zeros(1), torch.tensor([-0.0]), "0.0, not -0.0"),
        (torch.ones(6), torch.ones(2, 3), r"\(6,\) and not torch.float32 \(2, 3\)"),
        (torch.ones(2), torch.ones(2).half(), "float32 .* not torch.float16"),
    ],
)
def test_equality_takes_nan_for_nan_and_nothing_else(ours, theirs, told):
    if told is None:
        timing.assert_same([ours], [theirs], "bits")
        return
    with pytest.raises(AssertionError, match=f"bits, .*{told}"):
        timing.assert_same([ours], [theirs], "bits")
    with pytest.raises(ValueError, match="zip"):
        timing.assert_same([ours], [], "bits")
