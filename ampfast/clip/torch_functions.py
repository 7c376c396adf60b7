"""`torch.nn.utils.clip_grad_norm_` and its parts, by ampfast's kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from types import FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor

from ampfast import backends
from ampfast.backends import core
from ampfast.backends.core import Aim, Clip, Factor, Pass, Use
from ampfast.backends.scalars import moved, widest
from ampfast.clip.global_norm import FUSED_ORDERS
from ampfast.errors import warn_caller
from ampfast.gradients import Turn, grads_of

# Before patch() gives the names to the functions of this module.
torch_clip_grad_norm_: Any = torch.nn.utils.clip_grad_norm_
torch_get_total_norm: Any = torch.nn.utils.get_total_norm
torch_clip_grads_with_norm_: Any = torch.nn.utils.clip_grads_with_norm_

_USES, _CLIP = [Use.AS_THEY_ARE], Aim.CLIP


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Multiplies gradients in place by min(1, max_norm / (norm + 1e-6)); no host sync.

    `torch.nn.utils.clip_grad_norm_` in two reads and one write; where the coefficient is 1, in one
    read. `error_if_nonfinite` takes one more.

    torch's function itself takes gradients on several devices, sparse or overlapping ones,
    DTensors, other subclasses and other orders, and compiled code.

    Args:
        parameters: A tensor or an iterable of them; those without gradient are left out.
        max_norm: Limit of the norm; infinity leaves the gradients.
        norm_type: Order of the norm; the kernels know 2 and infinity.
        error_if_nonfinite: Whether to raise if the norm is inf or NaN, with a host sync.
        foreach: As for torch's function; the kernels need no choice.

    Returns:
        The norm before clipping: a new 0-dim tensor of the dtype to which the gradients' dtypes
        promote, on their device. On GPUs squares are summed as by `GradScaler.clip_grad_norm_`.

    Raises:
        RuntimeError: If the norm is not finite and `error_if_nonfinite` is set; else as torch's.

    Source: torch.nn.utils.clip_grad_norm_, whose coefficient is here computed in float64.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not listed and isinstance(parameters, GeneratorType):
        warn_caller("`parameters` is an empty generator, no gradient clipping will occur.")
    order, limit = _numbers(norm_type, max_norm)
    known = _known(listed, order)
    norm: Tensor
    if known is None:
        norm = torch_clip_grad_norm_(listed, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm
    finder, found, dtype = known
    if error_if_nonfinite:  # before anything is written
        get_total_norm(grads_of(listed), norm_type, error_if_nonfinite)
    norm = finder.norm([found], [Turn()], _USES, _CLIP, limit, order, None)
    return norm if norm.dtype is dtype else norm.to(dtype)


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the norm of tensors, as of one vector; they are only read; no host sync.

    `torch.nn.utils.get_total_norm`, which takes what the kernels do not.

    Args:
        tensors: A tensor or an iterable of them.
        norm_type: As for `clip_grad_norm_`.
        error_if_nonfinite: As for `clip_grad_norm_`.
        foreach: As for `clip_grad_norm_`.
        dtype: dtype of the norm, to which torch's function converts the tensors first; of None,
            the one to which the tensors' dtypes promote.

    Returns:
        As `clip_grad_norm_`.

    Raises:
        RuntimeError: As `clip_grad_norm_`.
    """
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    order, _ = _numbers(norm_type)
    known = _known(listed, order, are_params=False)
    # The kernels round the norm of 16-bit values to float32.
    if known is not None and dtype in (None, torch.float32, known[2]):
        finder, found, given = known
        norm = finder.norm([found], [Turn()], _USES, Aim.MEASURE, math.inf, order, None)
        norm = norm.to(dtype or given)
        if error_if_nonfinite:
            torch_get_total_norm([norm], norm_type, error_if_nonfinite=True)
        return norm
    if dtype is not None:
        complex_dtype = torch.promote_types(dtype, torch.complex32)
        listed = [t.to(complex_dtype if t.is_complex() else dtype) for t in listed]
    by_torch: Tensor = torch_get_total_norm(listed, norm_type, error_if_nonfinite, foreach)
    return by_torch if dtype is None else by_torch.to(dtype)


def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Multiplies gradients in place by min(1, max_norm / (total_norm + 1e-6)); no host sync.

    `torch.nn.utils.clip_grads_with_norm_`, which takes what the kernels do not. Where the
    coefficient is 1, nothing is read or written.

    Args:
        parameters: As for `clip_grad_norm_`.
        max_norm: As for `clip_grad_norm_`.
        total_norm: 0-dim, the norm of the gradients.
        foreach: As for `clip_grad_norm_`.

    Raises:
        RuntimeError: As torch's.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    order, limit = _numbers(2.0, max_norm)
    is_plain = type(total_norm) is Tensor and total_norm.dim() == 0
    is_plain = is_plain and total_norm.is_floating_point()
    known = _known(listed, order) if is_plain else None
    if known is None:
        torch_clip_grads_with_norm_(listed, max_norm, total_norm, foreach)
    else:
        _, found, _ = known
        [device] = found.devices
        norm = moved(total_norm.detach(), device).to(widest(device))
        coefficient = torch.empty_like(norm)
        clip = Clip(norm.repeat(1, 2), limit, True, torch.empty_like(norm), coefficient)
        backends.choose().kernels_for(device).clip(clip)
        found.run(Pass(True, Factor.NONE, coefficient=coefficient), None, None, False)


def _stand_in(ours: Any) -> Any:
    """The same for torch's name: `unpatch()` must tell that from a name for ampfast's own."""
    made: Any = FunctionType(ours.__code__, globals(), ours.__name__, ours.__defaults__)
    made.__kwdefaults__ = ours.__kwdefaults__
    functools.update_wrapper(made, ours)
    made.__qualname__ = f"stand_in_{ours.__name__}"  # where pickle finds it
    return made


stand_in_clip_grad_norm_ = _stand_in(clip_grad_norm_)
stand_in_get_total_norm = _stand_in(get_total_norm)
stand_in_clip_grads_with_norm_ = _stand_in(clip_grads_with_norm_)


def _numbers(norm_type: Any, max_norm: Any = math.inf) -> tuple[float, float]:
    """Order and limit; an order of 0 for torch's function, which raises if one is no number."""
    if torch.compiler.is_compiling():
        return 0.0, 0.0
    try:
        order, limit = float(norm_type), float(max_norm)
    except Exception:  # whatever a value raises
        return 0.0, 0.0
    return (order if limit >= 0 else 0.0), limit


def _known(
    tensors: list[Tensor], order: float, are_params: bool = True
) -> tuple[core.Finder, core.Found, torch.dtype] | None:
    """Finds tensors, or gradients of parameters about to be written, if kernels take their norm.

    With the finder, and the dtype of torch's norm. None if torch's function takes it.
    """
    if order not in FUSED_ORDERS:
        return None
    finder = backends.choose().finder
    try:
        if are_params:
            found = finder.find_in([{"params": tensors}], True, True)
        else:
            found = finder.find_over(tensors, False)
    except (RuntimeError, AssertionError):
        return None
    dtype = found.dtype
    # They lack the largest magnitude of no values, and of complex ones.
    lacks_norm = order == math.inf and any(t.numel() == 0 or t.is_complex() for t in tensors)
    return None if dtype is None or lacks_norm else (finder, found, dtype)
