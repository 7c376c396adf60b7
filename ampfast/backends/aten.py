"""torch's own ops over lists of tensors: the oracle, and what irregular gradients take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ampfast.backends import state_layout as layout

__all__ = [
    "any_found",
    "check_",
    "float_of",
    "moved",
    "undo_update_",
    "unscale_",
    "update_scale_",
    "word_of",
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
    state: Tensor | None = None,
    norm: Tensor | None = None,
) -> None:
    """torch's `_amp_update_scale_`, except that a tracker beyond a lowered interval grows too.

    With a `state`, what `csrc/scale_state.h` says is done besides, `norm` included.
    """
    if state is not None:
        scale_before, tracker_before = current_scale.detach().clone(), growth_tracker.clone()
    lowered = growth_tracker
    if isinstance(growth_interval, int) and growth_interval >= 1:
        lowered = growth_tracker.clamp(max=growth_interval - 1)
    torch._amp_update_scale_(
        current_scale, lowered, found_inf, growth_factor, backoff_factor, growth_interval
    )
    if lowered is not growth_tracker:
        growth_tracker.data.copy_(lowered)
    if state is not None:
        grows = (tracker_before + 1 >= growth_interval) & (growth_interval >= 1)
        before = scale_before.reshape(()), tracker_before.reshape(())
        scale = _keep_step(state, found_inf.reshape(()) != 0, *before, current_scale, grows, norm)
        current_scale.data.copy_(scale.reshape_as(current_scale))


def _keep_step(
    state: Tensor,
    found: Tensor,
    scale_before: Tensor,
    tracker_before: Tensor,
    next_scale: Tensor,
    grows: Tensor,
    norm: Tensor | None,
) -> Tensor:
    """Writes a step into `state`; returns the next scale as the policy there has it."""
    words = state.clone()
    zero = torch.zeros_like(words[0])
    skips = found.to(words)
    refills = grows.reshape(()) | (words[layout.REFILLS_ON_FINITE_STEPS] != 0)
    tolerated = words[layout.TOLERATED]
    tolerated = torch.where(found, tolerated + 1, torch.where(refills, zero, tolerated))
    holds = found & (tolerated <= words[layout.MOST_TOLERATED])
    scale = torch.where(holds, scale_before, next_scale.detach().reshape(()))
    least, most = float_of(words[layout.MIN_SCALE]), float_of(words[layout.MAX_SCALE])
    changes = scale != scale_before
    scale = torch.where(changes & (most > 0) & (scale > most), most.to(scale), scale)
    scale = torch.where(changes & (least > 0) & (scale < least), least.to(scale), scale)
    is_stuck = found & (least > 0) & (scale_before <= least)

    state[layout.BEFORE :][: layout.COUNTERS] = words[: layout.COUNTERS]
    state[layout.SCALE_BEFORE] = word_of(scale_before)
    state[layout.TRACKER_BEFORE] = tracker_before
    steps = words[layout.STEPS]
    entry = torch.stack(
        [
            word_of(scale_before),
            skips + (0 if norm is None else 2),
            zero if norm is None else word_of(norm.reshape(())),
        ]
    )
    ring = state[layout.RING :].view(layout.RING_STEPS, layout.RING_WORDS)
    ring.index_copy_(0, (steps % layout.RING_STEPS).reshape(1), entry.reshape(1, -1))
    state[: layout.COUNTERS] = torch.stack(
        [
            steps + 1,
            words[layout.SKIPPED] + skips,
            words[layout.GROWTHS] + (scale > scale_before),
            words[layout.BACKOFFS] + (scale < scale_before),
            torch.where(found, words[layout.CONSECUTIVE_SKIPS] + 1, zero),
            torch.where(is_stuck, words[layout.SKIPS_AT_MINIMUM] + 1, zero),
            tolerated,
            torch.where(found, steps + 1, words[layout.LAST_SKIPPED]),
        ]
    )
    return scale


def undo_update_(state: Tensor, scale: Tensor, growth_tracker: Tensor) -> None:
    """Restores what the last update replaced, as the `state` remembers it."""
    state[: layout.COUNTERS] = state[layout.BEFORE :][: layout.COUNTERS]
    scale.data.copy_(float_of(state[layout.SCALE_BEFORE]).reshape_as(scale))
    growth_tracker.data.copy_(state[layout.TRACKER_BEFORE].reshape_as(growth_tracker))


def float_of(word: Tensor) -> Tensor:
    """Returns the float32 values whose bits stand in int64 words."""
    return word.to(torch.int32).view(torch.float32)


def word_of(value: Tensor) -> Tensor:
    """Returns the bits of float32 values as int64 words."""
    return value.float().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


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
