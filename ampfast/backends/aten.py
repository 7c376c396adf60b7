"""torch's own ops over lists of tensors: the oracle, and what irregular gradients take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

__all__ = [
    "any_found",
    "check_",
    "coefficient_of",
    "moved",
    "multiply_",
    "norms",
    "p_norm",
    "total_norm",
    "unscale_",
    "update_scale_",
    "widest",
]


@torch.no_grad()
def unscale_(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiplies `grads` in place and sets `found_inf` if a value was not finite or became so.

    Args:
        grads: Tensors of one device, of any dtypes and layouts that torch's op takes.
        inv_scale: One-element float32 on that device.
        found_inf: One-element float32 on that device.

    Raises:
        RuntimeError: What torch's op raises, for instance for a tensor whose elements overlap.
    """
    for same_dtype in _by_dtype(grads):
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, inv_scale)
    # torch's op looks at the values before it multiplies them, so the product may have overflowed.
    check_(grads, found_inf)


@torch.no_grad()
def check_(grads: list[Tensor], found_inf: Tensor, grad_scale: Tensor | None = None) -> None:
    """Sets `found_inf` if a value is not finite, or would not be once divided by `grad_scale`.

    torch's op writes what it reads, so it refuses here what it refuses when it unscales.
    """
    one = torch.ones((), dtype=torch.float32, device=found_inf.device)
    for same_dtype in _by_dtype(grads):
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, one)
    if grad_scale is None:
        return
    for grad in grads:
        # Only plain tensors: what a subclass does to a norm is its own affair.
        if type(grad) is Tensor and grad.numel():
            peak = torch.linalg.vector_norm(grad.detach(), torch.inf)
            # As fused optimizers divide: 16-bit gradients in float32.
            wide = torch.promote_types(grad.dtype, torch.float32)
            quotient = peak.to(wide) / grad_scale.to(wide)
            found_inf.masked_fill_(~quotient.isfinite(), 1.0)


def update_scale_(
    current_scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """torch's `_amp_update_scale_`, except that a tracker beyond a lowered interval grows too."""
    lowered = growth_tracker
    if isinstance(growth_interval, int) and growth_interval >= 1:
        lowered = growth_tracker.clamp(max=growth_interval - 1)
    torch._amp_update_scale_(
        current_scale, lowered, found_inf, growth_factor, backoff_factor, growth_interval
    )
    if lowered is not growth_tracker:
        growth_tracker.data.copy_(lowered)


@torch.no_grad()
def norms(grads: list[Tensor], inv_scale: Tensor | None = None) -> Tensor:
    """Returns the sum of squares and the largest magnitude of what unscaling would write.

    Args:
        grads: Tensors of one device.
        inv_scale: One-element float32 on that device, or None if they are unscaled.

    Returns:
        Two elements, float64 where the device has it.
    """
    device = grads[0].device
    wide = widest(device)
    squares, peak = torch.zeros(2, dtype=wide, device=device).unbind()
    for grad in grads:
        if not grad.numel():
            continue
        norm, largest = p_norm([grad], 2.0), p_norm([grad], torch.inf)
        if inv_scale is not None:
            norm = norm * inv_scale
            # Rounded as a product that is written.
            dtype = grad.dtype.to_real()
            opmath = torch.promote_types(dtype, torch.float32)
            largest = (largest.to(opmath) * inv_scale.to(opmath)).abs().to(dtype)
        squares = squares + norm.square()
        peak = torch.maximum(peak, largest.to(wide))
    return torch.stack([squares, peak])


@torch.no_grad()
def p_norm(grads: list[Tensor], order: float) -> Tensor:
    """Returns the norm of all elements of tensors, at least one, on one device.

    It is taken and returned in the widest type that the device has.
    """
    of_each = []
    for grad in grads:
        # The maximum is exact in any type.
        dtype = None if order == torch.inf else widest(grad.device, grad.is_complex())
        norm = torch.linalg.vector_norm(grad.detach(), order, dtype=dtype)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()  # of a distributed tensor
        elif type(norm) is not Tensor:
            norm = torch.tensor(norm.item(), device=grad.device)  # of a subclass that is unknown
        of_each.append(norm.to(widest(grad.device)))
    if len(of_each) == 1:
        return of_each[0]
    return torch.linalg.vector_norm(torch.stack(of_each), order)


@torch.no_grad()
def multiply_(grads: list[Tensor], coefficient: Tensor) -> None:
    """Multiplies tensors in place by a one-element tensor, 16-bit ones in float32."""
    for grad in grads:
        opmath = torch.promote_types(grad.dtype, torch.float32)
        grad.copy_(grad.to(opmath) * coefficient.reshape(()).to(opmath))


@torch.no_grad()
def total_norm(rows: Tensor, largest: bool) -> Tensor:
    """Returns the norm of which each row holds a sum of squares and a largest magnitude."""
    squares, peaks = rows.unbind(1)
    return peaks.amax() if largest else squares.sum().sqrt()


@torch.no_grad()
def coefficient_of(norm: Tensor, max_norm: float) -> Tensor:
    """Returns what gradients of this norm are multiplied by, at most 1."""
    wide = norm.to(widest(norm.device))
    # A number over a tensor would be its reciprocal times the number, rounded twice.
    return (torch.full_like(wide, max_norm) / (wide + 1e-6)).clamp(max=1.0)


def widest(device: torch.device, is_complex: bool = False) -> torch.dtype:
    """The widest floating point type that a device has."""
    if device.type == "mps":
        return torch.complex64 if is_complex else torch.float32
    return torch.complex128 if is_complex else torch.float64


def any_found(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns one new 0-dim float32 flag on `device`: 1 if any of `flags` is not 0, else 0."""
    found = torch.zeros((), dtype=torch.float32, device=device)
    for flag in flags:
        found.masked_fill_(moved(flag, device).reshape(()) != 0, 1.0)
    return found


def moved(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """Returns a scalar on `device`; without waiting, except where the CPU will read it."""
    return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)


def _by_dtype(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields what torch's op takes at once, first what it will refuse: then nothing is written."""
    groups: dict[tuple[bool, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((not _is_refused(grad), grad.dtype), []).append(grad)
    for key in sorted(groups, key=lambda key: key[0]):
        yield groups[key]


def _is_refused(grad: Tensor) -> bool:
    if not grad.is_floating_point() or grad.layout is not torch.strided:
        return True
    return type(grad) is Tensor and torch._debug_has_internal_overlap(grad) == 1
