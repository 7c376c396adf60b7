"""Counters and history of a scaler's steps, as they are read on the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
