"""Global gradient norm and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampfast import gradients
from ampfast.backends import Choice, aten, cpu
from ampfast.distributed import Agreement, Shards, marked, part_of
from ampfast.errors import ONCE, add_note
from ampfast.optimizers import takes_grad_scaler
from ampfast.overflow import Tracks

if TYPE_CHECKING:
    from ampfast.grad_scaler import GradScaler

__all__ = [
    "DEFERRED",
    "FUSED_ORDERS",
    "Deferred",
    "Part",
    "clip_grad_norm_",
    "grad_norm",
    "limit_of",
    "measure",
    "norm_of",
    "order_of",
]

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
            factor = None if part.factor is None else aten.moved(part.factor, tensors[0].device)
            if factor is not None and part.is_scale:
                factor = gradients.inverse(factor)
            norms.append(aten.moved(aten.p_norm(tensors, order, factor), device))
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


# The key, of an optimizer's entry in the scaler's records, of a clipping that its step will do.
DEFERRED = "deferred_clip"


_NEW = {"stage": OptState.READY}


@dataclass(frozen=True)
class Deferred:
    """A clipping that an optimizer does which divides by `grad_scale`.

    Attributes:
        divisor: 0-dim float32: the scale over the coefficient.
        coefficient: 0-dim float64.
        rows: For each list of gradients its norms, as `cpu.norms` writes them.
        agreement: How ranks agree on the step, or None.
    """

    divisor: Tensor
    coefficient: Tensor
    rows: list[Tensor]
    agreement: Agreement | None = None

    def handed_over(
        self, own: Tensor | float | None, flags: dict[Any, Tensor]
    ) -> tuple[Tensor, dict[Any, Tensor]]:
        """Returns the `grad_scale` of the step, and the flags with what the user's `own` adds."""
        if own is None:
            return self.divisor.clone(), flags
        if isinstance(own, Tensor):
            own = own.detach().reshape(())
        grad_scale = self.divisor * own
        # By a zero, which it may have become, even a zero gradient is not divided.
        found = (~(grad_scale != 0) | grad_scale.isnan()).float()
        for row in self.rows:
            largest, coefficient = (aten.moved(t, found.device) for t in (row[1], self.coefficient))
            # As the optimizer divides: all but float64 gradients in float32.
            quotient = (largest * coefficient / own).float()
            found.masked_fill_(~quotient.isfinite(), 1.0)
        both = {at: aten.any_found([flag, found], flag.device) for at, flag in flags.items()}
        if self.agreement is not None:
            (both,) = self.agreement.share([both], found.device)
        return grad_scale, both


def clip_grad_norm_(
    scaler: GradScaler,
    optimizer: object,
    max_norm: float,
    norm_type: float,
    in_place: bool,
    overridden: bool,
) -> Tensor:
    """`GradScaler.clip_grad_norm_`; `overridden` tells whether a hook decides on infinities."""
    optimizers = _optimizers(optimizer)
    limit, order = limit_of(max_norm), order_of(norm_type)
    if not isinstance(in_place, bool):
        raise TypeError(f"in_place must be a bool, got {type(in_place).__name__}")
    if not scaler._enabled:
        parts = [_unscaled(scaler, each, writes=True) for each in optimizers]
        agreement = _agreement(scaler, parts)
        norm, coefficient = measure(scaler._kernels(), parts, order, limit, None, None, agreement)
        _write(scaler._kernels(), parts, coefficient)
        return norm

    scale, _ = scaler._check_scale_growth_tracker("clip_grad_norm_")
    for each in optimizers:
        _require_ready(scaler, each)
    defers = [not in_place and _defers(each, overridden) for each in optimizers]
    if overridden:
        # What the hook finds counts, and what it writes is clipped.
        for each in optimizers:
            scaler.unscale_(each)
        parts = [_unscaled(scaler, each, writes=True) for each in optimizers]
    else:
        parts = [
            _scaled(scaler, each, scale, writes=not deferred)
            for each, deferred in zip(optimizers, defers, strict=True)
        ]
        for part in parts:
            part.tracks = scaler._tracks(part.optimizer, part.grads)
        if order not in FUSED_ORDERS:
            # First all that torch may refuse: then nothing has been written.
            for part in parts:
                for device, tensors in part.grads.set_aside.items():
                    aten.check_(tensors, gradients.new_flag(device))
            for part in parts:
                _unscale(scaler, part)
    divisor = torch.empty((), dtype=torch.float32, device=scale.device) if any(defers) else None
    agreement = _agreement(scaler, parts)
    norm, coefficient = measure(scaler._kernels(), parts, order, limit, scale, divisor, agreement)
    _write(scaler._kernels(), parts, coefficient)
    states = [scaler._per_optimizer_states[id(each)] for each in optimizers]
    if not overridden:
        for state, part in zip(states, parts, strict=True):
            state["found_inf_per_device"] = part.flags
            state["stage"] = OptState.UNSCALED
            if not part.writes and divisor is not None:
                rows = part.rows + part.uncounted
                state[DEFERRED] = Deferred(divisor, coefficient, rows, agreement)
    if len(states) > 1:
        _skip_together(states, scale.device)
    for each, state in zip(optimizers, states, strict=True):
        if state["found_inf_per_device"]:
            scaler._record(each, state["found_inf_per_device"])
    scaler._note_norm(optimizers, norm, order)
    return norm


def grad_norm(scaler: GradScaler, optimizer: object, norm_type: float) -> Tensor:
    """`GradScaler.grad_norm`."""
    optimizers, order = _optimizers(optimizer), order_of(norm_type)
    if not scaler._enabled:
        parts = [_unscaled(scaler, each, writes=False) for each in optimizers]
        agreement = _agreement(scaler, parts)
        return measure(scaler._kernels(), parts, order, math.inf, None, None, agreement)[0]
    scale, _ = scaler._check_scale_growth_tracker("grad_norm")
    entries = [scaler._per_optimizer_states.get(id(each), _NEW) for each in optimizers]
    if any(entry["stage"] is OptState.STEPPED for entry in entries):
        raise add_note(RuntimeError("grad_norm() is being called after step()."), ONCE)
    parts = [
        _unscaled(scaler, each, writes=False)
        if entry["stage"] is OptState.UNSCALED and DEFERRED not in entry
        else _scaled(scaler, each, scale, writes=False)
        for each, entry in zip(optimizers, entries, strict=True)
    ]
    agreement = _agreement(scaler, parts)
    norm, _ = measure(scaler._kernels(), parts, order, math.inf, scale, None, agreement)
    if all(entry["stage"] is OptState.READY for entry in entries):
        # Else it may be of gradients that were clipped.
        scaler._note_norm(optimizers, norm, order)
    return norm


def _optimizers(optimizer: object) -> list[Any]:
    """The optimizers of a call: one, or a list or tuple of them."""
    given: Any = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        raise ValueError("the list of optimizers is empty")
    for each in given:
        if not hasattr(each, "param_groups"):
            raise TypeError(
                "the norm is taken of an optimizer's gradients, or of those of a list of "
                f"optimizers, not of parameters; got {type(each).__name__}, which has no "
                "param_groups"
            )
    if len({id(each) for each in given}) < len(given):
        raise ValueError("the same optimizer is given twice")
    if len(given) > 1:
        params = [p for each in given for group in each.param_groups for p in group["params"]]
        if len({id(param) for param in params}) < len(params):
            raise ValueError(
                "two of the optimizers have a parameter in common, whose gradient would be "
                "unscaled twice"
            )
    return list(given)


def _require_ready(scaler: GradScaler, optimizer: object) -> None:
    """Raises what `unscale_` raises for an optimizer that is past its turn."""
    stage = scaler._per_optimizer_states.get(id(optimizer), _NEW)["stage"]
    if stage is OptState.UNSCALED:
        raise add_note(
            RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            ),
            "clip_grad_norm_() unscales by itself: call it once, and in place of unscale_(). "
            f"The optimizer: {type(optimizer).__name__}. {ONCE}",
        )
    if stage is OptState.STEPPED:
        raise add_note(
            RuntimeError("unscale_() is being called after step()."),
            "clip_grad_norm_() unscales, so it comes before step(). "
            f"The optimizer: {type(optimizer).__name__}. {ONCE}",
        )


def _defers(optimizer: Any, overridden: bool) -> bool:
    """Whether an optimizer can clip by itself; raises ValueError if it would not unscale either."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            f"in_place=False is for optimizers that take grad_scale, which this "
            f"{type(optimizer).__name__} does not: create it with fused=True, or take "
            "in_place=True"
        )
    if takes_grad_scaler(optimizer.step):
        return False
    if overridden:
        raise ValueError(
            "in_place=False would go past this scaler's own unscale_, _unscale_grads_ or "
            "_check_inf_per_device: take in_place=True"
        )
    return True


def _skip_together(states: list[dict[str, Any]], device: torch.device) -> None:
    """Skips all optimizers if one must be: what it found is in the coefficient of all."""
    flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
    found = aten.any_found(flags, device)
    for state in states:
        places = state["found_inf_per_device"]
        state["found_inf_per_device"] = {
            at: aten.any_found([found], flag.device) for at, flag in places.items()
        }


def _scaled(scaler: GradScaler, optimizer: Any, scale: Tensor, *, writes: bool) -> Part:
    """The part of an optimizer whose gradients are scaled."""
    allow_fp16 = scaler._allow_fp16 or not writes
    grads = scaler._collect(optimizer, allow_fp16=allow_fp16, writes=writes, clips=True)
    is_scale = scale.dtype is torch.float32
    factor = scale if is_scale else gradients.inverse(scale)
    return Part(optimizer, grads, factor, is_scale, writes)


def _unscaled(scaler: GradScaler, optimizer: Any, *, writes: bool) -> Part:
    """The part of an optimizer whose gradients are not scaled, or not any more."""
    grads = scaler._collect(optimizer, allow_fp16=True, writes=writes, clips=True)
    return Part(optimizer, grads, None, False, writes)


def _agreement(scaler: GradScaler, parts: list[Part]) -> Agreement | None:
    return scaler._agreement([part.grads for part in parts])


def _unscale(scaler: GradScaler, part: Part) -> None:
    """Unscales what will be written, for a norm that is taken of unscaled gradients."""
    if part.writes and part.factor is not None:
        part.flags = gradients.unscale_(
            part.grads,
            part.factor,
            choice=scaler._kernels(),
            is_scale=part.is_scale,
            tracks=part.tracks,
        )
        part.factor = None


def _write(choice: Choice, parts: list[Part], coefficient: Tensor) -> None:
    for part in parts:
        if part.writes:
            gradients.clip_(
                part.grads, part.factor, coefficient, choice=choice, is_scale=part.is_scale
            )
