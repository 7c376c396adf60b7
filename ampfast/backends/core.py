"""The compiled core, whose names are listed in _C.pyi, and what its kernels are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

_REMEDY = (
    "build it against the torch that is installed: `make build` in a checkout, or `pip install "
    "--no-build-isolation .` and start Python outside of the checkout, whose own folder hides what "
    "was installed"
)


def _require_torch(built_for: str, here: str) -> None:
    """Raises ImportError unless torch's version equals the build's, except for the patch number.

    C++ classes may differ between minor versions, and some mismatched builds still load.
    """
    if built_for.split(".")[:2] != here.split(".")[:2]:
        raise ImportError(
            f"ampfast's compiled core is for torch {built_for}, and this is torch {here}; {_REMEDY}"
        )


try:
    # `from ampfast import _C` would report a circular import if there is no core.
    import ampfast._C as _C
    from ampfast._C import *  # noqa: F403
except ImportError as error:
    raise ImportError(f"ampfast's compiled core cannot be loaded ({error}); {_REMEDY}") from error
_require_torch(_C.build_info()["torch"], torch.__version__)
_C.cpu_capability()  # raises ValueError if AMPFAST_CPU_CAPABILITY names none

compiled = _C

# The list of tensors on a device; None if one of them is irregular or of another type.
list_of = _C.GradList.of

# Words of a scaler's state, and of the norms of the steps taken, by name, as in csrc/scale.h.
state_layout = SimpleNamespace(**_C.state_layout())
norm_layout = SimpleNamespace(**_C.norm_layout())


class Factor(IntEnum):
    """How an optimizer applies the factor of a pass, which decides whether a value is finite."""

    NONE = _C.FACTORS["NONE"]
    TIMES = _C.FACTORS["TIMES"]
    TIMES_RECIPROCAL = _C.FACTORS["TIMES_RECIPROCAL"]  # a float64 one, rounded to float32
    DIVIDE = _C.FACTORS["DIVIDE"]


class Update(NamedTuple):
    """One update of a scale; all tensors are on one device.

    Attributes:
        scale: One-element float32, written in place.
        growth_tracker: One-element int32, written in place.
        found_infs: One-element float32 flags; any that is not 0 counts.
        growth_factor: As for `functional.update_scale_`.
        backoff_factor: As for `functional.update_scale_`.
        growth_interval: As for `functional.update_scale_`.
        state: Counters, history and limits: int64 words, laid out as `state_layout`. Without it
            the rule is torch's.
        norm: One-element float32, the norm of the gradients for the state.
    """

    scale: Tensor
    growth_tracker: Tensor
    found_infs: Sequence[Tensor]
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    state: Tensor | None = None
    norm: Tensor | None = None


class Pass(NamedTuple):
    """One pass over gradients of one device; all tensors are on it.

    Attributes:
        write: Whether values times the factor are written in place; else gradients are only read.
        how: How the factor is applied; a division never writes.
        factor: One-element float32; None with `Factor.NONE`.
        found_inf: One-element float32 that is set to 1 if a value as it is used is inf or NaN; by
            default a new 0-dim tensor.
        accumulate: Whether a `found_inf` that is set stays; else, as for the new one of
            `DeviceKernels`, it is assigned, 0 or 1.
        coefficient: One-element float64 by which the checked and rounded products are multiplied,
            or None.
        sums: float64 of shape (2,) that gets the sum of squares of the products, not rounded to 16
            bits, or quotients, and the largest magnitude as it is used; NaN wins. Or None.
        marks: Overflow counters: int64 of shape (P, MARK_WORDS), for P parameters: the last step
            with an inf or NaN value as it is used, and the number of such steps, the same of NaN,
            and the bits of a float64 to which a pass with sums adds the sum of squares. Or None.
        now: int64 whose first element is the number of completed steps; None without marks.
        factor_copy: 0-dim float32 that gets the factor, or None.
        ending: What the last program of the pass does besides (`gpu.Ending`), or None.
        clip: A clipping, from one row of sums, whose coefficient replaces `coefficient`; its norm
            is written, and nothing else. Or None; kernels know it, torch's ops do not.
    """

    write: bool
    how: Factor
    factor: Tensor | None = None
    found_inf: Tensor | None = None
    accumulate: bool = True
    coefficient: Tensor | None = None
    sums: Tensor | None = None
    marks: Tensor | None = None
    now: Tensor | None = None
    factor_copy: Tensor | None = None
    ending: Any = None
    clip: Clip | None = None


class Track(NamedTuple):
    """Tables of per-parameter tracking, a row for each parameter; csrc/track.h defines the words.

    Attributes:
        marks: As for `Pass`.
        now: As for `Pass`.
    """

    marks: Tensor
    now: Tensor


class Clip(NamedTuple):
    """The norm and coefficient of a clipping; all tensors are on one device.

    Attributes:
        sums: float64 of shape (passes, 2), the sums of each pass.
        max_norm: Limit of the norm.
        largest: Whether the norm is the largest magnitude, else the 2-norm.
        norm: One-element float32 or float64 that gets the norm.
        coefficient: One-element float64 that gets the clip coefficient, at most 1; or None.
        scale: One-element float32, or None.
        divisor: One-element float32 that gets the scale over the coefficient, or None.
        found_inf: One-element float32, the flag of these gradients, or None: where it is 0 and the
            norm too large, it becomes `SPIKE`.
        skip_above: Largest norm of a step that is taken or, with `accepted_norms`, its distance
            from their mean in standard deviations.
        accepted_norms: Norms of the steps that were taken: float64 words, laid out as
            `norm_layout`. A step that is taken joins them.
    """

    sums: Tensor
    max_norm: float
    largest: bool
    norm: Tensor
    coefficient: Tensor | None = None
    scale: Tensor | None = None
    divisor: Tensor | None = None
    found_inf: Tensor | None = None
    skip_above: float = math.inf
    accepted_norms: Tensor | None = None


def clip_to(
    max_norm: float,
    largest: bool,
    skip_above: float = math.inf,
    accepted_norms: Tensor | None = None,
) -> Clip:
    """Limits of a clipping for `clip_over`, which makes the other tensors."""
    tensors = (None,) * 4
    fields = (None, max_norm, largest, None, *tensors, skip_above, accepted_norms)
    return tuple.__new__(Clip, fields)  # without a Python frame
