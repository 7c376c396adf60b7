"""torch's own ops over lists of tensors: the reference, and the path of irregular gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ampfast.backends import cpu
from ampfast.backends.cpu import Track, UpdateFactors
from ampfast.errors import refuse_capture

__all__ = [
    "any_found",
    "check_",
    "coefficient_of",
    "copy_to_host_async",
    "float_of",
    "joint_flag",
    "largest",
    "mark_",
    "measure_",
    "moved",
    "multiply_",
    "narrow_",
    "norms",
    "p_norm",
    "require_unscalable",
    "require_writable",
    "spike_",
    "total_norm",
    "unscale_",
    "update_scale_",
    "widest",
    "word_of",
]

_MAGNITUDE = 2**63 - 1
# As float64 bits: float16's smallest subnormal and normal, its largest.
_RANGE = (0x3E70000000000000, 0x3F10000000000000, 0x40EFFC0000000000)
_LARGEST_INT32 = 2**31 - 1
# Elements measured at a time, a bound on temporaries.
_PART = 2**22


@torch.no_grad()
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
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, inv_scale)
    # torch's op checks values before it multiplies them: a product may have overflowed.
    check_(grads, found_inf)


@torch.no_grad()
def narrow_(params: list[Tensor], masters: list[Tensor], found_inf: Tensor | None = None) -> None:
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
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, torch.zeros_like(one), one)


@torch.no_grad()
def check_(grads: list[Tensor], found_inf: Tensor, grad_scale: Tensor | None = None) -> None:
    """Sets `found_inf` if a value is inf or NaN, or would be once divided by `grad_scale`.

    torch's op writes as it checks, so it refuses the same gradients as in unscaling.
    """
    one = torch.ones((), dtype=torch.float32, device=found_inf.device)
    for same_dtype in _by_dtype(grads):
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, one)
    if grad_scale is None:
        return
    for grad in grads:
        # Only plain tensors: subclasses define their own norms.
        if type(grad) is Tensor and grad.numel():
            found_inf.masked_fill_(~_largest_used(grad, grad_scale).isfinite(), 1.0)


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    factors: UpdateFactors,
    state: Tensor | None = None,
    norm: Tensor | None = None,
) -> None:
    """torch's `_amp_update_scale_`, except that a tracker beyond a lowered interval grows, too.

    The core writes a `state` from copies on the host: with a sync, unless it is on the CPU.
    """
    if state is not None and state.is_cuda:
        refuse_capture("an update without kernels, whose steps the host counts")
    # It requires a gradient if a checkpoint's tensor that does was loaded into it.
    growth_tracker = growth_tracker.detach()
    before = scale.detach().clone(), growth_tracker.clone()
    interval, lowered = factors.growth_interval, growth_tracker
    if isinstance(interval, int) and interval >= 1:
        lowered = growth_tracker.clamp(max=min(interval - 1, _LARGEST_INT32))
    torch._amp_update_scale_(scale, lowered, found_inf, *factors)
    growth_tracker.data.copy_(lowered)
    if state is None:
        return
    # Copies are plain tensors under any mode.
    with _disable_current_modes():
        after, tracker, flag, words = (t.to("cpu") for t in (*before, found_inf, state))
        told = None if norm is None else norm.to("cpu")
        if cpu.update_scale_(after, tracker, [flag], factors, words, told):
            scale.data.copy_(after)
            growth_tracker.data.copy_(tracker)
            state.copy_(words)


def float_of(word: Tensor) -> Tensor:
    """Returns the float32 values of bits in int64 words."""
    return word.to(torch.int32).view(torch.float32)


def word_of(value: Tensor) -> Tensor:
    """Returns the bits of float32 values as int64 words."""
    return value.float().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


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
    """Raises `multiply_`'s error for tensors made in inference mode, before any write."""
    for grad in grads:
        grad.copy_(grad)  # writes nothing


@torch.no_grad()
def multiply_(grads: list[Tensor], coefficient: Tensor) -> None:
    """Multiplies tensors in place by a one-element tensor, 16-bit ones in float32."""
    for grad in grads:
        opmath = torch.promote_types(grad.dtype, torch.float32)
        grad.copy_(grad.to(opmath) * coefficient.reshape(()).to(opmath))


@torch.no_grad()
def total_norm(rows: Tensor, largest: bool) -> Tensor:
    """Returns the global norm from rows of sum of squares and largest magnitude."""
    squares, peaks = rows.unbind(1)
    return peaks.amax() if largest else squares.sum().sqrt()


@torch.no_grad()
def coefficient_of(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the clip coefficient of a norm, at most 1."""
    wide = norm.to(widest(norm.device))
    if max_norm > torch.finfo(wide.dtype).max:
        return torch.ones_like(wide)  # inf / inf would be NaN
    # A number over a tensor would be a reciprocal and a product, rounded twice.
    return (torch.full_like(wide, max_norm) / (wide + 1e-6)).clamp(max=1.0)


def widest(device: torch.device, is_complex: bool = False) -> torch.dtype:
    """Widest floating point dtype of a device."""
    if device.type == "mps":
        return torch.complex64 if is_complex else torch.float32
    return torch.complex128 if is_complex else torch.float64


def any_found(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns a new 0-dim float32 flag on `device`: 1 if any of `flags` is not 0, else 0."""
    found = torch.zeros((), dtype=torch.float32, device=device)
    for flag in flags:
        found.masked_fill_(moved(flag, device).reshape(()) != 0, 1.0)
    return found


def joint_flag(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns a new flag as `any_found`, but `cpu.SPIKE` if all that are not 0 are spikes'."""
    joint = torch.zeros((), dtype=torch.float32, device=device)
    for flag in flags:
        here = moved(flag, device).reshape(()).abs()
        # The comparison is false for NaN.
        here = torch.where(here < cpu.SPIKE_BOUND, here.clamp(max=cpu.SPIKE), 1.0)
        joint = torch.maximum(joint, here)
    return joint


def largest(values: list[Tensor], device: torch.device) -> Tensor:
    """Returns the largest of non-negative scalars, 0 if there is none, in its widest dtype."""
    here = [moved(value, device).reshape(()) for value in values]
    if len(here) == 1:
        return here[0]
    none = torch.zeros((), dtype=widest(device), device=device)
    return torch.stack([none, *here]).amax()


@torch.no_grad()
def spike_(found_inf: Tensor, norm: Tensor, skip_above: float, taken: Tensor | None) -> None:
    """Turns a flag of 0 into that of a spike if the norm is too large; no host sync.

    Args:
        found_inf: 0-dim float32 on the device of the norm.
        norm: 0-dim.
        skip_above: As for `cpu.Clip`.
        taken: As for `cpu.Clip`, but of any floating-point dtype.
    """
    is_finite, norm = found_inf == 0, norm.float()
    if taken is None:
        spiked = ~(norm <= skip_above)
    else:
        count, ring = taken[0], taken[1:]
        std, mean = torch.std_mean(ring)
        spiked = (count >= ring.numel()) & ~(norm <= mean + skip_above * std)
        is_taken = is_finite & ~spiked & norm.isfinite()
        place = torch.arange(ring.numel(), device=ring.device) == count % ring.numel()
        ring.copy_(torch.where(place & is_taken, norm.to(ring.dtype), ring))
        count.add_(is_taken)
    found_inf.masked_fill_(is_finite & spiked, cpu.SPIKE)


def moved(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """Returns a scalar on `device`; a sync only if the CPU will read it."""
    if tensor.device == device and not copy:
        return tensor  # as to() would return it, after a dispatch
    return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)


def copy_to_host_async(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copies a tensor to pinned host memory without a sync.

    Returns:
        The copy, and an event recorded behind it; for a tensor on the host the tensor
        itself and None.
    """
    if not tensor.is_cuda:
        return tensor, None
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    with torch.cuda.device(tensor.device):
        buffer.copy_(tensor, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
    return buffer, arrival


@torch.no_grad()
def mark_(
    track: Track, numbers: list[int], grads: list[Tensor], grad_scale: Tensor | None = None
) -> None:
    """Marks the parameters of `numbers` with inf/NaN gradients; no host sync.

    Args:
        track: Tracking tables.
        numbers: Parameter number of each of `grads`.
        grads: Unscaled gradients, or with `grad_scale` scaled ones.
        grad_scale: One-element float32, or None.
    """
    local = [(n, part) for n, g in zip(numbers, grads, strict=True) if (part := _local(g)).numel()]
    if not local:
        return
    used = [_largest_used(part, grad_scale) for _, part in local]
    found = torch.stack([torch.stack([~u.isfinite(), u.isnan()]) for u in used])
    rows = [track.marks[number] for number, _ in local]
    step = track.now.reshape(-1)[0] + 1
    last, times = torch.stack(rows).split(2, dim=1)
    # Counts once per step, in any number of passes.
    marked = [torch.where(found, step, last), times + (found & (last < step))]
    torch._foreach_copy_(rows, list(torch.cat(marked, dim=1).unbind()))


@torch.no_grad()
def measure_(health: Tensor, numbers: list[int], grads: list[Tensor]) -> None:
    """Adds the range of values of `grads` to the rows of `numbers`; no host sync."""
    for number, grad in zip(numbers, grads, strict=True):
        values = _local(grad)
        if not values.numel():
            continue
        parts = [_range_of(part) for part in values.reshape(-1).split(_PART)]
        counts, peaks = torch.stack([torch.stack(part) for part in parts]).split((4, 2), dim=1)
        row = health[number]
        row[0].fill_(values.numel())
        row[1:].copy_(torch.cat([counts.sum(0), peaks.amax(0)]))


def _range_of(values: Tensor) -> list[Tensor]:
    """Row of health (csrc/track.h) of some values, except their number."""
    bits = values.double().view(torch.int64) & _MAGNITUDE
    smallest_subnormal, smallest_normal, largest = _RANGE
    nonzero = bits != 0
    return [
        nonzero.sum(),
        (nonzero & (bits < smallest_subnormal)).sum(),
        (nonzero & (bits < smallest_normal)).sum(),
        (bits > largest).sum(),
        bits.amax(),
        torch.where(nonzero, _MAGNITUDE - bits, 0).amax(),
    ]


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
