"""Kernels, copies and waits of a call, as torch's profiler sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .device_time import Queue
from .harness import Contender, Key

# Runtime and driver calls after which the host has waited.
WAITS = frozenset(
    prefix + name
    for prefix in ("cuda", "hip")
    for name in ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy")
) | {"cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"}
NOT_KERNELS = ("memcpy", "memset", "copydevice", "fillbuffer")
MARK = "counted call "


@dataclass(frozen=True)
class Event:
    """Event of the profiler; times in nanoseconds."""

    name: str
    start: int
    end: int
    on_device: bool


@dataclass(frozen=True)
class Counts:
    """Counts of one call."""

    launches: int
    copies: int
    syncs: int


def of_contenders(contenders: Sequence[Contender], queue: Queue) -> dict[Key, Counts | None]:
    """Calls each contender twice after a warm-up, and counts launches, copies and syncs.

    The two calls are a cycle, so that nothing drifts. None if the profiler sees no device.
    """
    for contender in contenders:
        with contender.around():
            for number in (0, 1):
                contender.call(number)
    queue.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for index, contender in enumerate(contenders):
            with contender.around():
                for number in (0, 1):
                    # The wait keeps the device's work inside of the mark.
                    with torch.profiler.record_function(f"{MARK}{index}"):
                        contender.call(number)
                        queue.synchronize()
    counts = of_events(events_of(profile))
    return {contender.key: counts.get(index) for index, contender in enumerate(contenders)}


def events_of(profile: torch.profiler.profile) -> list[Event]:
    """Events of a stopped profiler."""
    return [
        Event(
            event.name(),
            event.start_ns(),
            event.start_ns() + event.duration_ns(),
            event.device_type() != torch.autograd.DeviceType.CPU,
        )
        for event in profile.profiler.kineto_results.events()
    ]


def of_events(events: Iterable[Event]) -> dict[int, Counts]:
    """Counts for each mark, per call; empty if no device was seen.

    The wait that ends each mark is not counted.
    """
    events = list(events)
    marks = [e for e in events if e.name.startswith(MARK) and not e.on_device]
    work = [e for e in events if not e.name.startswith(MARK)]
    if not any(event.on_device for event in work):
        return {}
    found: dict[int, list[Counts]] = {}
    for mark in marks:
        inside = [e for e in work if mark.start <= e.start <= mark.end]
        on_device = [e.name.lower() for e in inside if e.on_device]
        copies = sum(name.startswith(NOT_KERNELS) for name in on_device)
        waits = sum(e.name in WAITS for e in inside if not e.on_device)
        index = int(mark.name.removeprefix(MARK))
        counts = Counts(len(on_device) - copies, copies, max(0, waits - 1))
        found.setdefault(index, []).append(counts)
    # Some calls do more, such as growing a buffer: the usual call counts.
    return {
        index: min(counts, key=lambda c: (c.launches, c.copies, c.syncs))
        for index, counts in found.items()
    }
