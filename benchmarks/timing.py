"""Timed contenders: host time, device time and counts, and their rows and goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from . import counts
from .cases import GradCase
from .counts import Counts
from .device_time import EventTimer, GraphTimer, host_timer
from .harness import Contender, Key, Samples, Setting, interleave
from .machine import tensors_per_launch
from .results import Goal, Row

# Provider of rows without a scaler.
WITHOUT = "none"
# Of torch's calls for one parameter after the other.
LOOP = "loop"


@dataclass(frozen=True)
class Timed:
    """Timed contenders over gradients: device time, on a CPU wall time, and on a GPU `host` time.

    `lists` took turns. `replaces` has torch's call for each one without a counterpart.
    `tensors_per_launch` is torch's on a GPU, and None on a CPU, which has other goals.
    """

    subject: str
    case: GradCase
    dtype: torch.dtype
    contenders: Sequence[Contender]
    samples: Samples
    timer: str = "wall"
    lists: int = 1
    host: Samples | None = None
    counts: dict[Key, Counts | None] = field(default_factory=dict)
    replaces: dict[str, str] = field(default_factory=dict)
    tensors_per_launch: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def list_bytes(self) -> int:
        return self.case.list_bytes(self.dtype)

    def name(self, key: Key) -> tuple[str, str, str, str, str]:
        """Name of a contender's row."""
        case = self.case.name if self.lists == 1 else f"{self.case.name}, cold"
        return self.subject, case, dtype_name(self.dtype), key[0], side(key[1])

    def rows(self) -> list[Row]:
        """One row for each contender."""
        return [self._row(contender) for contender in self.contenders]

    def _row(self, contender: Contender) -> Row:
        key = contender.key
        theirs = (self.replaces.get(key[0], key[0]), "torch")
        row = Row(
            *self.name(key),
            ms=self.samples.spread(key, 1e3),
            rounds=len(self.samples.seconds[key]),
            timer="waits" if contender.waits and self.timer == EventTimer.name else self.timer,
            list_bytes=self.list_bytes,
            replaces=self.replaces.get(key[0]),
            vs_torch=_over(self.samples, theirs, key),
        )
        if self.host is not None and key in self.host:
            faster = _over(self.host, theirs, key)
            row = replace(row, host_us=self.host.spread(key, 1e6), host_vs_torch=faster)
        if found := self.counts.get(key):
            row = replace(row, launches=found.launches, copies=found.copies, syncs=found.syncs)
        return row

    def goal(
        self, key: Key, over: Key, limit: float, *, lenient: bool = False, host: bool = False
    ) -> list[Goal]:
        """Goal for a contender's time over another's; none where one of them was not timed."""
        samples = self.host if host else self.samples
        if samples is None or key not in samples or over not in samples:
            return []
        other = f"{over[0]}, {side(over[1])}{', host time' if host else ''}"
        return [Goal(*self.name(key), other, samples.ratio(key, over), limit, lenient)]


def time_contenders(
    subject: str,
    case: GradCase,
    dtype: torch.dtype,
    contenders: Sequence[Contender],
    on: Setting,
    *,
    lists: int = 1,
    cycle: int | None = None,
    alone: Sequence[Contender] | None = None,
    replaces: dict[str, str] | None = None,
    graphs: bool = False,
) -> Timed:
    """Times contenders in turn; on a GPU device time, host time and counts apart.

    After `cycle` calls, by default two for each list, a contender has undone what it did. `alone`
    are the same contenders over one list, for host time and counts. Device time is taken from CUDA
    graphs with `graphs`, if they can be captured.
    """
    cycle, effort, queue = cycle or 2 * lists, on.effort, on.queue
    about = {"lists": lists, "replaces": replaces or {}}
    if queue is None:
        samples = interleave(contenders, effort, cycle)
        return Timed(subject, case, dtype, contenders, samples, **about)
    alone = alone or contenders
    counted = counts.of_contenders(alone, queue) if effort.profiled else {}
    host = interleave(alone, replace(effort, sample_s=0.0), timer=host_timer(queue))
    timer: GraphTimer | EventTimer = EventTimer(queue, counted, cycle)
    notes = []
    if graphs:
        try:
            timer = GraphTimer(queue, contenders, cycle)
        except RuntimeError as error:
            notes.append(f"timed by events, since a graph could not be captured: {error}")
    return Timed(
        *(subject, case, dtype, contenders, interleave(contenders, effort, cycle, timer)),
        timer=timer.name,
        host=host,
        counts=counted,
        tensors_per_launch=tensors_per_launch(torch.__version__, torch.version.cuda),
        notes=notes,
        **about,
    )


def _over(samples: Samples, theirs: Key, ours: Key) -> float | None:
    if ours[1] == "torch" or theirs not in samples:
        return None
    return samples.ratio(theirs, ours).p50


def side(provider: str) -> str:
    """Provider as shown to readers."""
    known = {"torch": "torch", WITHOUT: "no scaler", LOOP: "a loop", "cpu": "ampfast"}
    return known.get(provider, f"ampfast, {provider}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
