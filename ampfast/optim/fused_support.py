"""Who divides in its step, a trial of torch's fused kernels, and who has gradients, and where."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ampfast.backends import core
from ampfast.backends.cuda_graphs import is_capturing
from ampfast.backends.scalars import allocate, new_flag
from ampfast.errors import add_note, warn_caller
from ampfast.gradients import Record, Records
from ampfast.optim.master_weights import MasterWeights


def legacy_step(
    optimizer: Any, scaler: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Steps an optimizer of torch's older contract, which unscales by the given scaler."""
    warn_caller(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
    )
    result: float | None = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    return result


def lacks_momentum(optimizer: torch.optim.SGD) -> bool:
    """Whether a skipped step of this fused SGD would leave a momentum buffer uninitialised.

    torch allocates the buffer before its kernel, which does not write it in a skipped step.
    """
    return any(
        param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group.get("fused") and group["momentum"] != 0
        for param in group["params"]
    )


def flag_unchecked(optimizer: Any, device: torch.device, is_guard: bool) -> Tensor:
    """Returns the flag of an optimizer without gradients, which a guard steps; else raises.

    As torch, with a note on the reason.
    """
    if not is_guard or has_gradients(optimizer):
        error = AssertionError("No inf checks were recorded for this optimizer.")
        raise add_note(error, why_unchecked(optimizer))
    return new_flag(device)


def why_unchecked(optimizer: torch.optim.Optimizer) -> str:
    """Returns the reason why none of an optimizer's gradients was checked."""
    params = list(_params_of([optimizer]))
    if not has_gradients(optimizer):
        frozen = sum(not param.requires_grad for param in params)
        return (
            f"None of the optimizer's {len(params)} parameters has a gradient ({frozen} of them do "
            "not require one): backward() was not called, zero_grad() ran in between, or the "
            "loss does not depend on them."
        )
    return (
        "The gradients came after unscale_() or clip_grad_norm_(), which belong between "
        "backward() and step(), or an override of unscale_ recorded no check."
    )


def has_gradients(optimizer: Any) -> bool:
    """Whether a parameter of an optimizer has a gradient."""
    return next(_gradients_of([optimizer]), None) is not None


def device_of(optimizers: Sequence[Any]) -> torch.device | None:
    """Device of the first gradient, else of the first parameter; None without parameters."""
    grads_or_params = chain(_gradients_of(optimizers), _params_of(optimizers))
    return next((each.device for each in grads_or_params), None)


def _gradients_of(optimizers: Sequence[Any]) -> Iterator[Tensor]:
    for param in _params_of(optimizers):
        # Reading the gradient of a non-leaf tensor warns.
        if (param.is_leaf or param.retains_grad) and param.grad is not None:
            yield param.grad


def _params_of(optimizers: Sequence[Any]) -> Iterator[Tensor]:
    for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        yield from (param for param in group["params"] if isinstance(param, Tensor))


def explain(error: AttributeError, given: object, *needed: str) -> None:
    """Adds a note, once, to the error if the object lacks an attribute that is needed of it."""
    lacks = not all(hasattr(given, name) for name in needed)
    if lacks and not getattr(error, "__notes__", None):
        kind = f"{type(given).__module__}.{type(given).__qualname__}"
        add_note(error, f"expected an optimizer, an object with param_groups and step, got {kind}")


_FLAG = "_step_supports_amp_scaling"


def can_defer(optimizer: Any, records: Records, overridden: bool) -> bool:
    """Whether an optimizer can clip in its step; raises ValueError if it cannot even unscale."""
    if not getattr(optimizer, _FLAG, False):
        raise ValueError(
            f"in_place=False needs an optimizer that takes grad_scale, which "
            f"{type(optimizer).__name__} does not: create it with fused=True, or use "
            "in_place=True"
        )
    if core.divides_by(records, optimizer) != "grad_scale":
        return False
    if hasattr(optimizer, "grad_scale"):
        raise own_grad_scale(optimizer)
    if overridden:
        raise ValueError(
            "in_place=False would bypass this scaler's override of unscale_, _unscale_grads_ or "
            "_check_inf_per_device: use in_place=True"
        )
    return True


def own_grad_scale(optimizer: object) -> ValueError:
    """Returns the error for an optimizer whose user set what is to clip in its step."""
    return ValueError(
        f"in_place=False sets the grad_scale of {type(optimizer).__name__}, which has one already: "
        "delete it, or use in_place=True"
    )


def decide_division(optimizer: Any, record: Record, claim: list[Any]) -> str | None:
    """Returns "grad_scale" if an optimizer's own step divides by that and skips by `found_inf`.

    Or "grad_scaler" if it takes torch's legacy keyword of that name, None if it does not divide.
    Its class says so, or the object itself if torch's constructor made it: what it has from another
    optimizer, by `__getattr__`, a property or a copy, does not count. All of its groups must be
    fused, and torch's kernels must be right. Any other optimizer gets unscaled gradients, and the
    host skips its step. `core.divides_by` asks once for a claim, the list of what may decide, and
    the record keeps the answer, unless a capture keeps kernels from being tried.
    """
    divides = getattr(type(optimizer), _FLAG, None) is True
    if isinstance(optimizer, torch.optim.Optimizer):
        divides = (divides or _is_made_by_torch(optimizer)) and _divides_rightly(optimizer)
    by = None
    if divides:
        is_legacy = "grad_scaler" in inspect.signature(optimizer.step).parameters
        by = "grad_scaler" if is_legacy else "grad_scale"
    if not is_capturing():
        record.divides_by = claim, by
    return by


def _is_made_by_torch(optimizer: Any) -> bool:
    """Whether torch's constructor made an optimizer, and its attributes are no other one's."""
    # The constructor sets this name, and wraps the step of the class.
    kind, own = type(optimizer), vars(optimizer)
    name = f"Optimizer.zero_grad#{kind.__name__}.zero_grad"
    return own.get("_zero_grad_profile_name") == name and getattr(kind.step, "hooked", False)


def _divides_rightly(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that says that it divides does so.

    Another optimizer's word is taken; torch's fused kernels, if it has these, are tried, or taken
    for right in a capture.
    """
    has_masters, kind = False, type(optimizer)
    if isinstance(optimizer, MasterWeights):
        has_masters, kind = True, optimizer._master_weights_of
    torchs, groups = torchs_class(kind), optimizer.param_groups
    is_option = torchs is not None or getattr(optimizer, "defaults", {}).get("fused")
    if is_option and not all(group.get("fused") for group in groups):
        return False  # as after loading a checkpoint of a plain one
    if torchs is None:
        return True
    for param in chain.from_iterable(group["params"] for group in groups):
        dtype = torch.float32 if has_masters and param.dtype.itemsize == 2 else param.dtype
        is_trained = param.requires_grad or param.grad is not None
        is_tried = is_trained and dtype.is_floating_point and param.device.type != "meta"
        if is_tried and (fault := fault_of(torchs, dtype, param.device)):
            warn_caller(
                f"torch's fused {torchs.__name__} {fault}, for {dtype} on {param.device.type}, as "
                "a trial has found: the scaler unscales and skips by itself, as for an optimizer "
                "that is not fused. Make the optimizer with fused=False"
            )
            return False
    return True


# torch's fused operators as they are now, since others may replace them.
operators = attrgetter("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")

# Options that choose another kernel.
_OPTIONS: dict[str, list[dict[str, Any]]] = {"SGD": [{}, {"momentum": 0.9}]}

# Faults by class, dtype, device type and operators.
_faults: dict[tuple[Any, ...], str | None] = {}


def torchs_class(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer] | None:
    """The optimizer of torch whose `step`, as torch wrote it, a class has; or None."""
    step = inspect.unwrap(kind.step)
    for base in kind.__mro__:
        if getattr(torch.optim, base.__name__, None) is base:
            is_torchs = f"{step.__module__}.".startswith("torch.optim.")
            return base if is_torchs and step is inspect.unwrap(base.step) else None
    return None


def fault_of(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Tries the fused implementation of an optimizer of torch, once for a dtype and device type.

    With `grad_scale` 2 it must do what the unfused one does with halved gradients, up to rounding,
    and with `found_inf` 1 nothing. No hook or mode of the caller sees it; the host waits for it. In
    a capture, where nothing can be tried, what was not tried before is taken for right.

    Args:
        kind: A class of `torch.optim`.
        dtype: That of parameters and gradients.
        device: Where they are.

    Returns:
        What is wrong, as a part of a sentence, or None.
    """
    key = kind, dtype, device.type, operators(torch)
    if key not in _faults and not is_capturing():
        options = _OPTIONS.get(kind.__name__, [{}])
        try:
            # First, since the others are functions that a mode sees.
            with (
                torch._C.DisableTorchFunction(),
                _disable_current_modes(),
                torch.inference_mode(False),
                torch.no_grad(),
            ):
                found = [_try(kind, dtype, device, each) for each in options]
        except Exception as error:  # not kept: memory may be short
            return f"could not be tried ({error!r})"
        _faults[key] = next(filter(None, found), None)
    return _faults.get(key)


def _try(
    kind: type[torch.optim.Optimizer],
    dtype: torch.dtype,
    device: torch.device,
    options: dict[str, Any],
) -> str | None:
    ramp = allocate(torch.arange, 64, dtype=torch.float32, device=device)
    start, gradient = (1 + ramp / 64).to(dtype), (4 + ramp / 16).to(dtype)
    gradient[::2].neg_()
    zero, one, two = ramp[:3]

    def make(grad: Tensor, **which: Any) -> Any:
        param = start.clone()
        param.grad = grad.clone()
        return kind([param], **{"lr": 0.5, **options, **which})

    right = _stepped(make(gradient / 2, fused=False, foreach=False))
    fused = _stepped(make(gradient / 2, fused=True))
    optimizer = make(gradient, fused=True)
    divided = _stepped(optimizer, two, zero)
    skipped = _stepped(optimizer, two, one)
    if not _are_close(fused, right, start):
        return "computes other values than torch's unfused one"
    if not _are_close(divided, right, start):
        return "does not divide by grad_scale"
    is_same = all(torch.equal(divided[name], skipped[name]) for name in divided)
    return None if is_same else "does not skip where found_inf is 1"


def _stepped(optimizer: Any, *given: Tensor) -> dict[str, Tensor]:
    """Copies of an optimizer's only parameter and its state after a step."""
    if given:
        optimizer.grad_scale, optimizer.found_inf = given
    # Unwrapped, since global optimizer hooks would see this step.
    inspect.unwrap(type(optimizer).step)(optimizer)
    (param,) = optimizer.param_groups[0]["params"]
    state = {name: value for name, value in optimizer.state[param].items() if value is not None}
    return {name: value.cpu().clone() for name, value in {**state, "the parameter": param}.items()}


def _are_close(found: dict[str, Tensor], right: dict[str, Tensor], start: Tensor) -> bool:
    """Whether values differ by a few roundings at most, as the order of operations may.

    And by the digits that float32 loses of 1 - beta: torch's kernels for GPUs round beta2 = 0.999
    to it, and the second moment is 1.3e-5 off.
    """
    few = max(8 * torch.finfo(start.dtype).eps, 2.0**-12)
    before = {"the parameter": start.cpu().double()}
    for name, value in right.items():
        value = value.double()
        limit = few * (value.abs() + before.get(name, value).abs())
        if name not in found or not bool(((found[name].double() - value).abs() <= limit).all()):
            return False
    return True
