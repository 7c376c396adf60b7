"""Timing on a device with a queue: device time by its own clock, apart from host time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .harness import Contender, Key

if TYPE_CHECKING:
    from .counts import Counts

# Lists below this are replayed from a graph: queued singly, the host would be timed, too.
GRAPH_BELOW_BYTES = 512 << 20

# Seconds that the device is kept busy while calls are queued. Doubled until they suffice.
FIRST_HOLD_S = 200e-6
LONGEST_HOLD_S = 0.2
# A queue takes some 1,000 launches; beyond that the host waits.
MOST_QUEUED = 800
USUAL_STRETCH = 8
# At least any device's clock rate, so the device is held no shorter than asked.
CYCLES_PER_SECOND = 2.5e9


class Queue(Protocol):
    """Device interface of the timers."""

    def synchronize(self) -> None:
        """Waits for all queued work."""

    def stamp(self) -> Any:
        """Queues a timestamp, to be read later."""

    def passed(self, stamp: Any) -> bool:
        """Whether the device has reached a stamp."""

    def seconds(self, start: Any, end: Any) -> float:
        """Device seconds between two stamps, after `synchronize`."""

    def hold(self, seconds: float) -> None:
        """Queues work that keeps the device busy."""

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        """Warms up `body`, and returns a replay of its device work."""


class CudaQueue:
    """The current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

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
        self.synchronize()
        with torch.cuda.stream(self._side):
            body()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._side):
            body()
        self.synchronize()
        return graph.replay


class HostQueue:
    """Stand-in without a device, whose work is done at once."""

    def synchronize(self) -> None:
        pass

    def stamp(self) -> float:
        return time.perf_counter()

    def passed(self, stamp: float) -> bool:
        return False

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def hold(self, seconds: float) -> None:
        pass

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        body()
        return body


class GraphTimer:
    """Mean device seconds per call, from graphs of one cycle of a contender's calls.

    No call may wait for the device.
    """

    name = "graph"

    def __init__(self, queue: Queue, contenders: Sequence[Contender], cycle: int) -> None:
        self._queue = queue
        self._cycle = cycle

        def recorded(call: Callable[[int], object]) -> Callable[[], object]:
            return queue.capture(lambda: list(map(call, range(cycle))))

        self._replays = {contender.key: recorded(contender.call) for contender in contenders}

    def __call__(self, contender: Contender, calls: range) -> float:
        """Times whole cycles; `calls` is a multiple of them."""
        replay = self._replays[contender.key]
        times = len(calls) // self._cycle
        # Untimed, as in `harness.time_on_host`: it pays for the previous contender.
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

    def __init__(self, queue: Queue, counts: dict[Key, Counts | None], cycle: int = 1) -> None:
        self._queue = queue
        self._counts = counts
        self._cycle = cycle
        self._holds: dict[Key, float] = {}

    def __call__(self, contender: Contender, calls: range) -> float:
        self._queue.synchronize()
        if contender.waits:
            contender.call(calls[0])
            return self._between_stamps(contender, calls[1:])[0] / (len(calls) - 1)
        counted = self._counts.get(contender.key)
        most = stretch(counted.launches if counted else None)
        most = max(self._cycle, most // self._cycle * self._cycle)
        parts = [calls[first : first + most] for first in range(0, len(calls), most)]
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


def host_timer(queue: Queue) -> Callable[[Contender, range], float]:
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


def stretch(launches: int | None) -> int:
    """Number of calls that can be queued before the first one starts."""
    return USUAL_STRETCH if launches is None else max(1, MOST_QUEUED // max(1, launches))
