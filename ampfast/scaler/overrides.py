"""Methods that a subclass or an instance overrides, and torch's own, which then call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import _refresh_per_optimizer_state

from ampfast.backends.core import divides_by
from ampfast.gradients import READY, TorchGradScaler, Turn
from ampfast.optim.fused_support import explain, legacy_step, no_inf_checks

Methods = dict[str, Callable[..., Any] | None]


def original_methods(kind: type, *names: str) -> Methods:
    """Returns methods as they are now: what replaces one later, on the class too, is a hook.

    None for one of torch's that something has replaced before.
    """
    source = _refresh_per_optimizer_state.__code__.co_filename
    found: Methods = {}
    for name in names:
        method = getattr(kind, name)
        code = getattr(method, "__code__", None)
        is_original = name in kind.__dict__ or (code and code.co_filename == source)
        found[name] = method if is_original else None
    return found


def replace_method(place: Any, name: str, method: Callable[..., Any]) -> None:
    """Replaces a method of a class by one that only watches it, which is then no hook."""
    original = vars(place)[name]
    setattr(place, name, method)
    for found in vars(place).get("_originals", ()):
        if found.get(name) is original:
            found[name] = method


def torchs_step(
    scaler: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Steps as torch's scaler, which calls the hooks of its own."""
    try:
        result: float | None = TorchGradScaler.step(scaler, optimizer, *args, **kwargs)
    except AttributeError as error:
        explain(error, optimizer, "step")
        raise
    return result


def step_hooked(
    scaler: Any, optimizer: Any, turn: Turn, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """torch's `step` where a subclass or an instance overrides one of the hooks.

    Except for an optimizer that torch would misjudge, or warn of at a line of this file.
    """
    asks = getattr(optimizer, "_step_supports_amp_scaling", False)
    by = divides_by(scaler._records, optimizer) if asks else None
    if not asks or by == "grad_scale":
        return torchs_step(scaler, optimizer, args, kwargs)
    scaler._check_scale_growth_tracker("step")
    if by == "grad_scaler":
        return legacy_step(optimizer, scaler, args, kwargs)
    # A wrapper of one that divides is stepped as a plain optimizer.
    if turn["stage"] is READY:
        scaler.unscale_(optimizer)
    if not turn["found_inf_per_device"]:
        raise no_inf_checks(optimizer)
    result: float | None = scaler._maybe_opt_step(optimizer, turn, *args, **kwargs)
    return result
