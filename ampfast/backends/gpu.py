"""Kernels by a launcher, Triton's or CUDA's, and the update with which a pass ends."""

from __future__ import annotations

from functools import partial
from typing import Any

from ampfast.backends import core
from ampfast.backends.core import Update
from ampfast.backends.scalars import float_of


def undo(update: Update) -> None:
    """Restores what an update replaced as the ending of a pass, from its state, if it was done."""
    if not update.applied:
        return
    scale, tracker = update.scale, update.growth_tracker
    state: Any = update.state
    before = state[core.state_layout.BEFORE :]
    state[: core.state_layout.COUNTERS] = before[: core.state_layout.COUNTERS]
    scale.data.copy_(float_of(state[core.state_layout.SCALE_BEFORE]).reshape_as(scale))
    tracker.data.copy_(state[core.state_layout.TRACKER_BEFORE].reshape_as(tracker))


class DeviceKernels:
    """Kernels that a launcher launches on a device, as `backends.Kernels`.

    Attributes:
        launcher: Launches of one kind of kernels, as the modules `backends.cuda` and
            `backends.triton.launch`; the core calls it.
    """

    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher
        # Without a Python frame each.
        self.run: Any = partial(core.run_on, launcher)
        self.clip: Any = partial(core.clip_on, launcher)
        self.update: Any = partial(core.update_on, launcher)

    def ending(self, update: Update) -> Update | None:
        """Returns the update if the last program of a check can do it, else None."""
        fits = len(update.found_infs) <= 1 and update.norm is None and core.can_update(update)
        return update if fits else None
