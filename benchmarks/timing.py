"""Timing: contenders take turns within each round, by the host's clock or by a device's own."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cases import GradCase, dtype_name
from .results import Row, Spread

# Provider of rows without a scaler, and of torch's calls for one parameter after the other.
WITHOUT, LOOP = "none", "loop"
SIDES = {"torch": "torch", WITHOUT: "no scaler", LOOP: "a loop", "cpu": "ampfast"}
MAX_ROUNDS = 400
COMPARED_AT_ONCE = 1 << 22
# By bytes of an element.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Seconds that the device is kept busy while calls are queued. Doubled until they suffice.
FIRST_HOLD_S, LONGEST_HOLD_S = 200e-6, 0.2
# Calls behind one hold: a queue takes some 1,000 launches, beyond which the host waits.
STRETCH = 8
# At least any device's clock rate, so the device is held no shorter than asked.
CYCLES_PER_SECOND = 2.5e9

# Call and provider of a contender; and seconds per call of each, one sample per round.
Key = tuple[str, str]
Samples = dict[Key, list[float]]


@dataclass(frozen=True)
class Contender:
    """One of the calls to compare, which gets its running number, so that it can alternate."""

    path: str
    provider: str
    call: Callable[[int], object]
    waits: bool = False  # for the device, so that no other call can be queued behind it

    @property
    def key(self) -> Key:
        return self.path, self.provider


# Mean seconds of a call of a contender, over a range of numbers.
Timer = Callable[[Contender, range], float]


@dataclass
class Measured:
    """Result of a job; `notes` give omissions with their reasons."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Job(NamedTuple):
    """Part of a run: AssertionError if a result is wrong, MemoryError if it would not fit."""

    label: str
    run: Callable[[], Measured]


@dataclass(frozen=True)
class Effort:
    """Seconds for all rounds of a comparison, and for one sample, and the least rounds."""

    quick: bool
    comparison_s: float
    sample_s: float = 0.004
    rounds: int = 6


QUICK = Effort(quick=True, comparison_s=0.4)
# All subjects fit into ten minutes on two cores.
FULL = Effort(quick=False, comparison_s=1.2)
# On a GPU a sample holds hundreds of calls, and there are more contenders.
GPU_QUICK = Effort(quick=True, comparison_s=0.3, sample_s=0.002)
GPU_FULL = Effort(quick=False, comparison_s=1.0, sample_s=0.002)
REHEARSAL = Effort(quick=True, comparison_s=0.0, sample_s=0.0, rounds=2)


class HostQueue:
    """Queue of a device as the timers need it; here of none, so that work is done at once."""

    def synchronize(self) -> None:
        pass

    def stamp(self) -> Any:
        """Queues a timestamp, to be read later."""
        return time.perf_counter()

    def passed(self, stamp: Any) -> bool:
        """Whether the device has reached a stamp."""
        return False

    def seconds(self, start: Any, end: Any) -> float:
        return end - start

    def hold(self, seconds: float) -> None:
        """Queues work that keeps the device busy."""

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        """Warms up `body`, and returns a replay of its device work."""
        body()
        return body


class CudaQueue(HostQueue):
    """The current stream of a GPU."""

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def hold(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        # On the capturing stream, so that nothing is compiled or allocated during the capture.
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self.synchronize()
        with torch.cuda.stream(side):
            body()
        self.synchronize()
        with torch.cuda.graph(graph, stream=side):
            body()
        self.synchronize()
        return graph.replay


@dataclass(frozen=True)
class Setting:
    """Device of a run, duration of its comparisons, and the queue of a GPU."""

    device: torch.device
    effort: Effort
    queue: HostQueue | None = None

    @property
    def rehearses(self) -> bool:
        """Whether the CPU stands in for a GPU."""
        return self.queue is not None and self.device.type == "cpu"

    def lasting(self, factor: float) -> Setting:
        """The same with longer or shorter comparisons."""
        seconds = factor * self.effort.comparison_s
        return replace(self, effort=replace(self.effort, comparison_s=seconds))


def time_on_host(contender: Contender, calls: range) -> float:
    """Mean seconds per call, without the first one.

    The first call pays for the previous contender, such as for dirty cache lines (measured: 9%
    between identical contenders, one after a copy).
    """
    contender.call(calls[0])
    start = time.perf_counter()
    for number in calls[1:]:
        contender.call(number)
    return (time.perf_counter() - start) / (len(calls) - 1)


def interleave(
    contenders: Sequence[Contender], effort: Effort, cycle: int = 2, timer: Timer = time_on_host
) -> Samples:
    """Times the contenders in turn, every other round backwards, until the time is used up.

    After `cycle` calls, at least 2, a contender has undone what it did; a sample is a multiple of
    it. `timer` gives the mean seconds of a range of calls.
    """
    turns = []
    for contender in contenders:
        timer(contender, range(cycle))
        seconds = cycle * timer(contender, range(cycle))
        cycles = max(1, round(effort.sample_s / max(seconds, 1e-9)))
        turns.append((contender, range(cycle * cycles)))

    samples: Samples = {contender.key: [] for contender in contenders}
    gc.disable()
    try:
        deadline = time.perf_counter() + effort.comparison_s
        for done in range(MAX_ROUNDS):
            if done >= effort.rounds and time.perf_counter() > deadline:
                break
            for contender, numbers in reversed(turns) if done % 2 else turns:
                samples[contender.key].append(timer(contender, numbers))
    finally:
        gc.enable()
    return samples


def graph_timer(queue: HostQueue, contenders: Sequence[Contender], cycle: int) -> Timer:
    """Timer of device seconds, none of which waits, from graphs of one cycle of calls."""

    def recorded(call: Callable[[int], object]) -> Callable[[], object]:
        return queue.capture(lambda: list(map(call, range(cycle))))

    replays = {contender.key: recorded(contender.call) for contender in contenders}

    def seconds_of(contender: Contender, calls: range) -> float:
        # Untimed, as in `time_on_host`: it pays for the previous contender.
        replays[contender.key]()
        start = queue.stamp()
        for _ in range(len(calls) // cycle):
            replays[contender.key]()
        end = queue.stamp()
        queue.synchronize()
        return queue.seconds(start, end) / len(calls)

    return seconds_of


def event_timer(queue: HostQueue, cycle: int) -> Timer:
    """Timer of device seconds, from stamps around calls queued beforehand.

    The device is kept busy until the last one is queued, so the host is not timed. Calls that
    wait for the device cannot be queued: their time on the device includes the wait. What has to be
    repeated is whole cycles.
    """
    stretch = max(cycle, STRETCH // cycle * cycle)
    holds: dict[Key, float] = {}

    def between_stamps(contender: Contender, calls: range) -> tuple[float, bool]:
        """Device seconds, and whether the device got ahead of the host."""
        start = queue.stamp()
        for number in calls:
            contender.call(number)
        is_late = queue.passed(start)
        end = queue.stamp()
        queue.synchronize()
        return queue.seconds(start, end), is_late

    def held(contender: Contender, calls: range) -> float:
        hold = holds.get(contender.key, FIRST_HOLD_S)
        while True:
            queue.hold(hold)
            seconds, is_late = between_stamps(contender, calls)
            if not is_late or hold >= LONGEST_HOLD_S:
                return seconds
            hold = holds[contender.key] = 2 * hold

    def seconds_of(contender: Contender, calls: range) -> float:
        queue.synchronize()
        if contender.waits:
            contender.call(calls[0])
            return between_stamps(contender, calls[1:])[0] / (len(calls) - 1)
        parts = [calls[at : at + stretch] for at in range(0, len(calls), stretch)]
        return sum(held(contender, part) for part in parts) / len(calls)

    return seconds_of


def host_timer(queue: HostQueue) -> Timer:
    """Timer of host seconds: until the call returns, from an empty queue."""

    def seconds_of(contender: Contender, calls: range) -> float:
        total = 0.0
        for number in calls:
            queue.synchronize()
            start = time.perf_counter()
            contender.call(number)
            total += time.perf_counter() - start
        queue.synchronize()
        return total / len(calls)

    return seconds_of


@dataclass(frozen=True)
class Subject:
    """What contenders are compared over, and how their rows are named and related."""

    name: str
    case: GradCase
    dtype: torch.dtype
    lists: int = 1  # that took turns
    is_host: bool = False  # time until the call returns, instead of the device's
    replaces: dict[str, str] = field(default_factory=dict)  # torch's call, if of another name
    without: Callable[[Key], Key] | None = None  # that `over_none` is relative to

    def time(
        self,
        contenders: Sequence[Contender],
        on: Setting,
        cycle: int | None = None,  # calls after which a contender has undone what it did
        graphs: bool = False,
    ) -> Measured:
        """Times contenders in turn."""
        cycle, queue, notes = cycle or 2 * self.lists, on.queue, []
        timer, name, effort = time_on_host, "wall", on.effort
        if queue is not None and self.is_host:
            timer, effort = host_timer(queue), replace(effort, sample_s=0.0)
        elif queue is not None:
            timer, name = event_timer(queue, cycle), "events"
            if graphs:
                try:
                    timer, name = graph_timer(queue, contenders, cycle), "graph"
                except RuntimeError as error:
                    why = f"by events, since no graph could be captured: {error}"
                    notes.append(f"{self.case.name}: {why}")
        samples = interleave(contenders, effort, cycle, timer)
        return Measured(self.rows(contenders, samples, name), notes)

    def rows(
        self, contenders: Sequence[Contender], samples: Samples, timer: str = "wall"
    ) -> list[Row]:
        """A row for each contender."""

        def row(contender: Contender) -> Row:
            path, provider = key = contender.key
            seconds, less = samples[key], self.without(key) if self.without else key
            theirs = self.replaces.get(path, path), "torch"
            is_ours = provider not in (WITHOUT, LOOP, "torch")
            kind = "waits" if contender.waits and timer == "events" else timer
            return Row(
                self.name,
                self.case.name if self.lists == 1 else f"{self.case.name}, cold",
                dtype_name(self.dtype),
                path,
                SIDES.get(provider, f"ampfast, {provider}"),
                ms=None if self.is_host else Spread.of(seconds, 1e3),
                host_us=Spread.of(seconds, 1e6) if self.is_host else None,
                rounds=len(seconds),
                timer=None if self.is_host else kind,
                replaces=self.replaces.get(path),
                vs_torch=ratio(samples, theirs, key) if is_ours and theirs in samples else None,
                over_none=ratio(samples, key, less) if less != key else None,
            )

        return [row(contender) for contender in contenders]


def ratio(samples: Samples, numerator: Key, denominator: Key) -> float:
    """Median over rounds of one contender's time over another's."""
    pairs = zip(samples[numerator], samples[denominator], strict=True)
    return statistics.median(a / b for a, b in pairs)


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], what: str) -> None:
    """Raises AssertionError unless dtypes, shapes and bits are the same; all NaNs are equal."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        where = f"{what}, tensor {index}"
        if (our.dtype, our.shape) != (their.dtype, their.shape):
            kinds = [f"{each.dtype} {tuple(each.shape)}" for each in (our, their)]
            raise AssertionError(f"{where}: {' and not '.join(kinds)}")
        bits = BITS[our.element_size()]
        if torch.equal(our.detach().view(bits), their.detach().view(bits)):
            continue
        # Piecewise, since comparing NaNs needs several times the memory of the values.
        pieces = [each.detach().reshape(-1).split(COMPARED_AT_ONCE) for each in (our, their)]
        for a, b in zip(*pieces, strict=True):
            differ = (a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())
            if differ.any():
                first = int(differ.int().argmax())
                raise AssertionError(f"{where}: {a[first].item()}, not {b[first].item()}")
