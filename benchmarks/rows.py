"""Rows of timed contenders: device time, host time and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from .cases import GradCase
from .counts import Counts
from .device_time import EventTimer
from .harness import Contender, Samples
from .results import Row

Key = tuple[str, str]


@dataclass(frozen=True)
class Timed:
    """Timed contenders over one case and dtype.

    Attributes:
        subject: Table of the rows.
        case: Gradients.
        dtype: Dtype of the gradients.
        lists: Number of lists taken in turn.
        contenders: Contenders in the order of the rows.
        samples: Device time; on a CPU wall time.
        timer: Name of the timer, as in `Row`.
        host: Host time, if it differs.
        counts: Counts per call, if taken.
        replaces: torch's path that a path without a counterpart replaces.
    """

    subject: str
    case: GradCase
    dtype: torch.dtype
    lists: int
    contenders: Sequence[Contender]
    samples: Samples
    timer: str
    host: Samples | None = None
    counts: dict[Key, Counts | None] = field(default_factory=dict)
    replaces: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """One row for each contender."""
        return [self._row(contender) for contender in self.contenders]

    def _row(self, contender: Contender) -> Row:
        seconds = self.samples.spread(*contender.key)
        row = Row(
            subject=self.subject,
            case=self.case.name,
            dtype=dtype_name(self.dtype),
            path=contender.path,
            provider=contender.provider,
            ms_p20=seconds.p20 * 1e3,
            ms_p50=seconds.p50 * 1e3,
            ms_p80=seconds.p80 * 1e3,
            timer="waits" if contender.waits and self.timer == EventTimer.name else self.timer,
            lists=self.lists,
            list_bytes=self.case.list_bytes(self.dtype),
            vs_torch=self._over_torch(self.samples, contender),
        )
        if self.host is not None and contender.key in self.host:
            host = self.host.spread(*contender.key)
            row = replace(
                row,
                host_us_p20=host.p20 * 1e6,
                host_us_p50=host.p50 * 1e6,
                host_us_p80=host.p80 * 1e6,
                host_vs_torch=self._over_torch(self.host, contender),
            )
        counts = self.counts.get(contender.key)
        if counts is not None:
            row = replace(row, launches=counts.launches, copies=counts.copies, syncs=counts.syncs)
        return row

    def _over_torch(self, samples: Samples, contender: Contender) -> float | None:
        theirs = (self.replaces.get(contender.path, contender.path), "torch")
        if contender.provider == "torch" or theirs not in samples:
            return None
        return samples.ratio(theirs, contender.key).p50


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
