"""Passes over a table of gradients on a device: the host side shared by Triton and CUDA."""

from __future__ import annotations

from functools import partial
from typing import Any

from ampfast.backends import core
from ampfast.backends.core import Update
from ampfast.backends.scalars import float_of


class Ending:
    """An update of the scale by the last program of a check.

    Attributes:
        update: The update, with at most one flag besides that of the check.
        applied: Whether it was done.
    """

    def __init__(self, update: Update) -> None:
        self.update, self.applied = update, False

    def undo(self) -> None:
        """Restores what the update replaced, from the state."""
        if not self.applied:
            return
        scale, tracker = self.update.scale, self.update.growth_tracker
        state: Any = self.update.state
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

    def ending(self, update: Update) -> Ending | None:
        """Returns an update for the last program of a check, or None if it cannot be there."""
        fits = len(update.found_infs) <= 1 and update.norm is None and core.can_update(update)
        return Ending(update) if fits else None
