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
from ampfast.errors import warn_caller
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
        if most is not None and (isinstance(most, bool) or not isinstance(most, int)):
            raise TypeError(f"max_skips must be an int or None, got {type(most).__name__}")
        if most is not None and most < 1:
            raise ValueError(f"max_skips must be at least 1, got {most}")
        self.most: int | None = most
        self._warns = most is None or most > _WARNED_AT
        self.restart()

    def restart(self) -> None:
        """Begins at a count of 0, and forgets one on its way to the host."""
        self._copies, self.due = scalars.HostCopies(), self._limit

    @property
    def _limit(self) -> float:
        return min(self.most or math.inf, _WARNED_AT if self._warns else math.inf)

    def ends(self, words: Tensor) -> bool:
        """Whether `most` steps in a row were skipped, as far as the host knows; no host sync.

        Warns once of very many, unless fewer end the training. Where ranks are to raise, they wait
        for the counts of the step before, to know the same.

        Args:
            words: State of the scaler.
        """
        if is_capturing() or isinstance(words, FakeTensor):
            return False
        waits = self.most is not None and dist.is_available() and dist.is_initialized()
        # The next copy would be old when it is asked for.
        counts = self._copies.latest(words[: layout.COUNTERS], waits, again=False)
        if counts is None:
            return False
        skips = counts[layout.CONSECUTIVE_SKIPS]
        if self.most is not None and skips >= self.most:
            self.due = 1  # each further skip is too many, too
            return True
        warns = self._warns and skips >= _WARNED_AT
        self._warns = self._warns and not warns
        self.due += self._limit - skips
        if warns:
            warn_caller(_warning(counts))
        return False

    def error(self, stats: ScalerStats, report: object) -> FloatingPointError:
        """Returns the error for these counts.

        Args:
            stats: Counts of the scaler.
            report: Which parameters overflowed; None if that is not known.
        """
        scale = f"; the scale is {stats.scale:g}" * bool(stats.backoffs)
        advice = _advice(stats.skipped, stats.spikes).lstrip()
        return FloatingPointError(
            f"{stats.consecutive_skips} steps in a row were skipped, and max_skips is {self.most}. "
            f"Of {stats.steps} steps {stats.skipped} were skipped, {stats.spikes} of them for "
            f"their norm{scale}.\n{advice if report is None else report}"
        )


def _warning(counts: list[int]) -> str:
    skips = counts[layout.CONSECUTIVE_SKIPS]
    steps, skipped, spikes = (counts[getattr(layout, n)] for n in ("STEPS", "SKIPPED", "SPIKES"))
    return (
        f"{skips} steps in a row were skipped. Of {steps} steps {skipped} were skipped, {spikes} "
        f"of them for their norm.{_advice(skipped, spikes)} max_skips=... ends such a training."
    )


def _advice(skipped: int, spikes: int) -> str:
    text = ""
    if skipped > spikes:
        text += (
            " For inf or NaN in every step look into the model and its input: "
            "ampfast.find_nonfinite(model) names the module, track='overflow' the parameters."
        )
    if spikes:
        text += " Where every norm is above the limit, set a higher skip_above."
    return text
