"""The scaler's kernels for loops that own their state, as custom ops that torch.compile takes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ampfast import backends, clipping, gradients
from ampfast.backends import aten, cpu
from ampfast.distributed import Shards, shards_of

__all__ = ["check_", "grad_norm", "unscale_", "unscale_and_update_", "update_scale_"]


def unscale_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiplies gradients in place and sets `found_inf` if a value written is not finite.

    Args:
        grads: Tensors of any shapes and layouts on one device, of several dtypes if need be. With
            a DTensor among them all ranks of its mesh call this, and `found_inf` is of them all.
        found_inf: One-element float32 on that device; left as it is if all is finite.
        inv_scale: One-element float32 on that device.

    Raises:
        TypeError: If `grads` is not a list or tuple of tensors.
        RuntimeError: If devices, dtypes or shapes are others, or torch refuses a tensor.

    Source: torch's `_amp_foreach_non_finite_check_and_unscale_`.
    """
    _require_scalars(found_inf=found_inf, inv_scale=inv_scale)
    regular = _regular(grads, found_inf, inv_scale)
    if regular is not None:
        kernels, listed = regular
        kernels.unscale_(listed, inv_scale, is_scale=False, found_inf=found_inf)
        return
    checked = _checked(grads, found_inf)
    shards = _shards(checked)
    if shards is None:
        torch.ops.ampfast.unscale_(checked, found_inf, inv_scale)
    else:
        _unscale(shards.tensors, found_inf, inv_scale)
        shards.agree_(found_inf)


def check_(grads: list[Tensor], found_inf: Tensor) -> None:
    """Sets `found_inf` if a value is not finite; reads the gradients only.

    Args:
        grads: As for `unscale_`.
        found_inf: As for `unscale_`.

    Raises:
        TypeError: As `unscale_`.
        RuntimeError: As `unscale_`.
    """
    _require_scalars(found_inf=found_inf)
    regular = _regular(grads, found_inf)
    if regular is not None:
        kernels, listed = regular
        kernels.check_(listed, found_inf=found_inf)
        torch.autograd.graph.increment_version(found_inf)
        return
    checked = _checked(grads, found_inf)
    shards = _shards(checked)
    if shards is None:
        torch.ops.ampfast.check_(checked, found_inf)
    else:
        _check(shards.tensors, found_inf)
        shards.agree_(found_inf)


def grad_norm(
    grads: list[Tensor], norm_type: float = 2.0, inv_scale: Tensor | None = None
) -> Tensor:
    """Returns the total norm of gradients, times an inverse scale if there is one; reads only.

    Args:
        grads: As for `unscale_`.
        norm_type: Above 0; "inf" for the largest magnitude.
        inv_scale: One-element float32 on the device of the gradients, or None.

    Returns:
        A new 0-dim tensor on that device, float32, or float64 if a gradient is.

    Raises:
        TypeError: If `grads` is not a list or tuple of tensors, or `norm_type` no number.
        ValueError: If `norm_type` is out of range.
        RuntimeError: If devices, dtypes or shapes are others, or torch refuses a tensor.
    """
    order = clipping.order_of(norm_type)
    if inv_scale is not None:
        _require_scalars(inv_scale=inv_scale)
    first = grads[0] if isinstance(grads, (list, tuple)) and grads else inv_scale
    place = first if isinstance(first, Tensor) else torch.zeros(())
    checked = _checked(grads, place, "the first")
    shards = _shards(checked)
    if shards is None:
        norm: Tensor = torch.ops.ampfast.grad_norm(checked, order, inv_scale)
        return norm
    return _grad_norm(checked, order, inv_scale, shards)


def update_scale_(
    current_scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> Tensor:
    """Writes the next scale and growth tracker in place.

    Args:
        current_scale: One-element float32.
        growth_tracker: One-element int32 on the same device: iterations since the last change.
        found_inf: One-element float32 on the same device; anything but 0 counts.
        growth_factor: Factor after `growth_interval` iterations, unless the product overflows.
        backoff_factor: Factor if something was found.
        growth_interval: In iterations; below 1 the scale never grows.

    Returns:
        `current_scale`.

    Raises:
        TypeError: If a tensor is none, a factor no float or the interval no int.
        RuntimeError: If devices, dtypes or shapes are others.

    Source: torch's `_amp_update_scale_`; a tracker beyond the interval grows too.
    """
    state = (current_scale, growth_tracker)
    factors = cpu.UpdateFactors(growth_factor, backoff_factor, growth_interval)
    _require_state(*state, found_inf, factors)
    torch.ops.ampfast.update_scale_(*state, found_inf, *factors)
    return current_scale


def unscale_and_update_(
    grads: list[Tensor],
    found_inf: Tensor,
    current_scale: Tensor,
    growth_tracker: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> Tensor:
    """`unscale_` by the reciprocal of the scale, then `update_scale_`, in one pass.

    Args:
        grads: As for `unscale_`; none at all only updates.
        found_inf: As for `unscale_`; what it holds already counts for the update.
        current_scale: As for `update_scale_`.
        growth_tracker: As for `update_scale_`.
        growth_factor: As for `update_scale_`.
        backoff_factor: As for `update_scale_`.
        growth_interval: As for `update_scale_`.

    Returns:
        `current_scale`.

    Raises:
        TypeError: As the two.
        RuntimeError: As the two.
    """
    state = (current_scale, growth_tracker)
    factors = cpu.UpdateFactors(growth_factor, backoff_factor, growth_interval)
    _require_state(*state, found_inf, factors)
    regular = _regular(grads, found_inf, current_scale)
    if regular is not None:
        kernels, listed = regular
        update = kernels.scale_update(*state, [], factors)
        kernels.unscale_(listed, current_scale, is_scale=True, found_inf=found_inf, update=update)
        if update is not None and update.applied:
            update.bump_version()
        else:
            torch.ops.ampfast.update_scale_(*state, found_inf, *factors)
        return current_scale
    checked = _checked(grads, found_inf)
    shards = _shards(checked)
    if shards is None:
        torch.ops.ampfast.unscale_and_update_(checked, found_inf, *state, *factors)
    else:
        _unscale(shards.tensors, found_inf, gradients.inverse(current_scale))
        shards.agree_(found_inf)
        torch.ops.ampfast.update_scale_(*state, found_inf, *factors)
    return current_scale


@torch.library.custom_op("ampfast::unscale_", mutates_args=("grads", "found_inf"))
def _unscale_op(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    _unscale(grads, found_inf, inv_scale)


@torch.library.custom_op("ampfast::check_", mutates_args=("found_inf",))
def _check_op(grads: list[Tensor], found_inf: Tensor) -> None:
    _check(grads, found_inf)


@torch.library.custom_op("ampfast::grad_norm", mutates_args=())
def _grad_norm_op(grads: list[Tensor], norm_type: float, inv_scale: Tensor | None) -> Tensor:
    return _grad_norm(grads, norm_type, inv_scale)


@_grad_norm_op.register_fake
def _grad_norm_fake(grads: list[Tensor], norm_type: float, inv_scale: Tensor | None) -> Tensor:
    place = torch.zeros(()) if inv_scale is None else inv_scale
    wide = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    dtype = torch.float64 if wide else torch.float32
    return (grads[0] if grads else place).new_empty((), dtype=dtype)


@torch.library.custom_op("ampfast::update_scale_", mutates_args=("current_scale", "growth_tracker"))
def _update_scale_op(
    current_scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    state = (current_scale, growth_tracker)
    factors = cpu.UpdateFactors(growth_factor, backoff_factor, growth_interval)
    kernels = backends.choose().kernels_for(current_scale.device)
    if kernels is None or not kernels.update_scale_(*state, [found_inf], factors):
        aten.update_scale_(*state, found_inf, factors)


@torch.library.custom_op(
    "ampfast::unscale_and_update_",
    mutates_args=("grads", "found_inf", "current_scale", "growth_tracker"),
)
def _unscale_and_update_op(
    grads: list[Tensor],
    found_inf: Tensor,
    current_scale: Tensor,
    growth_tracker: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    _unscale(grads, found_inf, gradients.inverse(current_scale))
    _update_scale_op(
        current_scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval
    )


for _op in (_unscale_op, _check_op, _update_scale_op, _unscale_and_update_op):
    _op.register_fake(lambda *args: None)


def _unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    kernels, listed = _listed(grads, found_inf)
    for tensors in listed.set_aside.values():
        aten.unscale_(tensors, inv_scale, found_inf)
    if kernels is not None:
        for regular in listed.lists:
            kernels.unscale_(regular, inv_scale, is_scale=False, found_inf=found_inf)


def _check(grads: list[Tensor], found_inf: Tensor) -> None:
    kernels, listed = _listed(grads, found_inf)
    for tensors in listed.set_aside.values():
        aten.check_(tensors, found_inf)
    if kernels is not None:
        for regular in listed.lists:
            kernels.check_(regular, found_inf=found_inf)


def _grad_norm(
    grads: list[Tensor],
    order: float,
    inv_scale: Tensor | None,
    shards: Shards | None = None,
) -> Tensor:
    place = torch.zeros(()) if inv_scale is None else inv_scale
    tensors, agreement = grads, None
    if shards is not None:
        tensors, agreement = shards.tensors, shards.agreement
    _, listed = _listed(tensors, grads[0] if grads else place)
    if shards is not None:
        listed = replace(listed, parts=shards.parts)
    part = clipping.Part(grads, listed, inv_scale, is_scale=False, writes=False)
    arguments = (order, math.inf, inv_scale, None, agreement)
    return clipping.measure(backends.choose(), [part], *arguments)[0]


def _shards(grads: list[Tensor]) -> Shards | None:
    """What this rank holds of a list in which a gradient is distributed; no op takes that."""
    return None if torch.compiler.is_compiling() else shards_of(grads)


def _listed(
    grads: list[Tensor], place: Tensor
) -> tuple[backends.Kernels | None, gradients.Gradients]:
    device = place.device
    for grad in grads:
        cpu.require_storage(grad)
    kernels = backends.choose().kernels_for(device)
    if kernels is None:
        numbers = {device: list(range(len(grads)))}
        return None, gradients.Gradients([], {device: grads} if grads else {}, numbers)
    return kernels, gradients.of_list(grads, device)


def _regular(
    grads: list[Tensor], found_inf: Tensor, factor: Tensor | None = None
) -> tuple[backends.Kernels, cpu.GradList] | None:
    """What the kernels take at once, or None for the op: it takes all and can be compiled.

    Converting a list for an op takes longer than the kernel for a thousand small tensors.
    """
    if torch.compiler.is_compiling() or not isinstance(grads, (list, tuple)):
        return None
    kernels = backends.choose().kernels_for(found_inf.device)
    if kernels is None or not cpu.is_scalar(found_inf, torch.float32):
        return None
    if factor is not None and not cpu.is_scalar(factor, torch.float32):
        return None
    listed = cpu.list_of(grads, found_inf.device)
    return None if listed is None else (kernels, listed)


def _checked(grads: list[Tensor], place: Tensor, name: str = "found_inf") -> list[Tensor]:
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
        if not torch.compiler.is_compiling():  # what is compiled asks when it runs
            cpu.require_storage(grad)
    return list(grads)


def _require_state(
    current_scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, factors: cpu.UpdateFactors
) -> None:
    _require_scalars(
        int32=("growth_tracker",),
        current_scale=current_scale,
        growth_tracker=growth_tracker,
        found_inf=found_inf,
    )
    for name in ("growth_factor", "backoff_factor"):
        factor = getattr(factors, name)
        if not isinstance(factor, (int, float)):
            raise TypeError(f"{name} must be a float, got {type(factor).__name__}")
    interval = factors.growth_interval
    if not isinstance(interval, (int, torch.SymInt)) or isinstance(interval, bool):
        raise TypeError(f"growth_interval must be an int, got {type(interval).__name__}")


def _require_scalars(int32: tuple[str, ...] = (), **named: Tensor) -> None:
    """Checks one-element tensors, float32 if not said otherwise, on the device of the first."""
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    first = next(iter(named))
    device = named[first].device
    for name, tensor in named.items():
        dtype = torch.int32 if name in int32 else torch.float32
        if tensor.dtype is not dtype or tensor.numel() != 1 or tensor.device != device:
            raise RuntimeError(
                f"{name} must be a one-element {dtype} tensor on the device of {first}, {device}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
