"""Passes over a table of gradients on a device: the host side shared by Triton and CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ampfast.backends import aten
from ampfast.backends.cpu import (
    Casts,
    Clip,
    DeviceTable,
    GradList,
    Segment,
    Track,
    UpdateFactors,
    clear_tables,
    is_scalar,
    pass_on_device,
    state_layout,
    update_on_device,
)

__all__ = [
    "CLIP_EPSILON",
    "NO_FACTORS",
    "Clip",
    "DeviceKernels",
    "Epilogue",
    "Launcher",
    "Pass",
    "ScaleUpdate",
    "Use",
    "on_gpu",
]

# Largest number of flags for the kernel that updates the scale.
MOST_FLAGS = 4

_one_pass = threading.Lock()
_HERE = nullcontext()

# Placeholder for launches without an update.
NO_FACTORS = (1.0, 1.0, 0)

# Added to the norm in the clip coefficient, as in torch.
CLIP_EPSILON = 1e-6


class Use(IntEnum):
    """Role of the factor in the optimizer, which decides whether a value is finite."""

    RAW = 0
    INVERSE = 1
    SCALE = 2
    DIVIDE = 3


class Epilogue(IntEnum):
    """Work of the last program of a launch."""

    NOTHING = 0
    FINISH = 1
    UPDATE = 2


class Launcher(Protocol):
    """Launches of one kind of kernels.

    Kernels that are compiled at their launch have `prepare`, too, with the arguments of
    `multi_tensor`. It raises any error of that launch.
    """

    def on(self, device: torch.device) -> AbstractContextManager[object]: ...

    def is_capturing(self) -> bool: ...

    def multi_tensor(self, work: Pass, segment: Segment, epilogue: Epilogue) -> None: ...

    def measure(self, table: DeviceTable, segment: Segment, health: Tensor) -> None: ...

    def narrow(self, table: DeviceTable, segment: Segment, found_inf: Tensor | None) -> None: ...

    def update_scale(self, update: ScaleUpdate, found_infs: list[Tensor]) -> None: ...

    def clip_coefficient(self, clip: Clip) -> None: ...


class ScaleUpdate:
    """Update of the scale on its device, alone or in the last program of a check.

    `divisor`, if set, gets the scale as it was where the update rides.

    Args:
        launcher: The kernels.
        scale: As for `cpu.update_scale_`.
        growth_tracker: As for `cpu.update_scale_`.
        found_infs: Flags besides that of the check.
        factors: As for `cpu.update_scale_`.
        state: As for `cpu.update_scale_`.
        norm: As for `cpu.update_scale_`.
    """

    def __init__(
        self,
        launcher: Launcher,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: Sequence[Tensor],
        factors: tuple[float, float, int],
        state: Tensor | None,
        norm: Tensor | None,
    ) -> None:
        self.scale = scale
        self.growth_tracker = growth_tracker
        self.factors = factors
        self.state = state
        self.norm = norm
        self.divisor: Tensor | None = None
        self.applied = False
        self._launcher = launcher
        self._found_infs = found_infs

    @property
    def other(self) -> Tensor | None:
        """Flag of another optimizer that was checked before, if any."""
        return next(iter(self._found_infs), None)

    @property
    def rides(self) -> bool:
        """Whether it can ride in a check: with at most one more flag and nothing else."""
        return len(self._found_infs) <= 1 and self.norm is None

    def apply(self) -> None:
        """Launches the update alone."""
        flags, device = list(self._found_infs), self.scale.device
        if len(flags) > MOST_FLAGS:
            flags = [aten.joint_flag(flags, device)]
        with self._launcher.on(device):
            self._launcher.update_scale(self, flags)
        self.applied = True

    def undo(self) -> None:
        """Restores the replaced values from the state.

        Raises:
            RuntimeError: If there is no state.
        """
        if self.state is None:
            raise RuntimeError("an update without a state cannot be undone")
        if self.applied:
            before = self.state[state_layout.BEFORE :]
            self.state[: state_layout.COUNTERS] = before[: state_layout.COUNTERS]
            scale = aten.float_of(self.state[state_layout.SCALE_BEFORE])
            self.scale.data.copy_(scale.reshape_as(self.scale))
            tracker = self.state[state_layout.TRACKER_BEFORE]
            self.growth_tracker.data.copy_(tracker.reshape_as(self.growth_tracker))

    def bump_version(self) -> None:
        """Tells autograd that the scale was written, as torch's op does."""
        torch.autograd.graph.increment_version(self.scale)


def on_gpu(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU and its current stream current."""
    if device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


class Pass(NamedTuple):
    """One pass over a table.

    Attributes:
        table: The gradients.
        write: Whether they are unscaled in place, else only read.
        use: Role of the factor.
        factor: One-element float32, or None.
        coefficient: One-element float64 by which unscaled values are multiplied, or None.
        found_inf: 0-dim float32 flag.
        accumulate: Whether a flag of 1 stays, else it is assigned.
        norms: float64 of shape (2,) that gets the sum of squares and the largest magnitude of
            the values times the factor, or None.
        track: Tables for overflow marks by parameter, or None.
        update: Update after the check, or None.
        divisor: 0-dim float32 that gets the factor as it is before the update, or None.
    """

    table: DeviceTable
    write: bool
    use: Use
    factor: Tensor | None
    found_inf: Tensor
    accumulate: bool
    coefficient: Tensor | None = None
    norms: Tensor | None = None
    track: Track | None = None
    update: ScaleUpdate | None = None
    divisor: Tensor | None = None


class DeviceKernels:
    """The calls of `backends.cpu`, for gradients in a table on their device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def reading(self) -> DeviceKernels:
        """Returns the calls for a scale of 1, with which `unscale_groups` only reads."""
        return _Reading(self._launcher)

    def unscale_(
        self,
        grads: GradList,
        factor: Tensor,
        *,
        is_scale: bool,
        found_inf: Tensor | None = None,
        update: ScaleUpdate | None = None,
        coefficient: Tensor | None = None,
        norms: Tensor | None = None,
        track: Track | None = None,
    ) -> Tensor:
        """As `cpu.unscale_`."""
        use = Use.SCALE if is_scale else Use.INVERSE
        return self._run(grads, True, use, factor, found_inf, update, coefficient, norms, track)

    def check_(
        self,
        grads: GradList,
        grad_scale: Tensor | None = None,
        *,
        found_inf: Tensor | None = None,
        update: ScaleUpdate | None = None,
        track: Track | None = None,
        norms: Tensor | None = None,
    ) -> Tensor:
        """As `cpu.check_`."""
        use = Use.RAW if grad_scale is None else Use.DIVIDE
        return self._run(grads, False, use, grad_scale, found_inf, update, None, norms, track)

    def norms(
        self,
        grads: GradList,
        factor: Tensor,
        *,
        is_scale: bool,
        norms: Tensor,
        track: Track | None = None,
    ) -> Tensor:
        """As `cpu.norms`."""
        use = Use.SCALE if is_scale else Use.INVERSE
        return self._run(grads, False, use, factor, None, None, None, norms, track)

    def measure_(self, grads: GradList, health: Tensor) -> None:
        """As `cpu.measure_`."""
        if grads.chunks == 0:
            return
        launcher = self._launcher
        with launcher.on(grads.device):
            table = DeviceTable.of(grads, launcher.is_capturing())
            for segment in table.segments:
                launcher.measure(table, segment, health)

    def narrow_(self, pairs: GradList, found_inf: Tensor | None = None) -> None:
        """As `cpu.narrow_`."""
        if pairs.chunks == 0:
            return
        if found_inf is not None:
            _require_scalar("found_inf", found_inf, pairs.device, torch.float32)
        launcher = self._launcher
        with launcher.on(pairs.device):
            table = DeviceTable.of(pairs, launcher.is_capturing())
            for segment in table.segments:
                if not segment.is_paired:
                    raise RuntimeError("a tensor has no float32 values")
            for segment in table.segments:
                launcher.narrow(table, segment, found_inf)

    def clip_coefficient(self, norms: Tensor, *more: Any) -> None:
        """As `cpu.clip_coefficient`."""
        with self._launcher.on(norms.device):
            self._launcher.clip_coefficient(Clip(norms, *more))

    def scale_update(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: Sequence[Tensor],
        factors: UpdateFactors,
        state: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> ScaleUpdate | None:
        """Returns an update to apply, or None for torch's own op or its error."""
        if not is_scalar(scale, torch.float32) or not is_scalar(growth_tracker, torch.int32):
            return None
        interval = factors.growth_interval
        if not isinstance(interval, int) or not -(2**63) <= interval < 2**63:
            return None
        if scale.is_inference() or scale.requires_grad or growth_tracker.device != scale.device:
            return None
        for flag in found_infs:
            if not is_scalar(flag, torch.float32) or flag.device != scale.device:
                return None
        if norm is not None and not is_scalar(norm, torch.float32):
            return None
        given = (scale, growth_tracker, found_infs, factors, state, norm)
        return ScaleUpdate(self._launcher, *given)

    def update_scale_(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: Sequence[Tensor],
        factors: UpdateFactors,
        state: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> bool:
        """Applies the update of `scale_update`; False if that is None."""
        update = self.scale_update(scale, growth_tracker, found_infs, factors, state, norm)
        if update is None:
            return False
        update.apply()
        update.bump_version()
        return True

    # The raw calls of the short way, as in the core; flags and norms are tensors on the device.

    def unscale_groups(
        self,
        param_groups: Any,
        scale: Tensor,
        allow_fp16: bool,
        state: dict[str, Any],
        unscaled: Any,
        casts: Casts | None,
    ) -> Tensor | None:
        """As `cpu.unscale_groups`."""
        flag: Tensor | None = self._over_groups(
            self._unscale, param_groups, scale, allow_fp16, state, unscaled, casts, False
        )
        return flag

    def clip_groups(
        self,
        param_groups: Any,
        scale: Tensor,
        allow_fp16: bool,
        state: dict[str, Any],
        unscaled: Any,
        casts: Casts | None,
        max_norm: float,
        largest: bool,
        skip_above: float | None,
        taken: Tensor | None,
    ) -> Tensor | None:
        """As `cpu.clip_groups`."""
        total: Tensor | None = self._over_groups(
            partial(self._clip, max_norm, largest, skip_above, taken),
            *(param_groups, scale, allow_fp16, state, unscaled, casts, True),
        )
        return total

    def check_groups(
        self, param_groups: Any, grad_scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """As `cpu.check_groups`, with one flag for both."""
        checked: tuple[Tensor, Tensor, Tensor] | None = self._over_groups(
            self._check, param_groups, grad_scale, True, None, None, None, False
        )
        return checked

    def update_scale(self, scaler: Any, words: Tensor | None, norm: Tensor | None) -> bool | None:
        """As `cpu.update_scale`."""
        return update_on_device(scaler, words, norm, self._update)

    def _over_groups(
        self,
        launch: Callable[..., Any],
        param_groups: Any,
        scale: Tensor,
        allow_fp16: bool,
        state: dict[str, Any] | None,
        unscaled: Any,
        casts: Casts | None,
        clips: bool,
    ) -> Any:
        if self._launcher.is_capturing():
            return None  # each launch needs a table of its own
        return pass_on_device(
            param_groups, scale, allow_fp16, state, unscaled, casts, clips, launch
        )

    def _unscale(self, table: DeviceTable, scale: Tensor, found_inf: Tensor) -> Tensor:
        with self._launcher.on(scale.device):
            self._launch(Pass(table, True, Use.SCALE, scale, found_inf, False))
        return found_inf

    def _check(
        self, table: DeviceTable, scale: Tensor, found_inf: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        divisor = torch.empty_like(scale)
        with self._launcher.on(scale.device):
            self._launch(Pass(table, False, Use.DIVIDE, scale, found_inf, False, divisor=divisor))
        return found_inf, found_inf, divisor

    def _clip(
        self,
        max_norm: float,
        largest: bool,
        skip_above: float | None,
        taken: Tensor | None,
        table: DeviceTable,
        scale: Tensor,
        found_inf: Tensor,
        is_wide: bool,
    ) -> Tensor:
        norms = scale.new_empty((1, 2), dtype=torch.float64)
        norm = scale.new_empty((), dtype=torch.float64 if is_wide else torch.float32)
        coefficient = scale.new_empty((), dtype=torch.float64)
        with self._launcher.on(scale.device):
            read = Pass(table, False, Use.SCALE, scale, found_inf, False, norms=norms[0])
            self._launch(read)
            clip = Clip(norms, max_norm, largest, norm, coefficient)
            if skip_above is not None:
                clip = clip._replace(found_inf=found_inf, skip_above=skip_above, taken=taken)
            self._launcher.clip_coefficient(clip)
            # Its own flag: only the first pass sees what the scale makes of the values.
            rest = read._replace(write=True, norms=None, coefficient=coefficient)
            self._launch(rest._replace(found_inf=torch.empty_like(found_inf)))
        return norm

    def _update(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: list[Tensor],
        factors: tuple[float, float, int],
        state: Tensor | None,
        norm: Tensor | None,
    ) -> None:
        ScaleUpdate(self._launcher, scale, growth_tracker, found_infs, factors, state, norm).apply()

    def _run(
        self,
        grads: GradList,
        write: bool,
        use: Use,
        factor: Tensor | None,
        found_inf: Tensor | None,
        update: ScaleUpdate | None,
        coefficient: Tensor | None,
        norms: Tensor | None,
        track: Track | None,
    ) -> Tensor:
        device = grads.device
        if update is not None and not update.rides:
            update = None  # required by its caller
        for name, scalar in (("factor", factor), ("found_inf", found_inf)):
            if scalar is not None:
                _require_scalar(name, scalar, device, torch.float32)
        if coefficient is not None:
            _require_scalar("coefficient", coefficient, device, torch.float64)
        if norms is not None:
            _require_norms(norms, device, coefficient)
        accumulate = found_inf is not None
        if grads.chunks == 0:
            if norms is not None:
                norms.zero_()
            # Without a launch no update can ride: the caller applies it.
            return (
                torch.zeros((), dtype=torch.float32, device=device)
                if found_inf is None
                else found_inf
            )
        launcher = self._launcher
        with launcher.on(device):
            table = DeviceTable.of(grads, launcher.is_capturing())
            if found_inf is None:
                found_inf = torch.empty((), dtype=torch.float32, device=device)
            divisor = None if update is None else update.divisor
            self._launch(
                Pass(
                    *(table, write, use, factor, found_inf, accumulate),
                    *(coefficient, norms, track, update, divisor),
                )
            )
        if update is not None:
            update.applied = True
        return found_inf

    def _launch(self, work: Pass) -> None:
        """Launches a pass, whose device is current."""
        launcher = self._launcher
        *first, last = work.table.segments
        final = Epilogue.FINISH if work.update is None else Epilogue.UPDATE
        if not first:
            launcher.multi_tensor(work, last, final)
            return
        launches = [*((segment, Epilogue.NOTHING) for segment in first), (last, final)]
        # If a later launch failed, half of the gradients would be written.
        if prepare := getattr(launcher, "prepare", None):
            for segment, epilogue in launches:
                prepare(work, segment, epilogue)
        # No other thread's pass over the same table may come between.
        with _one_pass:
            try:
                for segment, epilogue in launches:
                    launcher.multi_tensor(work, segment, epilogue)
            except BaseException:
                # Intermediate launches leave results in it.
                clear_tables()
                raise


class _Reading(DeviceKernels):
    def _unscale(self, table: DeviceTable, scale: Tensor, found_inf: Tensor) -> Tensor:
        writes = any(segment.is_paired for segment in table.segments)
        with self._launcher.on(scale.device):
            self._launch(Pass(table, writes, Use.SCALE, scale, found_inf, False))
        return found_inf


def _require_scalar(name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    if not is_scalar(tensor, dtype) or tensor.device != device:
        wanted = str(dtype).removeprefix("torch.")
        raise RuntimeError(
            f"{name} must be a one-element {wanted} tensor on {device}, got {tensor.dtype} of "
            f"shape {tuple(tensor.shape)} on {tensor.device}"
        )


def _require_norms(norms: Tensor, device: torch.device, coefficient: Tensor | None) -> None:
    if norms.dtype is not torch.float64 or norms.shape != (2,) or not norms.is_contiguous():
        raise RuntimeError(
            f"norms must be a contiguous float64 tensor of 2 elements, got {norms.dtype} of "
            f"shape {tuple(norms.shape)}"
        )
    if norms.device != device:
        raise RuntimeError(f"norms must be on {device}, got {norms.device}")
    if coefficient is not None:
        raise RuntimeError("norms are taken in the pass before the one with a coefficient")
