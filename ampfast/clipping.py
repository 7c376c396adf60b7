"""Clipping by the norm of an optimizer's unscaled gradients, and that norm alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampfast import gradients
from ampfast.agreement import Agreement
from ampfast.backends import Choice, aten
from ampfast.norms import FUSED_ORDERS, Part, limit_of, measure, order_of
from ampfast.notes import ONCE, add_note
from ampfast.optimizers import takes_grad_scaler

if TYPE_CHECKING:
    from ampfast.grad_scaler import GradScaler

__all__ = ["DEFERRED", "Deferred", "clip_grad_norm_", "grad_norm"]

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
