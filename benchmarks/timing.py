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
from .results import OTHERS, Row, Spread

MAX_ROUNDS = 400
# By bytes of an element.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Call and provider of a contender; and seconds per call of each, one sample per round.
Key = tuple[str, str]
Samples = dict[Key, list[float]]
# What is compared: a call gets its running number, so that it can alternate.
Call = Callable[[int], Any]
Contenders = dict[Key, Call]
# Mean seconds of a call, over a range of numbers.
Timer = Callable[[Call, range], float]


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

    def seconds(self, start: Any, end: Any) -> float:
        return end - start

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        """Warms up `body`, and returns a replay of its device work."""
        return body


class CudaQueue(HostQueue):
    """The current stream of a GPU."""

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

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


def time_on_host(call: Call, numbers: range) -> float:
    """Mean seconds per call, without the first one.

    The first call pays for the previous contender, such as for dirty cache lines (measured: 9%
    between identical contenders, one after a copy).
    """
    call(numbers[0])
    start = time.perf_counter()
    for number in numbers[1:]:
        call(number)
    return (time.perf_counter() - start) / (len(numbers) - 1)


def interleave(
    contenders: Contenders, effort: Effort, cycle: int = 2, timer: Timer = time_on_host
) -> Samples:
    """Times the contenders in turn, every other round backwards, until the time is used up.

    After `cycle` calls, at least 2, a contender has undone what it did; a sample is a multiple of
    it. `timer` gives the mean seconds of a range of calls.
    """
    turns = []
    for key, call in contenders.items():
        timer(call, range(cycle))
        seconds = cycle * timer(call, range(cycle))
        cycles = max(1, round(effort.sample_s / max(seconds, 1e-9)))
        turns.append((key, range(cycle * cycles)))

    samples: Samples = {key: [] for key in contenders}
    gc.disable()
    try:
        deadline = time.perf_counter() + effort.comparison_s
        for done in range(MAX_ROUNDS):
            if done >= effort.rounds and time.perf_counter() > deadline:
                break
            for key, numbers in reversed(turns) if done % 2 else turns:
                samples[key].append(timer(contenders[key], numbers))
    finally:
        gc.enable()
    return samples


def device_timer(queue: HostQueue, contenders: Contenders, cycle: int, graphs: bool) -> Timer:
    """Timer by stamps around calls queued one after the other, or replayed from graphs.

    As in training, of calls the slower of host and device counts; of graphs the device alone.
    """

    def body_of(call: Call) -> Callable[[], object]:
        def body() -> None:
            for number in range(cycle):
                call(number)

        return queue.capture(body) if graphs else body

    bodies = {call: body_of(call) for call in contenders.values()}

    def seconds_of(call: Call, numbers: range) -> float:
        # Untimed, as in `time_on_host`: it pays for the previous contender.
        bodies[call]()
        start = queue.stamp()
        for _ in range(len(numbers) // cycle):
            bodies[call]()
        end = queue.stamp()
        queue.synchronize()
        return queue.seconds(start, end) / len(numbers)

    return seconds_of


def host_timer(queue: HostQueue) -> Timer:
    """Timer of host seconds: until the call returns, from an empty queue."""

    def seconds_of(call: Call, numbers: range) -> float:
        total = 0.0
        for number in numbers:
            queue.synchronize()
            start = time.perf_counter()
            call(number)
            total += time.perf_counter() - start
        return total / len(numbers)

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
    without: Key | None = None  # that `over_none` is relative to

    def time(
        self,
        contenders: Contenders,
        on: Setting,
        cycle: int | None = None,  # calls after which a contender has undone what it did
        graphs: bool = False,
        timer: Timer | None = None,  # of one call by itself
    ) -> list[Row]:
        """Times contenders in turn; a row for each."""
        cycle, queue, effort, name = cycle or 2 * self.lists, on.queue, on.effort, "wall"
        if timer is not None or (queue is not None and self.is_host):
            # A round has one call of each.
            effort = replace(effort, sample_s=0.0)
        if timer is not None:
            cycle = 1
        elif queue is None:
            timer = time_on_host
        elif self.is_host:
            timer = host_timer(queue)
        else:
            timer = device_timer(queue, contenders, cycle, graphs)
            name = "graph" if graphs else "events"
        return self.rows(interleave(contenders, effort, cycle, timer), name)

    def rows(self, samples: Samples, timer: str = "wall") -> list[Row]:
        """A row for each contender with its samples."""
        case = self.case.name if self.lists == 1 else f"{self.case.name}, cold"
        found, less = [], self.without
        for key, seconds in samples.items():
            path, provider = key
            theirs = self.replaces.get(path, path), "torch"
            is_ours = provider not in OTHERS
            row = Row(
                *(self.name, case, dtype_name(self.dtype), path),
                f"ampfast, {provider}".removesuffix(", cpu") if is_ours else provider,
                rounds=len(seconds),
                replaces=self.replaces.get(path),
                vs_torch=ratio(samples, theirs, key) if is_ours and theirs in samples else None,
                over_none=ratio(samples, key, less) if less not in (None, key) else None,
                tensors=len(self.case.shapes),
                elements=self.case.elements,
            )
            if self.is_host:
                row = replace(row, host_us=Spread.of(seconds, 1e6))
            else:
                row = replace(row, ms=Spread.of(seconds, 1e3), timer=timer)
            found.append(row)
        return found


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
        a, b, bits = our.detach(), their.detach(), BITS[our.element_size()]
        if not torch.equal(a.view(bits), b.view(bits)):
            a, b = a.reshape(-1), b.reshape(-1)
            differ = (a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())
            if differ.any():
                first = int(differ.int().argmax())
                raise AssertionError(f"{where}: {a[first].item()}, not {b[first].item()}")
