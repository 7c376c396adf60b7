"""The compiled core: gradient lists, CPU kernels, scale update on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """Raises ImportError unless torch's version equals the build's, but for the patch number.

    C++ classes may differ between minor versions, and some mismatched builds load all the same.
    """
    if built_for.split(".")[:2] != here.split(".")[:2]:
        raise ImportError(
            f"ampfast's compiled core is for torch {built_for}, and this is torch {here}; {_REMEDY}"
        )


try:
    # `from ampfast import _C` would report a circular import if there is no core.
    import ampfast._C as _C
    from ampfast._C import Casts, DeviceTable, GradList, Segment
except ImportError as error:
    raise ImportError(f"ampfast's compiled core cannot be loaded ({error}); {_REMEDY}") from error
_require_torch(_C.build_info()["torch"], torch.__version__)

__all__ = [
    "CPU",
    "CUDA",
    "HEALTH_WORDS",
    "MARK_WORDS",
    "SPIKE",
    "SPIKE_BOUND",
    "WINDOW_BYTES",
    "WITH_CUDA",
    "Casts",
    "Clip",
    "DeviceTable",
    "GradList",
    "Segment",
    "Track",
    "UpdateFactors",
    "any_found",
    "build_info",
    "check_",
    "check_groups",
    "clear_tables",
    "clip_coefficient",
    "clip_groups",
    "cpu_capability",
    "have_same_entries",
    "irregular_casts",
    "is_scalar",
    "lacks_state",
    "lend_grads",
    "list_of",
    "measure_",
    "narrow_",
    "norms",
    "pass_on_device",
    "record",
    "require_storage",
    "stamp_of",
    "state_layout",
    "stepped_pairs",
    "take_grads",
    "unscale_",
    "unscale_groups",
    "update_on_device",
    "update_scale",
    "update_scale_",
    "usual_entry",
    "walk",
    "watch_hooks",
]

# Raw calls of the short way, as in _C.pyi.
watch_hooks = _C.watch_hooks
usual_entry = _C.usual_entry
record = _C.record
unscale_groups = _C.unscale_groups
check_groups = _C.check_groups
clip_groups = _C.clip_groups
any_found = _C.any_found
update_scale = _C.update_scale
pass_on_device = _C.pass_on_device
update_on_device = _C.update_on_device
build_info = _C.build_info
clear_tables = _C.clear_tables
cpu_capability = _C.cpu_capability
walk = _C.walk
# The list of tensors on a device, or of pairs of 16-bit and float32 tensors; None if one of them is
# irregular or of another type, or the tensors of a pair differ in strides.
list_of = _C.GradList.of
# Whether a tensor is a plain one-element tensor of a dtype, as kernels take for a scalar.
is_scalar = _C.is_scalar
# Raises RuntimeError if the memory of a tensor was freed or is too small for it.
require_storage = _C.require_storage
# Parameters whose 16-bit gradients the kernels on these devices cannot cast.
irregular_casts = _C.irregular_casts
# Bytes that change where autograd sees an edit of plain parameters or groups have others; or None.
stamp_of = _C.stamp_of
# Gives the gradients of parameters to a tuple of their master weights, None where there is none.
# None, with nothing done, if a gradient is 16 bit, or a stamp, where one is given, has changed.
lend_grads = _C.lend_grads
# Pairs of the parameters and master weights of which the latter have a gradient, to write the
# former, and the stamp afterwards; None where the kernels cannot take one.
stepped_pairs = _C.stepped_pairs
# Takes the gradients of such a tuple away.
take_grads = _C.take_grads
# Whether two dicts have the keys given after each, and the same objects as values, in order.
have_same_entries = _C.have_same_entries
# Whether a parameter with a gradient lacks an entry of its state.
lacks_state = _C.lacks_state
WINDOW_BYTES: int = _C.WINDOW_BYTES
WITH_CUDA: bool = _C.WITH_CUDA
# Columns of a `Track`.
MARK_WORDS: int = _C.MARK_WORDS
HEALTH_WORDS: int = _C.HEALTH_WORDS

# Words of a scaler's state by name, as in csrc/scale.h.
state_layout = SimpleNamespace(**_C.state_layout())

# The found_inf of a spike, and the bound of such flags after reductions; csrc/scale.h.
SPIKE: float = _C.SPIKE
SPIKE_BOUND: float = _C.SPIKE_BOUND

# Device types with kernels, as bits.
CPU: int = _C.CPU
CUDA: int = _C.CUDA


class Track(NamedTuple):
    """Tables of per-parameter tracking, a row for each parameter; csrc/track.h defines the words.

    Attributes:
        marks: int64 of shape (P, MARK_WORDS) for P parameters: last step with an inf or NaN value,
            as the optimizer uses the gradient, and number of such steps.
        now: int64, its first element the number of completed steps.
        health: int64 of shape (P, HEALTH_WORDS) for `measure_`, or None.
    """

    marks: Tensor
    now: Tensor
    health: Tensor | None


class UpdateFactors(NamedTuple):
    """Factors and interval of the scale update; see `functional.update_scale_`."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int


class Clip(NamedTuple):
    """Arguments of `clip_coefficient`; all tensors are on one device.

    Attributes:
        norms: float64 of shape (lists, 2), a result of `norms` for each list.
        max_norm: Limit of the norm.
        largest: Whether the norm is the largest magnitude, else the 2-norm.
        norm: One-element float32 or float64 that gets the norm.
        coefficient: One-element float64 that gets the clip coefficient, at most 1.
        scale: One-element float32, or None.
        divisor: One-element float32 that gets the scale over the coefficient, or None.
        found_inf: One-element float32, the flag of these gradients, or None: where it is 0 and the
            norm too large, it becomes `SPIKE`.
        skip_above: Largest norm of a step that is taken or, with `taken`, its distance from their
            mean in standard deviations.
        taken: float64 of shape (1 + window,): number of norms of steps that were taken, and ring of
            the last ones; a step that is taken joins it.
    """

    norms: Tensor
    max_norm: float
    largest: bool
    norm: Tensor
    coefficient: Tensor
    scale: Tensor | None = None
    divisor: Tensor | None = None
    found_inf: Tensor | None = None
    skip_above: float = math.inf
    taken: Tensor | None = None


def _marks(track: Track | None) -> tuple[Tensor, Tensor] | None:
    return None if track is None else track[:2]


def unscale_(
    grads: GradList,
    factor: Tensor,
    *,
    is_scale: bool,
    found_inf: Tensor | None = None,
    update: None = None,
    track: Track | None = None,
    coefficient: Tensor | None = None,
    norms: Tensor | None = None,
) -> Tensor:
    """Multiplies gradients in place by an inverse scale and checks that the results are finite.

    The products of 16-bit gradients in pairs (`GradList.of`) are written to the float32 tensors.

    Args:
        grads: Gradients of one device.
        factor: One-element float32 on that device: the inverse scale, or the scale itself.
        is_scale: Whether `factor` is the scale, whose rounded float64 reciprocal is the inverse.
        found_inf: One-element float32 that is set to 1 if a written value is inf or NaN. By default
            a new 0-dim tensor, 0 or 1.
        update: None, since no update rides in a pass on a CPU.
        track: Tables whose `marks` get the overflows of each parameter.
        coefficient: One-element float64 by which the checked and rounded products are multiplied,
            or None.
        norms: float64 of shape (2,) whose second element gets the largest magnitude of the checked
            values, as in `norms`, or None. Its first element is undefined afterwards.

    Returns:
        `found_inf`, or the new tensor.
    """
    return _C.unscale_(grads, factor, is_scale, found_inf, _marks(track), coefficient, norms)


def narrow_(pairs: GradList, found_inf: Tensor | None = None) -> None:
    """Rounds float32 values to the 16-bit tensors that they are paired with, to nearest even.

    Args:
        pairs: A list of nothing but pairs (`GradList.of`).
        found_inf: One-element float32; where it is not 0, nothing is written.
    """
    _C.narrow_(pairs, found_inf)


def norms(
    grads: GradList,
    factor: Tensor,
    *,
    is_scale: bool,
    norms: Tensor,
    track: Track | None = None,
) -> Tensor:
    """Computes norms and checks gradients as `unscale_` would; reads only.

    Args:
        grads: As for `unscale_`.
        factor: As for `unscale_`.
        is_scale: As for `unscale_`.
        norms: float64 of shape (2,) on the device of the gradients. Gets the sum of squares of the
            products, not rounded to 16 bit, and the largest magnitude to be written; NaN wins.
        track: As for `unscale_`.

    Returns:
        A new 0-dim float32 flag, 0 or 1.
    """
    return _C.norms(grads, factor, is_scale, norms, _marks(track))


def measure_(grads: GradList, health: Tensor) -> None:
    """Adds the range of each gradient's values to the row of its parameter; reads only.

    Args:
        grads: As for `unscale_`, before they are unscaled.
        health: Zeroed int64 of shape (P, HEALTH_WORDS), for P parameters on that device.
    """
    _C.measure_(grads, health)


def check_(
    grads: GradList,
    grad_scale: Tensor | None = None,
    *,
    found_inf: Tensor | None = None,
    update: None = None,
    track: Track | None = None,
    norms: Tensor | None = None,
) -> Tensor:
    """Checks that values are finite once divided by `grad_scale`; reads only.

    Arguments and result as for `unscale_`; without `grad_scale` the values themselves are checked.
    """
    return _C.check_(grads, grad_scale, found_inf, _marks(track), norms)


def clip_coefficient(norms: Tensor, *more: Any) -> None:
    """Writes norm, clip coefficient and divisor, and the flag of a spike.

    Formula: torch.nn.utils.clip_grad_norm_, here in float64.

    Args:
        norms: As for `Clip`.
        *more: The other fields of a `Clip`.
    """
    _C.clip_coefficient(*Clip(norms, *more))


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    factors: UpdateFactors,
    state: Tensor | None = None,
    norm: Tensor | None = None,
) -> bool:
    """Writes the next scale and growth tracker in place, and records the step in the state.

    Args:
        scale: One-element float32.
        growth_tracker: One-element int32 on the same device.
        found_infs: One-element float32 flags on that device; any that is not 0 counts.
        factors: Factors and interval of the update.
        state: Counters, history and policy: int64 words on that device, laid out as `state_layout`.
            Without it the policy is torch's.
        norm: One-element float32, the norm of the gradients for the state.

    Returns:
        False, with nothing written, if the kernels do not support the tensors, which are then
        torch's op to take.
    """
    try:
        return _C.update_scale_(scale, growth_tracker, found_infs, *factors, state, norm)
    except TypeError:
        return False
