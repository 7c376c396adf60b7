"""Passes over a table of gradients on a device: the host side shared by Triton and CUDA."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ampfast.backends import core
from ampfast.backends.core import Clip, DeviceTable, Factor, GradList, Pass, Update
from ampfast.backends.scalars import float_of, joint_flag, new_flag

# Largest number of flags for the kernel that updates the scale.
MOST_FLAGS = 4

_one_pass = threading.Lock()
_HERE = nullcontext()


class Ending:
    """What the last program of a check does besides: an update of the scale, a copy of it.

    Attributes:
        update: The update, with at most one flag besides that of the check, or None.
        divisor: 0-dim float32 that gets the scale as it was before.
        applied: Whether it was done.
    """

    def __init__(self, update: Update | None, scale: Tensor) -> None:
        self.update = update
        self.divisor = torch.empty_like(scale)
        self.applied = False

    def undo(self) -> None:
        """Restores what the update replaced, from the state."""
        if self.update is None or not self.applied:
            return
        scale, tracker, state = self.update.scale, self.update.growth_tracker, self.update.state
        if state is None:
            raise RuntimeError("an update without a state cannot be undone")
        before = state[core.state_layout.BEFORE :]
        state[: core.state_layout.COUNTERS] = before[: core.state_layout.COUNTERS]
        scale.data.copy_(float_of(state[core.state_layout.SCALE_BEFORE]).reshape_as(scale))
        tracker.data.copy_(state[core.state_layout.TRACKER_BEFORE].reshape_as(tracker))


def on_gpu(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU and its current stream current."""
    if device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


class DeviceKernels:
    """Kernels over a table of gradients on their device; arguments are those of `backends.Kernels`.

    Args:
        launcher: Launches of one kind of kernels, as the modules `backends.cuda` and
            `backends.triton.launch`.
    """

    def __init__(self, launcher: Any) -> None:
        self._launcher = launcher

    def pass_over(self, *given: Any) -> None:
        """Leaves a pass over an optimizer's gradients to a walk that sorts them."""

    clip_over = pass_over

    def run(self, grads: GradList, work: Pass) -> Tensor:
        """Runs a pass over a list; returns its found_inf. Without a launch no update rides."""
        device = grads.device
        core.require_pass(grads, work)
        found_inf, given = work.found_inf, work.found_inf is not None
        if grads.chunks == 0:
            if work.sums is not None:
                work.sums.zero_()
            if work.clip is not None:
                self.clip(work.clip)
            return new_flag(device) if found_inf is None else found_inf
        if found_inf is None:
            found_inf = torch.empty((), dtype=torch.float32, device=device)
        ending: Ending | None = work.ending
        factor_copy = work.factor_copy
        if ending is not None and work.how is Factor.DIVIDE:
            factor_copy = ending.divisor
        work = work._replace(found_inf=found_inf, accumulate=given, factor_copy=factor_copy)
        with self._launcher.on(device):
            self._launch(DeviceTable.of(grads, self._launcher.is_capturing()), work)
        if ending is not None:
            ending.applied = True
        return found_inf

    def measure(self, grads: GradList, health: Tensor) -> None:
        """As `Kernels.measure`."""
        self._over(grads, "measure", health)

    def narrow(self, pairs: GradList, found_inf: Tensor | None = None) -> None:
        """As `Kernels.narrow`."""
        core.require_pass(pairs, Pass(False, Factor.NONE, found_inf=found_inf))
        self._over(pairs, "narrow", found_inf)

    def clip(self, clip: Clip) -> None:
        """As `Kernels.clip`."""
        with self._launcher.on(clip.sums.device):
            self._launcher.clip_coefficient(clip)

    def update(self, fields: tuple[Any, ...]) -> bool:
        """As `Kernels.update`."""
        update = Update(*fields)
        device, flags = update.scale.device, update.found_infs
        if not core.can_update(update):
            return False
        if len(flags) > MOST_FLAGS:
            update = update._replace(found_infs=[joint_flag(flags, device)])
        with self._launcher.on(device):
            self._launcher.update_scale(update)
        torch.autograd.graph.increment_version(update.scale)  # as torch's op
        return True

    def ending(self, update: Update) -> Ending | None:
        """Returns an update for the last program of a check, or None if it cannot be there."""
        fits = len(update.found_infs) <= 1 and update.norm is None and core.can_update(update)
        return Ending(update, update.scale) if fits else None

    def _over(self, grads: GradList, kernel: str, tensor: Tensor | None) -> None:
        """Runs a kernel over a list, which for `narrow` has pairs alone."""
        if grads.chunks == 0:
            return
        with self._launcher.on(grads.device):
            table = DeviceTable.of(grads, self._launcher.is_capturing())
            if kernel == "narrow" and not all(each.is_paired for each in table.segments):
                raise RuntimeError("a tensor has no float32 values")
            for segment in table.segments:
                getattr(self._launcher, kernel)(table, segment, tensor)

    def _launch(self, table: DeviceTable, work: Pass) -> None:
        """Launches a pass, whose device is current."""
        launcher = self._launcher
        *first, last = table.segments
        launches = [*((segment, False) for segment in first), (last, True)]
        # If a later launch failed, half of the gradients would be written.
        if first and (prepare := getattr(launcher, "prepare", None)) is not None:
            for segment, is_last in launches:
                prepare(work, table, segment, is_last)
        # No other pass with the same header, that of the stream, may come between.
        with _one_pass:
            try:
                for segment, is_last in launches:
                    launcher.multi_tensor(work, table, segment, is_last)
            except BaseException:
                table.header.zero_()  # where intermediate launches leave results
                raise
