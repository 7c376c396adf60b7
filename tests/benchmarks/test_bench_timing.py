"""Timers: fair turns, parity first, device time apart from host time, and counts per call."""

from __future__ import annotations

import math

import pytest
import torch
from simulated import HostQueue

from benchmarks import counts, device_time, harness
from benchmarks.counts import Counts, Event
from benchmarks.device_time import EventTimer, GraphTimer
from benchmarks.harness import Contender, Effort
from benchmarks.results import Spread


def test_contenders_take_turns_and_every_sample_is_a_whole_number_of_cycles():
    turns = []

    def timer(contender, calls):
        turns.append((contender.provider, len(calls)))
        return {"a": 2.0, "b": 1.0}[contender.provider]

    contenders = [Contender("path", provider, lambda call: None) for provider in "ab"]
    effort = Effort(quick=True, comparison_s=0.0, sample_s=30.0)
    samples = harness.interleave(contenders, effort, cycle=4, timer=timer)

    # After a warm-up, one trial per contender sets the number of cycles per sample.
    assert turns[:4] == [("a", 4), ("a", 4), ("b", 4), ("b", 4)]
    forwards = [("a", 16), ("b", 32)]
    assert turns[4:] == effort.rounds // 2 * (forwards + forwards[::-1])
    assert samples.spread(("path", "a")) == Spread(2.0, 2.0, 2.0)
    assert samples.ratio(("path", "b"), ("path", "a")) == Spread(0.5, 0.5, 0.5)
    assert ("path", "a") in samples
    assert ("path", "c") not in samples


def test_the_context_of_a_contender_is_entered_for_its_samples_alone(monkeypatch):
    inside = []

    class Around:
        def __enter__(self):
            inside.append(True)

        def __exit__(self, *error):
            inside.pop()

    seen = {"a": [], "b": []}
    contenders = [
        Contender("p", "a", lambda call: seen["a"].append(bool(inside)), around=Around),
        Contender("p", "b", lambda call: seen["b"].append(bool(inside))),
    ]
    harness.interleave(contenders, Effort(quick=True, comparison_s=0.0, sample_s=0.0))
    assert set(seen["a"]) == {True}
    assert set(seen["b"]) == {False}


def test_ratios_are_taken_within_a_round():
    samples = harness.Samples({("p", "a"): [1.0, 10.0, 100.0], ("p", "b"): [2.0, 20.0, 200.0]})
    assert samples.ratio(("p", "b"), ("p", "a")) == Spread(2.0, 2.0, 2.0)


@pytest.fixture
def clock(monkeypatch):
    """Time of all timers; `clock[0] += seconds` advances it."""
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])
    return now


def _taking(clock, seconds_of):
    def call(number):
        clock[0] += seconds_of(number)

    return call


def test_the_first_call_of_a_sample_is_not_timed(clock):
    contender = Contender("p", "a", _taking(clock, lambda number: 9 if number == 0 else 1))
    assert harness.time_on_host(contender, range(4)) == 1.0


def test_host_time_starts_from_an_empty_queue(clock):
    queue = HostQueue()
    asked = queue.asked
    seen = []
    contender = Contender(
        "p",
        "a",
        lambda number: (seen.append(asked.pop()), _taking(clock, lambda n: 2 + n)(number)),
    )
    assert device_time.host_timer(queue)(contender, range(2)) == 2.5
    assert seen == ["synchronize", "synchronize"]


def test_a_graph_holds_one_cycle_and_its_first_replay_is_not_timed(clock):
    queue = HostQueue()
    replays = [0]

    def call(number):
        # The fourth call ends the cycle; the second replay is the first timed one.
        replays[0] += number == 3
        clock[0] += 100 if replays[0] < 2 else 1

    contender = Contender("p", "a", call)
    timer = GraphTimer(queue, [contender], cycle=4)
    assert queue.asked == ["capture"]
    replays[0] = 0
    clock[0] = 0.0
    seconds = timer(contender, range(8))
    # The first of two replays ends the untimed calls.
    assert seconds == pytest.approx((3 * 100 + 1 + 4) / 8)
    assert replays[0] == 3


def test_calls_are_queued_behind_a_device_that_is_kept_busy(clock):
    queue = HostQueue()
    contender = Contender("p", "a", _taking(clock, lambda number: 1 + number))
    # At 300 launches a call, two calls fit into the queue.
    timer = EventTimer(queue, {("p", "a"): Counts(300, 0, 0)})
    assert timer(contender, range(5)) == 3.0
    part = ["hold 200 us", "stamp", "stamp", "synchronize"]
    assert queue.asked == ["synchronize", *part, *part, *part]


def test_repeated_samples_are_whole_cycles():
    parts = []
    timer = EventTimer(HostQueue(), {("p", "a"): Counts(300, 0, 0)}, cycle=4)
    timer._held = lambda contender, calls: parts.append(calls) or 1.0
    timer(Contender("p", "a", lambda number: None), range(12))
    assert parts == [range(4), range(4, 8), range(8, 12)]


def test_the_device_is_held_longer_if_it_got_ahead_of_the_host(clock):
    class Late(HostQueue):
        held = 0.0

        def hold(self, seconds):
            super().hold(seconds)
            self.held = seconds

        def passed(self, stamp):
            return self.held < 700e-6

    queue = Late()
    calls = []
    contender = Contender("p", "a", lambda number: calls.append(number))
    timer = EventTimer(queue, {})
    timer(contender, range(2))
    timer(contender, range(2))
    holds = [asked for asked in queue.asked if asked.startswith("hold")]
    assert holds == ["hold 200 us", "hold 400 us", "hold 800 us", "hold 800 us"]
    assert calls == 4 * [0, 1]


def test_a_host_that_never_gets_ahead_is_waited_for_only_so_long():
    class Never(HostQueue):
        def passed(self, stamp):
            return True

    queue = Never()
    EventTimer(queue, {})(Contender("p", "a", lambda number: None), range(2))
    holds = [asked for asked in queue.asked if asked.startswith("hold")]
    assert len(holds) == 1 + math.ceil(
        math.log2(device_time.LONGEST_HOLD_S / device_time.FIRST_HOLD_S)
    )


def test_calls_that_wait_are_timed_without_a_hold_and_without_the_first(clock):
    queue = HostQueue()
    calls = []
    taking = _taking(clock, lambda number: 100 if number == 0 else 2)
    contender = Contender("p", "a", lambda n: (calls.append(n), taking(n)), waits=True)
    assert EventTimer(queue, {})(contender, range(4)) == 2.0
    assert calls == [0, 1, 2, 3]
    assert queue.asked == ["synchronize", "stamp", "stamp", "synchronize"]


@pytest.mark.parametrize(
    ("launches", "calls"), [(None, device_time.USUAL_STRETCH), (0, 800), (98, 8), (5000, 1)]
)
def test_no_more_is_queued_than_the_queue_takes(launches, calls):
    assert device_time.stretch(launches) == calls


def _events(*events):
    return [Event(name, start, end, on_device) for name, start, end, on_device in events]


def test_counts_are_taken_inside_a_mark_without_its_final_wait():
    mark = counts.MARK
    events = _events(
        ("cudaDeviceSynchronize", 0, 5, False),
        ("before", 1, 2, True),
        (f"{mark}0", 10, 100, False),
        (f"{mark}0", 12, 90, True),
        ("aten::_amp_foreach_non_finite_check_and_unscale_", 11, 40, False),
        ("cudaLaunchKernel", 12, 13, False),
        ("void multi_tensor_apply_kernel<...>", 15, 30, True),
        ("Memcpy HtoD (Pinned -> Device)", 31, 32, True),
        ("Memset (Device)", 33, 34, True),
        ("cudaStreamSynchronize", 40, 50, False),
        ("cudaMemcpyAsync", 35, 36, False),
        ("cudaDeviceSynchronize", 60, 99, False),
        (f"{mark}1", 110, 200, False),
        ("multi_tensor", 120, 130, True),
        ("update_scale", 131, 132, True),
        ("cudaDeviceSynchronize", 140, 199, False),
        ("cudaDeviceSynchronize", 210, 220, False),
    )
    assert counts.of_events(events) == {0: Counts(1, 2, 1), 1: Counts(2, 0, 0)}


def test_of_two_calls_the_usual_one_counts():
    events = _events(
        (f"{counts.MARK}0", 0, 10, False),
        ("kernel", 1, 2, True),
        ("Memcpy HtoD", 3, 4, True),
        (f"{counts.MARK}0", 20, 30, False),
        ("kernel", 21, 22, True),
    )
    assert counts.of_events(events) == {0: Counts(1, 0, 0)}


def test_nothing_is_counted_where_no_device_was_seen():
    assert counts.of_events(_events((f"{counts.MARK}0", 0, 10, False))) == {}


def test_every_contender_is_called_twice_under_the_profiler_after_a_warm_up():
    calls = []
    queue = HostQueue()
    contenders = [Contender("p", name, lambda call, name=name: calls.append(name)) for name in "ab"]
    found = counts.of_contenders(contenders, queue)
    assert calls == 2 * ["a", "a", "b", "b"]
    # One wait after the warm-up, one after each of the four calls.
    assert queue.asked == 5 * ["synchronize"]
    assert found == {("p", "a"): None, ("p", "b"): None}


def test_the_profiler_hands_over_marks_with_their_times():
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities) as profile,
        torch.profiler.record_function(f"{counts.MARK}7"),
    ):
        torch.ones(3).add_(1)
    events = counts.events_of(profile)
    (mark,) = [event for event in events if event.name.startswith(counts.MARK)]
    assert not mark.on_device
    assert any(event.name == "aten::add_" for event in events)
    (add,) = [event for event in events if event.name == "aten::add_"]
    assert mark.start <= add.start <= add.end <= mark.end


def test_equality_takes_nan_for_nan_and_nothing_else():
    same = [torch.tensor([1.0, math.nan]), torch.tensor(math.inf)]
    harness.assert_same(same, [tensor.clone() for tensor in same], "same")
    with pytest.raises(AssertionError, match="bits, tensor 1"):
        harness.assert_same(same, [same[0], torch.tensor(3.0)], "bits")
    close = torch.tensor([1.0])
    with pytest.raises(AssertionError):
        harness.assert_same([close], [torch.nextafter(close, 2 * close)], "one ulp")
    for ours, theirs, message in (
        (torch.ones(6), torch.ones(2, 3), r"the shape is torch.Size\(\[6\]\), not"),
        (torch.full((6,), math.nan), torch.full((3, 2), math.nan), "the shape is"),
        (torch.ones(2), torch.ones(2).half(), "the dtype is torch.float32, not torch.float16"),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), "tensor 0: 0.0, not -0.0"),
    ):
        with pytest.raises(AssertionError, match=message):
            harness.assert_same([ours], [theirs], "bits")
    with pytest.raises(ValueError, match="zip"):
        harness.assert_same(same, same[:1], "length")
