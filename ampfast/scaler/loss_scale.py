"""Limits, device state, counters and history of the loss scale."""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor

from ampfast.backends import Kernels, aten, scalars
from ampfast.backends.core import Update, update_by
from ampfast.backends.core import state_layout as layout
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.errors import float_of, require_int

_COUNTS = ("steps", "skipped", "growths", "backoffs", "consecutive_skips", "spikes")


@dataclass(frozen=True)
class Limits:
    """Limits and hysteresis of a scale, as `GradScaler` describes them."""

    min_scale: float | None = None
    max_scale: float | None = None
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for name in ("min_scale", "max_scale"):
            limit = getattr(self, name)
            if limit is None:
                continue
            value = float_of(name, limit, " or None")
            if not 0 < ctypes.c_float(value).value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite in float32, got {value}")
            object.__setattr__(self, name, value)
        require_int("hysteresis", self.hysteresis, 1, 2**31 - 1)

    @cached_property
    def is_torchs(self) -> bool:
        """Whether the rule is torch's: no limits, no hysteresis."""
        return self == Limits()

    def require_within(self, init_scale: float, dynamic: bool) -> None:
        """Raises ValueError if an initial scale is beyond the limits, or a constant one has any."""
        if not dynamic and not self.is_torchs:
            raise ValueError(
                "a scale with dynamic=False never changes: it takes no min_scale, max_scale "
                "or hysteresis"
            )
        low_enough = self.max_scale is None or init_scale <= self.max_scale
        if not low_enough or not (self.min_scale is None or init_scale >= self.min_scale):
            raise ValueError(
                f"init_scale must be from min_scale to max_scale, got {init_scale} with "
                f"min_scale={self.min_scale} and max_scale={self.max_scale}"
            )


@dataclass(frozen=True)
class ScalerStats:
    """Counters since the scaler was constructed; a step is one iteration, ended by `update()`.

    Attributes:
        steps: Number of steps.
        skipped: Number of steps in which some optimizer's gradients were not all finite, or their
            norm was above `skip_above`.
        growths: Number of steps after which the scale grew.
        backoffs: Number of steps after which the scale backed off.
        consecutive_skips: Number of skipped steps since the last one that was taken.
        scale: Current scale.
        growth_tracker: Number of steps without overflow since the scale last changed.
        spikes: Number of the steps skipped that were skipped for their gradients' norm.
    """

    steps: int
    skipped: int
    growths: int
    backoffs: int
    consecutive_skips: int
    scale: float
    growth_tracker: int
    spikes: int = 0


@dataclass(frozen=True)
class History:
    """History of the last steps, at most 1,024, oldest first; CPU tensors of the same length.

    Attributes:
        step: int64, step number, from 0.
        scale: float32, scale of the step.
        skipped: bool, whether some optimizer's gradients were not all finite, or a spike.
        grad_norm: float32, norm of the unscaled gradients before clipping, jointly of all
            optimizers if their norms are of one type; NaN where no norm was taken.
        has_norm: bool, whether a norm was taken.
        spiked: bool, whether the step was skipped for the norm of finite gradients alone.
    """

    step: Tensor
    scale: Tensor
    skipped: Tensor
    grad_norm: Tensor
    has_norm: Tensor
    spiked: Tensor

    def __len__(self) -> int:
        return self.step.numel()


class LossScale:
    """Updates of a scale, with limits, counters and history in one int64 tensor.

    Attributes:
        limits: Limits and hysteresis.
        words: State, laid out as `backends.core.state_layout`, on the CPU until there is a scale.
        norms: Ids of optimizers, their joint norm and its order, as measured in this iteration.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.norms: list[tuple[tuple[int, ...], Tensor, float]] = []
        size = layout.STATE_WORDS
        self.words = scalars.allocate(torch.zeros, size, dtype=torch.int64, device="cpu")
        self.words[layout.MOST_TOLERATED] = limits.hysteresis - 1
        bounds = {layout.MIN_SCALE: limits.min_scale, layout.MAX_SCALE: limits.max_scale}
        for word, bound in bounds.items():
            self.words[word] = int.from_bytes(struct.pack("<f", bound or 0.0), "little")

    def state_dict(self) -> dict[str, Any]:
        """Returns the checkpoint's entry, with a host sync."""
        # The tracker counts down, as Megatron-LM's.
        tracker = self.limits.hysteresis - int(self.words[layout.TOLERATED])
        return {**asdict(self.limits), "hysteresis_tracker": tracker}

    def load(self, tolerated: int) -> None:
        """Continues a training: sets the overflows since growth was last due, no skip before."""
        self.words[layout.TOLERATED], self.words[layout.CONSECUTIVE_SKIPS] = tolerated, 0

    def update_(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: list[Tensor],
        factors: tuple[Any, Any, Any],
        kernels: Kernels,
    ) -> None:
        """Updates the scale and the growth tracker in place.

        Args:
            scale: One-element float32.
            growth_tracker: One-element int32.
            found_infs: The flags of this iteration, at least one, on any devices.
            factors: Growth factor, backoff factor and growth interval; any real numbers.
            kernels: Kernels for that device.
        """
        norms = self.norms
        norm = norms[0][1] if norms else None
        if len(norms) > 1:
            norm = self._joint_norm(scale.device)
        given = scale, growth_tracker, found_infs
        # The first try is declined where a tensor is on another device or a factor is no float.
        if update_by(kernels, *given, *factors, self.words, norm) is not None:
            update = self.update_of(*given, factors)
            if not kernels.update(update):
                aten.update(update, self.limits, bool(norms))

    def update_of(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: list[Tensor],
        factors: tuple[Any, Any, Any],
    ) -> Update:
        """Returns an update of plain numbers and of tensors that are on the scale's device."""
        device = scale.device
        flags = [scalars.moved(flag, device) for flag in found_infs]
        given = scale, growth_tracker, flags, *_numbers(*factors), self.words_on(device)
        return cast(Update, update_by(None, *given, self._joint_norm(device)))

    def _joint_norm(self, device: torch.device) -> Tensor | None:
        """The joint norm of this iteration, or None if there is none or their orders differ.

        A norm replaces those before of subsets of its optimizers, and is none of a superset's.
        """
        found: dict[frozenset[int], tuple[Tensor, float]] = {}
        for optimizers, norm, order in self.norms:
            ids = frozenset(optimizers)
            if not any(ids < others for others in found):
                found = {each: known for each, known in found.items() if not ids & each}
                found[ids] = norm, order
        norms = [scalars.moved(norm.detach(), device).float() for norm, _ in found.values()]
        if len(norms) == 1:
            return norms[0]
        orders = {order for _, order in found.values()}
        if len(orders) != 1:
            return None
        # In float64, since the squares of float32 overflow.
        wide = scalars.widest(device)
        joint: Tensor = torch.linalg.vector_norm(torch.stack(norms), orders.pop(), dtype=wide)
        return joint.float()

    def words_on(self, device: torch.device) -> Tensor:
        """Returns the words on `device`, moved there if necessary."""
        if self.words.device != device:
            refuse_capture("the creation of the scaler's state, which every replay would reset")
            with torch.inference_mode(False):
                self.words = self.words.to(device)
        return self.words

    def stats(self, scale: Any, growth_tracker: Any) -> ScalerStats:
        """Reads the counters with one host sync, and a scale and its tracker, if they are tensors.

        Before there are tensors, they are numbers.
        """
        if isinstance(scale, Tensor):
            now = scalars.word_of(scale.detach()), growth_tracker.detach().long()
            counters = self.words_on(scale.device)[: layout.COUNTERS]
            read = torch.cat([counters, *(each.reshape(1) for each in now)])
            *counts, word, growth_tracker = read.tolist()
            (scale,) = struct.unpack("<f", struct.pack("<I", word))
        else:
            counts = self.words[: layout.COUNTERS].tolist()
        named = {name: counts[getattr(layout, name.upper())] for name in _COUNTS}
        return ScalerStats(**named, scale=scale, growth_tracker=growth_tracker)

    def history(self) -> History:
        """Reads the ring with one host sync."""
        return history_of(self.words.cpu())

    def __getstate__(self) -> dict[str, Any]:
        # As numbers, since a pickled tensor would be shared with other processes.
        words = self.words.tolist()
        steps = min(words[layout.STEPS], layout.RING_STEPS)
        return {"limits": self.limits, "words": words[: layout.RING + steps * layout.RING_WORDS]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        LossScale.__init__(self, state["limits"])
        given = scalars.allocate(torch.tensor, state["words"], dtype=torch.int64, device="cpu")
        self.words[: len(given)] = given


def history_of(words: Tensor) -> History:
    """Returns the history in the state of a scaler, which is on the CPU."""
    end = int(words[layout.STEPS])
    step = torch.arange(max(0, end - layout.RING_STEPS), end, device="cpu")
    ring = words[layout.RING :].view(layout.RING_STEPS, layout.RING_WORDS)
    entries = ring[step % layout.RING_STEPS]
    status = entries[:, layout.RING_STATUS]
    has_norm = status & 2 != 0
    norm = scalars.float_of(entries[:, layout.RING_NORM])
    return History(
        step=step,
        scale=scalars.float_of(entries[:, layout.RING_SCALE]),
        skipped=status & 1 != 0,
        grad_norm=norm.masked_fill(~has_norm, math.nan),
        has_norm=has_norm,
        spiked=status & 4 != 0,
    )


def _numbers(growth: Any, backoff: Any, interval: Any) -> tuple[Any, Any, Any]:
    """Factors for the kernels, or as they are for torch's op, which accepts or refuses them."""
    are_real = isinstance(growth, (int, float)) and isinstance(backoff, (int, float))
    # torch's op accepts numpy's integers, but no bool.
    if are_real and not isinstance(interval, bool) and isinstance(interval, Integral):
        return float(growth), float(backoff), int(interval)
    return growth, backoff, interval
