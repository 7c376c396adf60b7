"""Steps skipped in a row: a warning of very many, and an end for a training of too many."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor

from ampfast.backends import scalars
from ampfast.backends.core import state_layout as layout
from ampfast.backends.cuda_graphs import is_capturing
from ampfast.errors import require_int, warn_caller
from ampfast.scaler.history import ScalerStats

_WARNED_AT = 100


class SkipWatch:
    """Counts of skipped steps as they arrive on the host, and what very many in a row lead to.

    A count grows by at most one a step: the host asks for it only where it may be at a limit.

    Attributes:
        most: Number of steps skipped in a row that is too many, or None.
        due: Number of updates until the host asks.
    """

    def __init__(self, most: Any = None) -> None:
        if most is not None:
            require_int("max_skips", most, 1, 2**31 - 1)
        self.most: int | None = most
        self._warns = most is None or most > _WARNED_AT
        self.restart()

    def restart(self) -> None:
        """Begins at a count of 0, and forgets one on its way to the host."""
        self._copies, self.due = scalars.HostCopies(), self._limit

    @property
    def _limit(self) -> float:
        return min(self.most or math.inf, _WARNED_AT if self._warns else math.inf)

    def see(self, words: Tensor, scaler: Any) -> None:
        """Raises if `most` steps in a row were skipped, as far as the host knows; no host sync.

        Warns once of very many, unless fewer end the training. Where ranks are to raise, they wait
        for the counts of the step before, to know the same.

        Args:
            words: State of the scaler.
            scaler: The scaler.
        """
        if is_capturing() or isinstance(words, FakeTensor):
            return
        waits = self.most is not None and dist.is_available() and dist.is_initialized()
        # The next copy would be old when it is asked for.
        counts = self._copies.latest(words[: layout.COUNTERS], waits, again=False)
        if counts is None:
            return
        skips = counts[layout.CONSECUTIVE_SKIPS]
        if self.most is not None and skips >= self.most:
            self.due = 1  # each further skip is too many, too
            stats, report = scaler.stats(), scaler._report_or_reason()
            told = _told(stats, f", and max_skips is {self.most}")
            advice = _advice(stats).lstrip() if report is None else report
            raise FloatingPointError(f"{told}\n{advice}")
        warns = self._warns and skips >= _WARNED_AT
        self._warns = self._warns and not warns
        self.due += self._limit - skips
        if warns:
            stats = scaler.stats()
            warn_caller(f"{_told(stats)}{_advice(stats)} max_skips=... ends such a training.")


def _told(stats: ScalerStats, limit: str = "") -> str:
    scale = f"; the scale is {stats.scale:g}" * bool(stats.backoffs)
    return (
        f"{stats.consecutive_skips} steps in a row were skipped{limit}. Of {stats.steps} steps "
        f"{stats.skipped} were skipped, {stats.spikes} of them for their norm{scale}."
    )


def _advice(stats: ScalerStats) -> str:
    text = ""
    if stats.skipped > stats.spikes:
        text += (
            " For inf or NaN in every step look into the model and its input: "
            "ampfast.find_nonfinite(model) names the module, track='overflow' the parameters."
        )
    if stats.spikes:
        text += " Where every norm is above the limit, set a higher skip_above."
    return text
