"""The norm of gradients, of one list or of several optimizers, and what clipping multiplies by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ampfast import gradients
from ampfast.agreement import Agreement
from ampfast.backends import Choice, aten, cpu
from ampfast.distributed import Shards, marked
from ampfast.layouts import part_of
from ampfast.tracking import Tracks

__all__ = ["FUSED_ORDERS", "Part", "limit_of", "measure", "norm_of", "order_of"]

# The orders whose norms come with the check, in one read.
FUSED_ORDERS = (2.0, math.inf)


@dataclass
class Part:
    """One optimizer's gradients, and what is done with them.

    Attributes:
        optimizer: Whose they are; a list of tensors where there is no optimizer.
        grads: The gradients, as kernels take them.
        factor: The scale or the inverse scale, or None where they are unscaled already.
        is_scale: Which of the two `factor` is.
        writes: Whether they will be written.
        tracks: Where a check notes what it sees of each parameter, or None.
        flags: What a check found, by device.
        rows: For each list of gradients its norms, as `cpu.norms` writes them.
        uncounted: The same for those whose norm another rank counts.
    """

    optimizer: Any
    grads: gradients.Gradients
    factor: Tensor | None
    is_scale: bool
    writes: bool
    tracks: Tracks | None = None
    flags: dict[torch.device, Tensor] = field(default_factory=dict)
    rows: list[Tensor] = field(default_factory=list)
    uncounted: list[Tensor] = field(default_factory=list)


def order_of(norm_type: object) -> float:
    """Checks the order of a norm and returns it as a float."""
    if isinstance(norm_type, str):
        if norm_type != "inf":
            raise ValueError(f'norm_type must be a number above 0 or "inf", got {norm_type!r}')
        return math.inf
    order = _number("norm_type", norm_type)
    if not order > 0:
        raise ValueError(f'norm_type must be a number above 0 or "inf", got {order}')
    return order


def limit_of(max_norm: object) -> float:
    """Checks what a norm is clipped to and returns it as a float."""
    limit = _number("max_norm", max_norm)
    if not limit >= 0:
        raise ValueError(f"max_norm must be at least 0, got {limit}")
    return limit


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__}")
    return float(value)


def norm_of(
    choice: Choice,
    grads: gradients.Gradients,
    tensors: list[Tensor],
    order: float,
    inv_scale: Tensor | None,
    shards: Shards | None = None,
) -> Tensor:
    """Returns the norm of gradients, which are also in `tensors`, times `inv_scale`."""
    agreement = None
    if shards is not None:
        agreement = shards.agreement
        grads = replace(grads, parts=shards.parts)
    part = Part(tensors, grads, inv_scale, is_scale=False, writes=False)
    return measure(choice, [part], order, math.inf, inv_scale, None, agreement)[0]


def measure(
    choice: Choice,
    parts: list[Part],
    order: float,
    limit: float,
    scale: Tensor | None,
    divisor: Tensor | None = None,
    agreement: Agreement | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the norm of all parts and the coefficient; fills in their flags, and `divisor`."""
    fused, largest = order in FUSED_ORDERS, order == math.inf
    for part in parts:
        if fused or (divisor is not None and not part.writes):
            _read(choice, part, agreement)
    device, dtype = _place(parts, scale)
    wide = aten.widest(device)
    norm = torch.empty((), dtype=dtype, device=device)
    coefficient = torch.empty((), dtype=wide, device=device)
    if fused:
        rows = [aten.moved(row, device) for part in parts for row in part.rows]
        if len(rows) == 1:
            together = rows[0].unsqueeze(0)
        else:
            together = torch.stack([*rows, torch.zeros(2, dtype=wide, device=device)])
        if agreement is not None:
            mine = together[:, 1].amax() if largest else together[:, 0].sum()
            flags, total = agreement.share_norm(
                [part.flags for part in parts], device, mine, largest=largest
            )
            _take(parts, flags)
            together = torch.stack([total, total]).unsqueeze(0)
        kernels = choice.kernels_for(device)
        if kernels is not None and _are_regular(coefficient, scale, divisor):
            kernels.clip_coefficient(
                cpu.Clip(together, limit, largest, norm, coefficient, scale, divisor)
            )
            return norm, coefficient
        norm.copy_(aten.total_norm(together, largest))
    else:
        total = _total(parts, order, device, agreement)
        if agreement is not None:
            _take(parts, agreement.share([part.flags for part in parts], device))
            total = agreement.norm(total, order)
        norm.copy_(total)
    coefficient.copy_(aten.coefficient_of(norm, limit))
    if divisor is not None and scale is not None:
        divisor.copy_(scale.detach().reshape(()) / aten.moved(coefficient, scale.device))
    return norm, coefficient


def _read(choice: Choice, part: Part, agreement: Agreement | None) -> None:
    """Takes the norms of a part and checks it, unless it was checked already."""
    counted, others = part.grads, None
    if agreement is not None:
        counted, others = _split(part, agreement)
    flags: dict[torch.device, list[Tensor]] = {}
    for grads, rows in ((counted, part.rows), (others, part.uncounted)):
        if grads is None:
            continue
        found, norms = gradients.norms(
            grads,
            part.factor,
            choice=choice,
            is_scale=part.is_scale,
            writes=part.writes,
            tracks=part.tracks,
        )
        rows += norms
        for device, flag in found.items():
            flags.setdefault(device, []).append(flag)
    if agreement is not None:
        for is_finite in _sum_up(part, agreement):
            flags.setdefault(is_finite.device, []).append((~is_finite).float())
    if not flags:
        # Of shards that are empty; a part without gradients has none either.
        flags = {grads.device: [gradients.new_flag(grads.device)] for grads in part.grads.lists}
    part.flags = part.flags or {
        device: some[0] if len(some) == 1 else aten.any_found(some, device)
        for device, some in flags.items()
    }


def _split(
    part: Part, agreement: Agreement
) -> tuple[gradients.Gradients, gradients.Gradients | None]:
    """The gradients of which this rank counts the norm, and the others."""
    grads = part.grads
    # A sum has another norm than its summands.
    counts = {
        number: not layout.is_partial and agreement.counts(layout)
        for number, layout in grads.layouts.items()
    }
    if not isinstance(part.optimizer, list):
        for number in marked(part.optimizer.param_groups):
            counts.setdefault(number, agreement.counts(None, is_marked=True))
    others_count = agreement.counts(None)
    apart = {number for number, here in counts.items() if here != others_count}
    if not apart and others_count:
        return grads, None
    inside, outside = grads.split(apart)
    return (outside, inside) if others_count else (inside, outside)


def _sum_up(part: Part, agreement: Agreement) -> Iterator[Tensor]:
    """Takes the norms of gradients of which ranks hold summands; yields whether they are finite."""
    if part.grads.parts is None:
        return
    for number, summed in part.grads.parts.sums():
        factor = None if part.factor is None else aten.moved(part.factor, summed.device)
        if factor is not None and part.is_scale:
            factor = gradients.inverse(factor)
        row = aten.norms([summed], factor)
        counts = agreement.counts(part.grads.layouts[number])
        (part.rows if counts else part.uncounted).append(row)
        yield row[1].isfinite()


def _take(parts: list[Part], flags: list[dict[torch.device, Tensor]]) -> None:
    for part, agreed in zip(parts, flags, strict=True):
        part.flags = agreed


def _are_regular(coefficient: Tensor, scale: Tensor | None, divisor: Tensor | None) -> bool:
    """Whether the kernels know what they are to read and write, on the device of the first."""
    if not cpu.is_scalar(coefficient, torch.float64):
        return False
    if divisor is None or scale is None:
        return True
    return cpu.is_scalar(scale, torch.float32) and scale.device == coefficient.device


def _place(parts: list[Part], scale: Tensor | None) -> tuple[torch.device, torch.dtype]:
    """Where the norm belongs, which is where the first gradients are, and in which type."""
    lists = [grads for part in parts for grads in part.grads.lists]
    aside = [tensor for part in parts for of in part.grads.set_aside.values() for tensor in of]
    wide = any(grads.has_float64 for grads in lists)
    wide = wide or any(t.dtype in (torch.float64, torch.complex128) for t in aside)
    if lists or aside:
        device = lists[0].device if lists else aside[0].device
    else:
        device = torch.device("cpu") if scale is None else scale.device
    return device, torch.float64 if wide else torch.float32


@torch.no_grad()
def _total(
    parts: list[Part], order: float, device: torch.device, agreement: Agreement | None
) -> Tensor:
    """The norm of an order that no kernel takes, of what counts here."""
    norms = [torch.zeros((), dtype=aten.widest(device), device=device)]
    for part in parts:
        by_device: dict[torch.device, list[Tensor]] = {}
        for grad in _counted(part, agreement):
            by_device.setdefault(grad.device, []).append(grad)
        for tensors in by_device.values():
            norm = aten.p_norm(tensors, order)
            if part.factor is not None:
                inverse = gradients.inverse(part.factor) if part.is_scale else part.factor
                norm = norm * aten.moved(inverse, norm.device).reshape(()).abs()
            norms.append(aten.moved(norm, device))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    return total


def _counted(part: Part, agreement: Agreement | None) -> Iterator[Tensor]:
    """The gradients whose norm counts here, as far as they are here."""
    grads, replicated = part.optimizer, set()
    if not isinstance(grads, list):
        groups = part.optimizer.param_groups
        grads = [param.grad for group in groups for param in group["params"]]
        replicated = set() if agreement is None else marked(groups)
    for number, grad in enumerate(grads):
        layout = part.grads.layouts.get(number)
        if grad is not None and layout is not None:
            grad = part_of(grad, layout)
        counts = agreement is None or agreement.counts(layout, number in replicated)
        if grad is not None and counts:
            yield grad._values() if grad.is_sparse else grad
