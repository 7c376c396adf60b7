"""`torch.nn.utils.clip_grad_norm_` and its parts, by ampfast's kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from types import FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor

from ampfast import backends
from ampfast.backends import TORCH_OPS, Kernels, core
from ampfast.backends.core import Aim, Clip, Factor, Pass, Use
from ampfast.backends.cuda_graphs import is_capturing
from ampfast.backends.scalars import allocate, moved, widest
from ampfast.clip.global_norm import FUSED_ORDERS
from ampfast.errors import warn_caller
from ampfast.gradients import Turn

# Before patch() gives the names to the functions of this module.
torch_clip_grad_norm_: Any = torch.nn.utils.clip_grad_norm_
torch_get_total_norm: Any = torch.nn.utils.get_total_norm
torch_clip_grads_with_norm_: Any = torch.nn.utils.clip_grads_with_norm_

_USES, _CLIP = [Use.AS_THEY_ARE], Aim.CLIP

# Called with the parameters and the limit of a clip, while the loops of scalers are checked.
on_clip: Callable[[list[Tensor], Any], None] | None = None

_WIDE = torch.float32, torch.float64


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Multiplies gradients in place by min(1, max_norm / (norm + 1e-6)); no host sync.

    `torch.nn.utils.clip_grad_norm_` in two reads and one write; where the coefficient is 1, in one
    read.

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
    if torch.compiler.is_compiling():
        norm: Tensor = torch_clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
        return norm
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not listed and isinstance(parameters, GeneratorType):
        warn_caller("`parameters` is an empty generator, no gradient clipping will occur.")
    given, clipped = _numbers(norm_type, max_norm), None
    order, limit = given or (0.0, 0.0)
    finder, found = (None, None) if given is None else _found(listed)
    dtype = None if found is None or (order == math.inf and _refuses(listed)) else found.dtype
    if finder is not None and found is not None and dtype is not None:
        try:
            if error_if_nonfinite:
                clipped = _clipped_if_finite(found, dtype, order, limit)
            else:
                norm = finder.norm([found], [Turn()], _USES, _CLIP, limit, order, None)
                clipped = norm if dtype in _WIDE else norm.to(dtype)
        except RuntimeError:
            if error_if_nonfinite or not is_capturing():
                raise
    if clipped is None:
        clipped = torch_clip_grad_norm_(listed, max_norm, norm_type, error_if_nonfinite, foreach)
    if on_clip is not None:
        on_clip(listed, max_norm)
    return clipped


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
    given = _numbers(norm_type)
    order = 0.0 if given is None else given[0]
    if not torch.compiler.is_compiling():
        kernels = backends.choose().kernels_for(listed[0].device) if listed else TORCH_OPS
        are_known = given is not None and kernels is not TORCH_OPS
        if are_known and not (order == math.inf and _refuse_largest(listed)):
            grads = core.list_of(listed, listed[0].device)
            if grads is not None:
                wide = grads.has_float64 or dtype is torch.float64
                sums = allocate(torch.empty, 2, dtype=torch.float64, device=grads.device)
                kernels.run(grads, Pass(False, Factor.NONE, sums=sums))
                clip = _clip_of(kernels, sums, math.inf, order, _WIDE[wide])
                norm = clip.norm.to(dtype or grads.dtype)
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
    if torch.compiler.is_compiling():
        torch_clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
        return
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    given = _numbers(2.0, max_norm)
    is_plain = type(total_norm) is Tensor and total_norm.dim() == 0
    is_plain = is_plain and total_norm.is_floating_point()
    is_known = given is not None and is_plain
    _, found = _found(listed) if is_known else (None, None)
    if given is None or found is None or found.dtype is None:
        torch_clip_grads_with_norm_(listed, max_norm, total_norm, foreach)
    else:
        [device] = found.devices
        norm = moved(total_norm.detach(), device).to(widest(device))
        clip = Clip(norm.repeat(1, 2), given[1], True, torch.empty_like(norm))
        found.run(Pass(True, Factor.NONE, clip=clip), None, None, False)
    if on_clip is not None:
        on_clip(listed, max_norm)


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


def _numbers(norm_type: Any, max_norm: Any = math.inf) -> tuple[float, float] | None:
    """Order and limit, if the kernels know them; torch raises for others, in its order."""
    try:
        order, limit = float(norm_type), float(max_norm)
    except Exception:  # whatever a value raises
        return None
    return (order, limit) if order in FUSED_ORDERS and limit >= 0 else None


def _found(params: list[Tensor]) -> tuple[core.Finder, core.Found | None]:
    """The gradients of parameters, about to be written; None if torch's function refuses them."""
    finder = backends.choose().finder
    try:
        return finder, finder.find_in([{"params": params}], True, True)
    except (RuntimeError, AssertionError):
        return finder, None


def _clipped_if_finite(found: core.Found, dtype: torch.dtype, order: float, limit: float) -> Tensor:
    """Norm of gradients, which are clipped; it raises before if it is inf or NaN."""
    _, [sums] = found.run(Pass(False, Factor.NONE), None, None, True)
    [device] = found.devices
    kernels = backends.choose().kernels_for(device)
    clip = _clip_of(kernels, sums, limit, order, _WIDE[dtype is torch.float64])
    norm = clip.norm.to(dtype)
    torch_get_total_norm([norm], order, error_if_nonfinite=True)
    if limit != math.inf:
        found.run(Pass(True, Factor.NONE, clip=clip), None, None, False)
    return norm


def _refuses(params: list[Tensor]) -> bool:
    return _refuse_largest([param.grad for param in params if param.grad is not None])


def _refuse_largest(grads: list[Tensor]) -> bool:
    """Whether the kernels lack a norm: the largest of no values, or of complex ones."""
    return any(grad.numel() == 0 or grad.is_complex() for grad in grads)


def _clip_of(
    kernels: Kernels, sums: Tensor, limit: float, order: float, dtype: torch.dtype
) -> Clip:
    norm = allocate(torch.empty, (), dtype=dtype, device=sums.device)
    clip = Clip(sums.reshape(1, 2), limit, order == math.inf, norm)
    kernels.clip(clip)
    return clip
