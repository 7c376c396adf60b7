"""One optimizer's step: what is checked before it, and who decides whether it is taken."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampfast import backends, clipping, gradients
from ampfast.backends import aten
from ampfast.errors import ONCE, add_note, refuse_capture, warn_caller
from ampfast.gradient_checker import CHECK, HOST_DECIDES, MAYBE_STEP
from ampfast.optimizers import lacks_momentum, no_inf_checks, takes_grad_scaler

if TYPE_CHECKING:
    from ampfast.grad_scaler import GradScaler

__all__ = ["step"]


def step(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    update: backends.Update | None,
) -> float | None:
    """`GradScaler.step`; an `update` is applied behind the check that decides, if it can be."""
    result: float | None
    if not scaler._enabled:
        result = optimizer.step(*args, **kwargs)
        return result
    if "closure" in kwargs:
        raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
    scale, _ = scaler._check_scale_growth_tracker("step")
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.STEPPED:
        raise add_note(
            RuntimeError("step() has already been called since the last update()."), ONCE
        )

    if getattr(optimizer, "_step_supports_amp_scaling", False):
        if takes_grad_scaler(optimizer.step):
            result = _legacy_step(scaler, optimizer, args, kwargs)
        else:
            result = _fused_step(scaler, optimizer, state, args, kwargs, update)
    else:
        if state["stage"] is OptState.READY:
            if scale.is_cuda and not scaler._overrides(MAYBE_STEP):
                # Here, or the gradients would count as unscaled.
                refuse_capture(*HOST_DECIDES)
            if update is None:
                scaler.unscale_(optimizer)
            else:
                scaler._unscale(optimizer, update)
        if not state["found_inf_per_device"]:
            raise no_inf_checks(optimizer)
        result = scaler._maybe_opt_step(optimizer, state, *args, **kwargs)
    state["stage"] = OptState.STEPPED
    scaler._record(optimizer, state["found_inf_per_device"])
    return result


def _legacy_step(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> float | None:
    """Steps an optimizer of torch's older contract, which unscales by the scaler it is given."""
    warn_caller(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
    )
    result: float | None = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    return result


def _fused_step(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    update: backends.Update | None,
) -> float | None:
    """Steps an optimizer that divides by `grad_scale` and skips by `found_inf` itself."""
    overridden = scaler._overrides(CHECK)
    unscaled = state["stage"] is OptState.UNSCALED
    if not unscaled:
        if overridden:
            scaler._check_inf_per_device(optimizer)
        else:
            scaler._check_scale_growth_tracker("_check_inf_per_device")
    scale = scaler._get_scale_async()
    if scale is None:
        raise AssertionError("_get_scale_async returned None")
    deferred: clipping.Deferred | None = state.get(clipping.DEFERRED)
    if unscaled:
        grad_scale = getattr(optimizer, "grad_scale", None)
    else:
        grad_scale = scale * getattr(optimizer, "grad_scale", 1)
    checked = False
    if deferred is not None:
        flags = state["found_inf_per_device"]
        grad_scale, state["found_inf_per_device"] = deferred.handed_over(grad_scale, flags)
    elif isinstance(grad_scale, Tensor) and not overridden:
        _check_quotients(scaler, optimizer, state, grad_scale, update)
        checked = True
    flags = list(state["found_inf_per_device"].values())
    if checked and len(flags) == 1 and flags[0].device == scale.device:
        found_inf = flags[0]  # exactly 0 or 1, and new
    else:
        # Nothing checked is 0, as torch's sum over nothing.
        found_inf = aten.any_found(flags, scale.device) if flags else 0
    scaler._record(optimizer, state["found_inf_per_device"])
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        if flags and lacks_momentum(optimizer):
            refuse_capture(
                "the first step of a fused SGD with momentum, which may have to be skipped"
            )
            if found_inf.item():
                return None
        result: float | None = optimizer.step(*args, **kwargs)
        return result
    finally:
        for name in ("grad_scale", "found_inf"):
            with suppress(AttributeError):
                delattr(optimizer, name)


def _check_quotients(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    grad_scale: Tensor,
    update: backends.Update | None,
) -> None:
    """Checks what an optimizer that divides by `grad_scale` will work with."""
    grads = scaler._collect(optimizer, allow_fp16=True, writes=False)
    agreement, tracks = scaler._agreement([grads]), scaler._tracks(optimizer, grads)
    unscaled = state["stage"] is OptState.UNSCALED
    flags = gradients.check_(
        grads,
        grad_scale.detach().float(),
        choice=scaler._kernels(),
        update=None if unscaled or agreement else update,
        tracks=tracks,
    )
    flags = scaler._agreed(agreement, flags)
    if unscaled:
        # What unscale_ found counts too; in new tensors, for its own may have been handed out.
        for device, flag in state["found_inf_per_device"].items():
            both = [flag, flags[device]] if device in flags else [flag]
            flags[device] = aten.any_found(both, flag.device)
    state["found_inf_per_device"] = flags
