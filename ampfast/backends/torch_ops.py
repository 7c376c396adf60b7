"""torch's own ops over lists of tensors: the reference, and the path of irregular gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ampfast.backends.core import (
    CLIP_EPSILON,
    LEAST_DEVIATION,
    SPIKE,
    Clip,
    Factor,
    Pass,
    compiled,
    norm_layout,
)
from ampfast.backends.scalars import inverse, moved, new_flag, widest
from ampfast.capture import refuse_capture
from ampfast.errors import add_note


@dataclass(frozen=True)
class TensorList:
    """Gradients of one device for torch's ops: sparse, overlapping, subclasses, complex and others.

    Attributes:
        device: The device.
        tensors: The gradients.
        numbers: Number of the parameter of each.
    """

    device: torch.device
    tensors: list[Tensor]
    numbers: list[int]

    @property
    def has_float64(self) -> bool:
        return any(tensor.dtype in (torch.float64, torch.complex128) for tensor in self.tensors)

    @property
    def chunks(self) -> int:
        return len(self.tensors)

    def add(self, number: int, tensor: Tensor) -> None:
        self.numbers.append(number)
        self.tensors.append(tensor)

    def split(self, numbers: set[int]) -> tuple[TensorList, TensorList]:
        """Splits the list into the gradients of the parameters of these numbers, and the others."""
        inside, outside = TensorList(self.device, [], []), TensorList(self.device, [], [])
        for number, tensor in zip(self.numbers, self.tensors, strict=True):
            (inside if number in numbers else outside).add(number, tensor)
        return inside, outside


def pass_over(*given: Any) -> None:
    """Leaves a pass over an optimizer's gradients to a walk that sorts them."""


clip_over = pass_over


@torch.no_grad()
def run(grads: TensorList, work: Pass) -> Tensor:
    """Runs a pass over a list; returns its found_inf. No update rides in it."""
    tensors, divisor = grads.tensors, work.factor if work.how is Factor.DIVIDE else None
    found_inf = new_flag(grads.device) if work.found_inf is None else work.found_inf
    inv_scale = None if divisor is not None else work.factor
    if inv_scale is not None and work.how is Factor.TIMES_RECIPROCAL:
        inv_scale = inverse(inv_scale)
    if work.coefficient is not None:
        if inv_scale is not None:
            unscale_(tensors, inv_scale, new_flag(grads.device))
        for grad in tensors:
            grad.copy_(_product(grad, work.coefficient))
        return found_inf
    if work.sums is not None:
        # Before they are written, for products that are not rounded to 16 bits.
        row = norms(tensors, inv_scale)
        work.sums.copy_(row if divisor is None else row / divisor.detach().reshape(()))
    if work.write and inv_scale is not None:
        unscale_(tensors, inv_scale, found_inf)
        inv_scale = None
    elif work.sums is None or divisor is not None:
        check_(tensors, found_inf, divisor)
    if work.sums is not None:
        found_inf.masked_fill_(~work.sums[1].isfinite(), 1.0)
    if work.marks is not None and work.now is not None:
        used = divisor if inv_scale is None else inv_scale.reciprocal()
        mark_(work.marks, work.now, grads, used)
    return found_inf


def update(fields: tuple[Any, ...]) -> bool:
    """torch's `_amp_update_scale_`, except that a tracker beyond a lowered interval grows, too.

    The core writes a state from copies on the host: with a sync, unless it is on the CPU.
    """
    scale, growth_tracker, flags, growth_factor, backoff_factor, interval, state, norm = fields
    # It requires a gradient if a checkpoint's tensor that does was loaded into it.
    growth_tracker = growth_tracker.detach()
    if state is not None and state.is_cuda:
        refuse_capture("an update without kernels, whose steps the host counts")
    first, *others = [moved(flag, scale.device) for flag in flags]
    # Out of place, since callers may hold the flags.
    found_inf = sum(others, start=first)
    before = scale.detach().clone(), growth_tracker.clone()
    lowered = growth_tracker
    if isinstance(interval, int) and interval >= 1:
        lowered = growth_tracker.clamp(max=min(interval - 1, 2**31 - 1))
    torch._amp_update_scale_(scale, lowered, found_inf, growth_factor, backoff_factor, interval)
    growth_tracker.data.copy_(lowered)
    if state is None:
        return True
    # Copies are plain tensors under any mode.
    with _disable_current_modes():
        after, tracker, flag, words = (t.to("cpu") for t in (*before, found_inf, state))
        told = None if norm is None else norm.to("cpu")
        numbers = float(growth_factor), float(backoff_factor), int(interval)
        if compiled.update((after, tracker, [flag], *numbers, words, told)):
            scale.data.copy_(after)
            growth_tracker.data.copy_(tracker)
            state.copy_(words)
    return True


@torch.no_grad()
def clip(clip: Clip) -> None:
    """Writes norm, clip coefficient and divisor, and the flag of a spike."""
    squares, peaks = clip.sums.unbind(1)
    clip.norm.copy_(peaks.amax() if clip.largest else squares.sum().sqrt())
    if clip.found_inf is not None:
        spike_(clip.found_inf, clip.norm, clip.skip_above, clip.accepted_norms)
    wide = clip.norm.to(widest(clip.norm.device))
    if clip.max_norm > torch.finfo(wide.dtype).max:
        coefficient = torch.ones_like(wide)  # inf / inf would be NaN
    else:
        # A number over a tensor would be a reciprocal and a product, rounded twice.
        coefficient = (torch.full_like(wide, clip.max_norm) / (wide + CLIP_EPSILON)).clamp(max=1.0)
    if clip.coefficient is not None:
        clip.coefficient.copy_(coefficient)
    if clip.divisor is not None and clip.scale is not None:
        scale = clip.scale.detach().reshape(())
        clip.divisor.copy_(scale / moved(coefficient, scale.device))


def unscale_(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Unscales gradients in place; sets `found_inf` if a value was or becomes inf or NaN.

    Args:
        grads: Tensors of one device, of dtypes and layouts that torch's op takes.
        inv_scale: One-element float32 on that device.
        found_inf: One-element float32 on that device.

    Raises:
        RuntimeError: Errors of torch's op, such as for overlapping elements.
    """
    if len(grads) > 1:  # torch's op refuses a tensor before it writes it
        require_unscalable(grads)
    for same_dtype in _by_dtype(grads):
        _check_and_unscale_(same_dtype, found_inf, inv_scale)
    # torch's op checks values before it multiplies them: a product may have overflowed.
    check_(grads, found_inf)


def _check_and_unscale_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """torch's op over tensors of one dtype, whose error of complex ones gets a note."""
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    except RuntimeError as error:
        if grads[0].is_complex():
            add_note(
                error,
                f"A gradient is complex, of dtype {grads[0].dtype}, and torch cannot unscale it. "
                "Train a real parameter and use its torch.view_as_complex, or step the complex "
                "ones by an optimizer of their own, without the scaler.",
            )
        raise


@torch.no_grad()
def narrow(params: list[Tensor], masters: list[Tensor], found_inf: Tensor | None = None) -> None:
    """Rounds float32 tensors to 16-bit ones, unless a flag is set; no host sync.

    Args:
        params: 16-bit tensors of one device.
        masters: float32 tensors of their shapes.
        found_inf: One-element float32 on that device, or None.
    """
    values = masters
    if found_inf is not None:
        kept = found_inf.reshape(()) != 0
        pairs = zip(params, masters, strict=True)
        values = [torch.where(kept, param, master.to(param.dtype)) for param, master in pairs]
    torch._foreach_copy_(params, values)


@torch.no_grad()
def require_unscalable(grads: list[Tensor]) -> None:
    """Raises torch's error for the first of `grads` that its op refuses; no value changes.

    Args:
        grads: Tensors of one device.
    """
    one = torch.ones((), dtype=torch.float32, device=grads[0].device)
    for same_dtype in _by_dtype(grads):
        if type(same_dtype[0]) is Tensor and not _is_refused(same_dtype[0]):
            # For plain tensors it depends on the dtype alone.
            same_dtype = [same_dtype[0].new_empty(0)]
        _check_and_unscale_(same_dtype, torch.zeros_like(one), one)


@torch.no_grad()
def check_(grads: list[Tensor], found_inf: Tensor, grad_scale: Tensor | None = None) -> None:
    """Sets `found_inf` if a value is inf or NaN, or would be once divided by `grad_scale`.

    torch's op writes as it checks, so it refuses the same gradients as in unscaling.
    """
    one = torch.ones((), dtype=torch.float32, device=found_inf.device)
    for same_dtype in _by_dtype(grads):
        _check_and_unscale_(same_dtype, found_inf, one)
    if grad_scale is None:
        return
    for grad in grads:
        # Only plain tensors: subclasses define their own norms.
        if type(grad) is Tensor and grad.numel():
            found_inf.masked_fill_(~_largest_used(grad, grad_scale).isfinite(), 1.0)


@torch.no_grad()
def norms(grads: list[Tensor], inv_scale: Tensor | None = None) -> Tensor:
    """Returns sum of squares and largest magnitude of the gradients as unscaling would write them.

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
        norm, largest = p_norm(grad, 2.0), p_norm(grad, torch.inf)
        if inv_scale is not None:
            # Rounded as when written.
            dtype = grad.dtype.to_real()
            largest = _product(largest.to(dtype), inv_scale).abs().to(dtype)
            # An overflowed norm times the inverse of an infinite scale would be NaN.
            factor = inv_scale.reshape(())
            norm = torch.where(factor == 0, largest.to(wide), norm * factor)
        squares = squares + norm.square()
        peak = torch.maximum(peak, largest.to(wide))
    return torch.stack([squares, peak])


@torch.no_grad()
def p_norm(grad: Tensor, order: float, inv_scale: Tensor | None = None) -> Tensor:
    """Returns the norm of a tensor times an inverse scale, in the widest dtype of its device.

    Products are not rounded to 16 bit.
    """
    values = grad.detach() if inv_scale is None else _product(grad, inv_scale)
    # The maximum is exact in any dtype.
    dtype = None if order == torch.inf else widest(grad.device, grad.is_complex())
    norm: Tensor = torch.linalg.vector_norm(values, order, dtype=dtype)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()  # of a DTensor
    elif type(norm) is not Tensor:
        norm = torch.tensor(norm.item(), device=grad.device)  # of an unknown subclass
    return norm.to(widest(grad.device))


@torch.no_grad()
def require_writable(grads: list[Tensor]) -> None:
    """Raises the error of clipping for tensors made in inference mode, before any write."""
    for grad in grads:
        grad.copy_(grad)  # writes nothing


def spike_(
    found_inf: Tensor, norm: Tensor, skip_above: float, accepted_norms: Tensor | None
) -> None:
    """Turns a flag of 0 into that of a spike if the norm is one; no host sync.

    The rule is that of csrc/scale.h.

    Args:
        found_inf: 0-dim float32 on the device of the norm.
        norm: 0-dim.
        skip_above: As for `Clip`.
        accepted_norms: As for `Clip`, but of any floating-point dtype.
    """
    is_finite, norm = found_inf == 0, norm.float()
    if accepted_norms is None:
        spiked = ~(norm <= skip_above)
    else:
        count, spikes, patience, restarts = accepted_norms[: norm_layout.RING].unbind()
        ring = accepted_norms[norm_layout.RING :]
        is_usable = is_finite & (norm > 0) & norm.isfinite()
        std, mean = torch.std_mean(ring)
        limit = mean + skip_above * torch.maximum(std, LEAST_DEVIATION * mean)
        is_above = (count >= ring.numel()) & ~(norm <= limit)
        restarted = is_above & is_usable & (spikes >= patience)
        spiked = is_above & ~restarted
        is_taken = is_usable & ~spiked
        count.masked_fill_(restarted, 0)
        place = torch.arange(ring.numel(), device=ring.device) == count % ring.numel()
        ring.copy_(torch.where(place & is_taken, norm.to(ring.dtype), ring))
        count.add_(is_taken)
        spikes.add_(is_usable & spiked).masked_fill_(is_taken, 0)
        restarts.add_(restarted)
    found_inf.masked_fill_(is_finite & spiked, SPIKE)


def mark_(marks: Tensor, now: Tensor, grads: TensorList, grad_scale: Tensor | None = None) -> None:
    """Marks the parameters with inf/NaN gradients; no host sync.

    Args:
        marks: As for `Pass`.
        now: As for `Pass`.
        grads: Unscaled gradients, or with `grad_scale` scaled ones.
        grad_scale: One-element float32, or None.
    """
    pairs = zip(grads.numbers, grads.tensors, strict=True)
    local = [(number, part) for number, grad in pairs if (part := _local(grad)).numel()]
    if not local:
        return
    used = [_largest_used(part, grad_scale) for _, part in local]
    found = torch.stack([torch.stack([~u.isfinite(), u.isnan()]) for u in used])
    rows = [marks[number] for number, _ in local]
    step = now.reshape(-1)[0] + 1
    last, times = torch.stack(rows).split(2, dim=1)
    # Counts once per step, in any number of passes.
    marked = [torch.where(found, step, last), times + (found & (last < step))]
    torch._foreach_copy_(rows, list(torch.cat(marked, dim=1).unbind()))


def _local(grad: Tensor) -> Tensor:
    """Values of a gradient on this rank: the shard of a DTensor, none of other subclasses."""
    local = grad.to_local() if hasattr(grad, "to_local") else grad
    if type(local) is not Tensor:
        return torch.empty(0)
    return torch.view_as_real(local.resolve_conj()) if local.is_complex() else local.detach()


def _product(grad: Tensor, inv_scale: Tensor) -> Tensor:
    """Unscaled values in opmath, before they are rounded to their dtype."""
    opmath = torch.promote_types(grad.dtype, torch.float32)
    return grad.detach().to(opmath) * inv_scale.reshape(()).to(opmath)


def _largest_used(grad: Tensor, grad_scale: Tensor | None) -> Tensor:
    """Largest magnitude, divided as in fused optimizers: 16-bit gradients in float32."""
    peak: Tensor = torch.linalg.vector_norm(grad.detach(), torch.inf)
    if grad_scale is None:
        return peak
    wide = torch.promote_types(grad.dtype, torch.float32)
    return peak.to(wide) / grad_scale.to(wide)


def _by_dtype(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields lists that torch's op takes at once, first those it refuses, before any write."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for grad in grads:
        mesh = getattr(grad, "device_mesh", None)  # DTensors one at a time
        key = (not _is_refused(grad), grad.dtype, type(grad), id(mesh))
        groups.setdefault(key, []).append(grad)
    for key in sorted(groups, key=lambda key: key[0]):
        yield groups[key]


def _is_refused(grad: Tensor) -> bool:
    if grad.is_nested or grad.layout is not torch.strided:
        return True
    if grad.is_neg() or not grad.is_floating_point():
        return True
    return type(grad) is Tensor and torch._debug_has_internal_overlap(grad) == 1
