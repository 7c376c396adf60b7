"""Timing harness: contenders are compared for equality, then take turns within each round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .device_time import Queue
from .results import Goal, Row, Spread

# Call and provider of a contender.
Key = tuple[str, str]

MAX_ROUNDS = 400
COMPARED_AT_ONCE = 1 << 22
# By bytes of an element.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Contender:
    """One of the calls to compare.

    `call` gets the running number of the call, so that it can alternate; the context `around` each
    sample is untimed. `waits` says that the call waits for its device, so that no other call can be
    queued behind it.
    """

    path: str
    provider: str
    call: Callable[[int], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    waits: bool = False

    @property
    def key(self) -> Key:
        return self.path, self.provider


@dataclass
class Measured:
    """Result of a job; `notes` give omissions with their reasons."""

    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """Part of a run.

    `run` raises AssertionError if a result is not torch's, gradients drifted or a step was skipped
    while timed, and MemoryError, before anything is allocated, if the gradients would not fit.
    """

    label: str
    run: Callable[[], Measured]


@dataclass(frozen=True)
class Effort:
    """Seconds for all rounds of a comparison, and for one sample, and the least rounds.

    With `profiled`, launches, copies and waits on a GPU are counted, too.
    """

    quick: bool
    comparison_s: float
    sample_s: float = 0.004
    profiled: bool = True
    rounds: int = 6


QUICK = Effort(quick=True, comparison_s=0.4)
# All subjects fit into ten minutes on two cores.
FULL = Effort(quick=False, comparison_s=1.2)
# On a GPU a sample holds hundreds of calls, and there are more contenders.
GPU_QUICK = Effort(quick=True, comparison_s=0.3, sample_s=0.002)
GPU_FULL = Effort(quick=False, comparison_s=1.0, sample_s=0.002)
REHEARSAL = Effort(quick=True, comparison_s=0.0, sample_s=0.0, rounds=2)


@dataclass(frozen=True)
class Setting:
    """Device of a run, duration of its comparisons, and the queue of a GPU."""

    device: torch.device
    effort: Effort
    queue: Queue | None = None


@dataclass(frozen=True)
class Samples:
    """Seconds per call of each contender, one sample per round, paired by round."""

    seconds: dict[Key, list[float]]

    def __contains__(self, key: Key) -> bool:
        return key in self.seconds

    def spread(self, key: Key, factor: float = 1.0) -> Spread:
        return Spread.of(self.seconds[key], factor)

    def ratio(self, numerator: Key, denominator: Key) -> Spread:
        """Spread over rounds of one contender's time over another's."""
        pairs = zip(self.seconds[numerator], self.seconds[denominator], strict=True)
        return Spread.of([a / b for a, b in pairs])


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
    contenders: Sequence[Contender],
    effort: Effort,
    cycle: int = 2,
    timer: Callable[[Contender, range], float] = time_on_host,
) -> Samples:
    """Times the contenders in turn, until the time for the comparison is used up.

    Every other round goes backwards (A B B A ...), so that no place in the order is an advantage.
    After `cycle` calls, at least 2, a contender has undone what it did; a sample is a multiple of
    it. `timer` gives the mean seconds of a range of calls.
    """
    calls = []
    for contender in contenders:
        with contender.around():
            timer(contender, range(cycle))
            seconds = cycle * timer(contender, range(cycle))
        calls.append(range(cycle * max(1, round(effort.sample_s / max(seconds, 1e-9)))))

    seconds_of: dict[Key, list[float]] = {c.key: [] for c in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        deadline = time.perf_counter() + effort.comparison_s
        for done in range(MAX_ROUNDS):
            if done >= effort.rounds and time.perf_counter() > deadline:
                break
            turns = list(zip(contenders, calls, strict=True))
            for contender, numbers in reversed(turns) if done % 2 else turns:
                with contender.around():
                    seconds_of[contender.key].append(timer(contender, numbers))
    finally:
        if collecting:
            gc.enable()
    return Samples(seconds_of)


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], what: str) -> None:
    """Raises AssertionError unless both lists have the same dtypes, shapes and bits.

    All NaNs are equal.
    """
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        where = f"{what}, tensor {index}"
        for name in ("dtype", "shape"):
            if getattr(our, name) != getattr(their, name):
                found, wanted = getattr(our, name), getattr(their, name)
                raise AssertionError(f"{where}: the {name} is {found}, not {wanted}")
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
