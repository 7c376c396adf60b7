"""An end for a training whose steps are all skipped."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ampfast.backends import scalars
from ampfast.backends.core import state_layout as layout
from ampfast.capture import is_capturing
from ampfast.report import ScalerStats

_HINT = "A scaler made with track='overflow' names the parameters whose gradients overflow."


class SkipLimit:
    """Counts of skipped steps as they arrive on the host, and the number that is too many.

    Attributes:
        most: Number of steps skipped in a row that is too many.
    """

    def __init__(self, most: Any) -> None:
        if isinstance(most, bool) or not isinstance(most, int):
            raise TypeError(f"max_skips must be an int or None, got {type(most).__name__}")
        if most < 1:
            raise ValueError(f"max_skips must be at least 1, got {most}")
        self.most: int = most
        self._copies = scalars.HostCopies()

    def is_reached(self, words: Tensor) -> bool:
        """Whether so many steps in a row were skipped, as far as the host knows; no host sync.

        Ranks wait for the counts of the step before, to know the same.

        Args:
            words: State of the scaler.
        """
        if is_capturing():
            return False
        is_distributed = dist.is_available() and dist.is_initialized()
        skips = self._copies.latest(words[layout.CONSECUTIVE_SKIPS].reshape(1), is_distributed)
        return skips is not None and skips[0] >= self.most

    def error(self, stats: ScalerStats, report: object) -> FloatingPointError:
        """Returns the error for these counts.

        Args:
            stats: Counts of the scaler.
            report: Which parameters overflowed; None if that is not known.
        """
        # A training that continues is not ended by a count of before, which arrives late on a GPU.
        self._copies = scalars.HostCopies()
        return FloatingPointError(
            f"{stats.consecutive_skips} steps in a row were skipped, and max_skips is {self.most}. "
            f"Of {stats.steps} steps {stats.skipped} were skipped, {stats.spikes} of them for "
            f"their norm; the scale is {stats.scale:g}.\n{_HINT if report is None else report}"
        )
