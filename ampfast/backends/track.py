"""Where a pass notes what it sees of each parameter."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Track"]


class Track(NamedTuple):
    """Rows by the number of the parameter; `csrc/track_layout.h` says what stands in them.

    Attributes:
        marks: int64 of shape (P, MARK_WORDS) for P parameters: in which step each was last not
            finite, as the optimizer uses its gradient, and how often so far.
        now: int64, whose first element is the number of completed steps.
        health: int64 of shape (P, HEALTH_WORDS), zero before: the range of the values as they are
            before they are unscaled. Or None.
    """

    marks: Tensor
    now: Tensor
    health: Tensor | None
