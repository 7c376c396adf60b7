"""Kernels as functions: custom ops for unscale, check, norm and scale update; torch's clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ampfast import backends
from ampfast.backends import aten, core
from ampfast.backends.core import Clip, Factor, Pass, Update
from ampfast.backends.scalars import allocate, new_flag
from ampfast.clip import global_norm
from ampfast.clip.torch_functions import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from ampfast.distributed import LocalShards, Ranks

__all__ = [
    "check_",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "grad_norm",
    "unscale_",
    "update_scale_",
]


def unscale_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiplies gradients in place; sets `found_inf` to 1 if a value written is inf or NaN.

    Args:
        grads: Tensors on one device, of any shape, layout and dtype. If one is a DTensor, all ranks
            of its mesh must call this, and `found_inf` is reduced over them.
        found_inf: One-element float32 on that device; unchanged if all values are finite.
        inv_scale: One-element float32 on that device.

    Raises:
        TypeError: If `grads` is not a list or tuple of tensors.
        RuntimeError: If a device, dtype or shape is wrong, or torch's op refuses a tensor.

    Source: torch's `_amp_foreach_non_finite_check_and_unscale_`.
    """
    _require_scalars(found_inf=found_inf, inv_scale=inv_scale)
    _run(torch.ops.ampfast.unscale_, Factor.TIMES, grads, found_inf, inv_scale)


def check_(grads: list[Tensor], found_inf: Tensor) -> None:
    """Sets `found_inf` to 1 if a gradient has an inf or NaN; the gradients are only read.

    Args:
        grads: As for `unscale_`.
        found_inf: As for `unscale_`.

    Raises:
        TypeError: As `unscale_`.
        RuntimeError: As `unscale_`.
    """
    _require_scalars(found_inf=found_inf)
    _run(torch.ops.ampfast.check_, Factor.NONE, grads, found_inf)


def grad_norm(
    grads: list[Tensor], norm_type: float = 2.0, inv_scale: Tensor | None = None
) -> Tensor:
    """Returns the total norm of gradients times an inverse scale; the gradients are only read.

    Args:
        grads: As for `unscale_`.
        norm_type: Order of the norm, above 0; "inf" for the largest magnitude.
        inv_scale: One-element float32 on the device of the gradients; None for 1.

    Returns:
        A new 0-dim tensor on that device, float32, or float64 if a gradient is.

    Raises:
        TypeError: As `unscale_`, or if `norm_type` is not a number.
        ValueError: If `norm_type` is not above 0.
        RuntimeError: As `unscale_`.
    """
    order = global_norm.order_of(norm_type)
    if inv_scale is not None:
        _require_scalars(inv_scale=inv_scale)
    first = grads[0] if isinstance(grads, (list, tuple)) and grads else inv_scale
    place = first if isinstance(first, Tensor) else new_flag(None)
    take = torch.ops.ampfast.grad_norm if _is_traced() else _grad_norm
    norm: Tensor = take(_checked(grads, place, "the first"), order, inv_scale)
    return norm


def update_scale_(
    current_scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> Tensor:
    """Updates the scale and the growth tracker in place.

    Args:
        current_scale: One-element float32.
        growth_tracker: One-element int32 on the same device: finite iterations in a row.
        found_inf: One-element float32 on the same device; the scale backs off unless it is 0.
        growth_factor: Factor of growth; a scale that would overflow stays.
        backoff_factor: Factor of backoff.
        growth_interval: Finite iterations in a row before growth; below 1 for no growth.

    Returns:
        `current_scale`.

    Raises:
        TypeError: If an argument has the wrong type.
        RuntimeError: If a device, dtype or shape is wrong.

    Source: torch's `_amp_update_scale_`; here a tracker beyond the interval grows, too.
    """
    tensors = {"current_scale": current_scale, "growth_tracker": growth_tracker}
    _require_scalars(**tensors, found_inf=found_inf)
    update = torch.ops.ampfast.update_scale_ if _is_traced() else _update_scale
    numbers = growth_factor, backoff_factor, growth_interval
    update(current_scale, growth_tracker, found_inf, *numbers)
    return current_scale


@torch.library.custom_op("ampfast::unscale_", mutates_args=("grads", "found_inf"))
def _unscale_op(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    _pass_over(grads, Pass(True, Factor.TIMES, inv_scale, found_inf))


@torch.library.custom_op("ampfast::check_", mutates_args=("found_inf",))
def _check_op(grads: list[Tensor], found_inf: Tensor) -> None:
    _pass_over(grads, Pass(False, Factor.NONE, None, found_inf))


def _grad_norm(grads: list[Tensor], norm_type: float, inv_scale: Tensor | None) -> Tensor:
    local, shards = _local(grads)
    norm: Tensor = _grad_norm_fake(local, norm_type, inv_scale)
    found = backends.choose().finder.find_over(local, False)
    agreement = shards.ranks.agreement(shards.layouts.values())
    work = Pass(False, Factor.NONE if inv_scale is None else Factor.TIMES, inv_scale)
    term = global_norm.NormTerm(list(grads), found, work, shards)
    sums, _ = global_norm.sums_of([term], norm_type, norm.device, agreement)
    clip = Clip(sums, math.inf, norm_type != 2.0, norm)
    knows = core.is_scalar(norm, norm.dtype) and sums.dtype is torch.float64
    (backends.choose().kernels_for(norm.device) if knows else backends.TORCH_OPS).clip(clip)
    return norm


def _grad_norm_fake(grads: list[Tensor], norm_type: float, inv_scale: Tensor | None) -> Tensor:
    first = new_flag(None) if inv_scale is None else inv_scale
    wide = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    dtype = torch.float64 if wide else torch.float32
    return allocate(torch.empty, (), dtype=dtype, device=[*grads, first][0].device)


def _update_scale(
    current_scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    update = Update(
        current_scale, growth_tracker, [found_inf], growth_factor, backoff_factor, growth_interval
    )
    if not backends.choose().kernels_for(current_scale.device).update(update):
        aten.update(update)


_grad_norm_op = torch.library.custom_op("ampfast::grad_norm", _grad_norm, mutates_args=())
_grad_norm_op.register_fake(_grad_norm_fake)
_written = "current_scale", "growth_tracker"
_update_op = torch.library.custom_op("ampfast::update_scale_", _update_scale, mutates_args=_written)
for _op in (_unscale_op, _check_op, _update_op):
    _op.register_fake(lambda *args: None)


def _is_traced() -> bool:
    """Whether calls are compiled or seen by a dispatch mode, which are to see custom ops."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _pass_over(grads: list[Tensor], work: Pass) -> None:
    found = backends.choose().finder.find_over(grads, work.write)
    found.run(work, None, None, False)


def _run(op: Any, how: Factor, grads: list[Tensor], found_inf: Tensor, *factor: Tensor) -> None:
    """Runs a pass, by a custom op where that is seen; it writes if there is a factor.

    Ranks agree on the flag if a gradient is distributed.
    """
    if _is_traced():
        op(_checked(grads, found_inf), found_inf, *factor)
        return
    by = factor[0].resolve_neg() if factor else None
    work = Pass(bool(factor), how, by, found_inf)
    listed = core.list_of(grads, found_inf.device) if isinstance(grads, (list, tuple)) else None
    kernels = backends.choose().kernels_for(found_inf.device)
    if listed is not None and kernels is not backends.TORCH_OPS:
        kernels.run(listed, work)
    else:
        tensors, shards = _local(_checked(grads, found_inf))
        _pass_over(tensors, work)
        shards.agree_(found_inf)
    if not factor:
        torch.autograd.graph.increment_version(found_inf)


def _checked(grads: list[Tensor], place: Tensor, name: str = "found_inf") -> list[Tensor]:
    """Returns gradients that are tensors on the device of `place`."""
    if not isinstance(grads, (list, tuple)):
        raise TypeError(f"grads must be a list of tensors, got {type(grads).__name__}")
    for index, grad in enumerate(grads):
        if not isinstance(grad, Tensor):
            raise TypeError(f"grads[{index}] must be a tensor, got {type(grad).__name__}")
        if grad.device != place.device:
            raise RuntimeError(
                f"grads must be on the device of {name}, {place.device}, "
                f"got grads[{index}] on {grad.device}"
            )
    return list(grads)


def _local(grads: list[Tensor]) -> tuple[list[Tensor], LocalShards]:
    """Returns gradients as local tensors, and the shards of distributed ones."""
    shards = Ranks().local_shards()
    local = []
    for number, grad in enumerate(grads):
        shard = shards(grad, grad, number)
        local.append(grad if shard is None else shard)
    return local, shards


def _require_scalars(**named: Tensor) -> None:
    """Checks one-element tensors on one device: int32 for the growth tracker, else float32."""
    first = next(iter(named))
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        dtype = torch.int32 if name == "growth_tracker" else torch.float32
        device = named[first].device
        if tensor.dtype is not dtype or tensor.numel() != 1 or tensor.device != device:
            raise RuntimeError(
                f"{name} must be a one-element {dtype} tensor on the device of {first}, {device}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
