"""Timing: contenders take turns within each round, by the host's clock or by a device's own."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cases import GradCase
from .results import Row, Spread

# Call and provider of a contender.
Key = tuple[str, str]

# Provider of rows without a scaler, and of torch's calls for one parameter after the other.
WITHOUT, LOOP = "none", "loop"
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


@dataclass(frozen=True)
class Contender:
    """One of the calls to compare, which gets its running number, so that it can alternate."""

    path: str
    provider: str
    call: Callable[[int], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # of a sample, untimed
    waits: bool = False  # for the device, so that no other call can be queued behind it

    @property
    def key(self) -> Key:
        return self.path, self.provider


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


# Seconds per call of each contender, one sample per round, paired by round.
Samples = dict[Key, list[float]]


def ratio(samples: Samples, numerator: Key, denominator: Key) -> float:
    """Median over rounds of one contender's time over another's."""
    pairs = zip(samples[numerator], samples[denominator], strict=True)
    return statistics.median(a / b for a, b in pairs)


def _faster(samples: Samples, theirs: Key, ours: Key) -> float | None:
    """Ratio of torch's time to another one's, if both were timed."""
    return ratio(samples, theirs, ours) if ours[1] != "torch" and theirs in samples else None


Timer = Callable[[Contender, range], float]


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
        with contender.around():
            timer(contender, range(cycle))
            seconds = cycle * timer(contender, range(cycle))
        cycles = max(1, round(effort.sample_s / max(seconds, 1e-9)))
        turns.append((contender, range(cycle * cycles)))

    seconds_of: Samples = {c.key: [] for c in contenders}
    gc.disable()
    try:
        deadline = time.perf_counter() + effort.comparison_s
        for done in range(MAX_ROUNDS):
            if done >= effort.rounds and time.perf_counter() > deadline:
                break
            for contender, numbers in reversed(turns) if done % 2 else turns:
                with contender.around():
                    seconds_of[contender.key].append(timer(contender, numbers))
    finally:
        gc.enable()
    return seconds_of


class GraphTimer:
    """Mean device seconds per call, none of which waits, from graphs of one cycle of calls."""

    name = "graph"

    def __init__(self, queue: HostQueue, contenders: Sequence[Contender], cycle: int) -> None:
        self._queue, self._cycle = queue, cycle

        def recorded(call: Callable[[int], object]) -> Callable[[], object]:
            return queue.capture(lambda: list(map(call, range(cycle))))

        self._replays = {contender.key: recorded(contender.call) for contender in contenders}

    def __call__(self, contender: Contender, calls: range) -> float:
        replay, times = self._replays[contender.key], len(calls) // self._cycle
        # Untimed, as in `time_on_host`: it pays for the previous contender.
        replay()
        start = self._queue.stamp()
        for _ in range(times):
            replay()
        end = self._queue.stamp()
        self._queue.synchronize()
        return self._queue.seconds(start, end) / (times * self._cycle)


class EventTimer:
    """Mean device seconds per call, from stamps around calls queued beforehand.

    The device is kept busy until the last one is queued, so the host is not timed. Calls that
    wait for the device cannot be queued: their time on the device includes the wait. What has to be
    repeated is whole cycles.
    """

    name = "events"

    def __init__(self, queue: HostQueue, cycle: int) -> None:
        self._queue = queue
        self._stretch = max(cycle, STRETCH // cycle * cycle)
        self._holds: dict[Key, float] = {}

    def __call__(self, contender: Contender, calls: range) -> float:
        self._queue.synchronize()
        if contender.waits:
            contender.call(calls[0])
            return self._between_stamps(contender, calls[1:])[0] / (len(calls) - 1)
        parts = [calls[at : at + self._stretch] for at in range(0, len(calls), self._stretch)]
        return sum(self._held(contender, part) for part in parts) / len(calls)

    def _held(self, contender: Contender, calls: range) -> float:
        hold = self._holds.get(contender.key, FIRST_HOLD_S)
        while True:
            self._queue.hold(hold)
            seconds, is_late = self._between_stamps(contender, calls)
            if not is_late or hold >= LONGEST_HOLD_S:
                return seconds
            hold = self._holds[contender.key] = 2 * hold

    def _between_stamps(self, contender: Contender, calls: range) -> tuple[float, bool]:
        """Device seconds, and whether the device got ahead of the host."""
        start = self._queue.stamp()
        for number in calls:
            contender.call(number)
        is_late = self._queue.passed(start)
        end = self._queue.stamp()
        self._queue.synchronize()
        return self._queue.seconds(start, end), is_late


def host_timer(queue: HostQueue) -> Timer:
    """Returns a timer of host time: until the call returns, from an empty queue."""

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
class Timed:
    """Timed contenders over gradients: device or, on a CPU, wall time; on a GPU `host` time."""

    subject: str
    case: GradCase
    dtype: torch.dtype
    contenders: Sequence[Contender]
    samples: Samples
    timer: str = "wall"
    lists: int = 1  # that took turns
    host: Samples = field(default_factory=dict)
    replaces: dict[str, str] = field(default_factory=dict)  # torch's call, if of another name
    notes: list[str] = field(default_factory=list)

    def name(self, key: Key) -> tuple[str, str, str, str, str]:
        """Name of a contender's row."""
        case = self.case.name if self.lists == 1 else f"{self.case.name}, cold"
        return self.subject, case, dtype_name(self.dtype), key[0], side(key[1])

    def rows(self) -> list[Row]:
        return [self._row(contender) for contender in self.contenders]

    def _row(self, contender: Contender) -> Row:
        key, host = contender.key, self.host.get(contender.key)
        theirs = (self.replaces.get(key[0], key[0]), "torch")
        return Row(
            *self.name(key),
            ms=Spread.of(self.samples[key], 1e3),
            rounds=len(self.samples[key]),
            timer="waits" if contender.waits and self.timer == EventTimer.name else self.timer,
            list_bytes=self.case.list_bytes(self.dtype),
            replaces=self.replaces.get(key[0]),
            vs_torch=_faster(self.samples, theirs, key),
            host_us=Spread.of(host, 1e6) if host else None,
            host_vs_torch=_faster(self.host, theirs, key) if host else None,
        )


def time_contenders(
    subject: str,
    case: GradCase,
    dtype: torch.dtype,
    contenders: Sequence[Contender],
    on: Setting,
    *,
    lists: int = 1,
    cycle: int | None = None,  # calls after which a contender has undone what it did
    alone: Sequence[Contender] = (),
    replaces: dict[str, str] | None = None,
    graphs: bool = False,
) -> Timed:
    """Times contenders in turn; on a GPU device time and, of those that are `alone`, host time."""
    cycle, queue, host = cycle or 2 * lists, on.queue, {}
    timer: Any = time_on_host
    notes = []
    if queue is not None:
        timer = EventTimer(queue, cycle)
        if alone:
            host = interleave(alone, replace(on.effort, sample_s=0.0), timer=host_timer(queue))
        if graphs:
            try:
                timer = GraphTimer(queue, contenders, cycle)
            except RuntimeError as error:
                notes.append(f"{case.name}: by events, since no graph could be captured: {error}")
    samples = interleave(contenders, on.effort, cycle, timer)
    about = (subject, case, dtype, contenders, samples, getattr(timer, "name", "wall"))
    return Timed(*about, lists=lists, host=host, replaces=replaces or {}, notes=notes)


def side(provider: str) -> str:
    """Provider as shown to readers."""
    known = {"torch": "torch", WITHOUT: "no scaler", LOOP: "a loop", "cpu": "ampfast"}
    return known.get(provider, f"ampfast, {provider}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
