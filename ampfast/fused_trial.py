"""A trial of torch's fused optimizers: whether their kernels do what a scaler asks of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ampfast.backends.scalars import allocate

# torch's fused operators as they are now, since others may replace them.
operators = attrgetter("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")

# Options that choose another kernel.
_OPTIONS: dict[str, list[dict[str, Any]]] = {"SGD": [{}, {"momentum": 0.9}]}

# By class, dtype, device type and operators.
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
    and with `found_inf` 1 nothing. No hook or mode of the caller sees it; the host waits for it.

    Args:
        kind: A class of `torch.optim`.
        dtype: That of parameters and gradients.
        device: Where they are.

    Returns:
        What is wrong, as a part of a sentence, or None.

    Raises:
        Exception: What torch raises where the implementation does not take such parameters.
    """
    key = _key(kind, dtype, device)
    if key not in _faults:
        with _unseen():
            found = [_try(kind, dtype, device, each) for each in _OPTIONS.get(kind.__name__, [{}])]
        _faults[key] = next(filter(None, found), None)
    return _faults[key]


def is_tried(kind: type[torch.optim.Optimizer], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `fault_of` knows its answer without a trial."""
    return _key(kind, dtype, device) in _faults


def _key(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    return kind, dtype, device.type, operators(torch)


@contextmanager
def _unseen() -> Iterator[None]:
    """Keeps the caller's modes, such as one that counts operators, from what runs inside."""
    functions = torch._C.DisableTorchFunction()
    # First, since the others are functions that a mode sees.
    with functions, _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def _try(
    kind: type[torch.optim.Optimizer],
    dtype: torch.dtype,
    device: torch.device,
    options: dict[str, Any],
) -> str | None:
    ramp = allocate(torch.arange, 64, dtype=torch.float32, device=device)
    start, gradient = (1 + ramp / 64).to(dtype), (4 + ramp / 16).to(dtype)
    gradient[::2].neg_()
    zero, one, two = (
        allocate(torch.full, (), value, dtype=torch.float32, device=device)
        for value in (0.0, 1.0, 2.0)
    )

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
