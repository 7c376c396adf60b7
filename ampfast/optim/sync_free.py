"""In-place switch of torch's optimizers to their fused implementation, for steps without a sync."""

from __future__ import annotations

import inspect
from itertools import product
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.backends.scalars import allocate
from ampfast.errors import refuse_differentiable
from ampfast.optim.fused_support import fault_of

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)

_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_FUSED = {"fused": True, "foreach": False}
_FUSED_DOES = "torch's fused implementation does"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# State that kernels index like the parameter.
_ELEMENTWISE_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
_ATTRIBUTES = ("layout", "dtype", "device", "shape", "order in memory")


def sync_free_(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Turns on the fused implementation of an optimizer in place and keeps its state.

    A `GradScaler` then passes `grad_scale` and `found_inf` to `step`, which skips on the device,
    without a host sync. The optimizer is as if constructed with `fused=True` and loaded with its
    state: momenta and sums stay the same tensors, step counters become float32 tensors on their
    parameter's device. Groups added or loaded later are fused, too. A second call has no effect.

    The limits of torch's fused optimizers hold: hyperparameters that are tensors on a GPU are read
    with a sync, except for the learning rate, a scaler steps a copied or unpickled one as a plain
    optimizer until `sync_free_` is called on it, `step` refuses sparse gradients, and SGD with
    momentum refuses a parameter whose first gradient comes later than others of its group.

    Source: torch.optim's constructors and `Optimizer.load_state_dict`.

    Args:
        optimizer: A `torch.optim.Adam`, `AdamW`, `SGD` or `Adagrad`; no subclass.

    Returns:
        The optimizer.

    Raises:
        TypeError: If it is of another class.
        ValueError: If a group is differentiable, if torch's fused implementation does not support
            the device or dtype of a parameter or fails a trial with them, or if a parameter, its
            gradient and its state differ in dtype, device or strides or are not dense.
        RuntimeError: Under CUDA graph capture.

    The optimizer is unchanged where an error is raised.
    """
    kind = type(optimizer)
    if kind not in _KINDS:
        raise TypeError(
            "sync_free_ takes torch.optim.Adam, AdamW, SGD and Adagrad, no subclass or wrapper, "
            f"got {kind.__module__}.{kind.__qualname__}: pass the optimizer that it wraps, or "
            "fused=True to its constructor, or keep it, which GradScaler steps with one host sync"
        )
    refuse_capture("sync_free_, which moves step counters", "call it before")
    refuse_differentiable(optimizer.param_groups, _FUSED_DOES)
    # Counters created in inference mode could not be written outside of it.
    with torch.inference_mode(False), torch.no_grad():
        for index, group in enumerate(optimizer.param_groups):
            _check_group(optimizer, index, group)
        counters = [
            (state, torch.as_tensor(state["step"], dtype=torch.float32, device=param.device))
            for group in optimizer.param_groups
            for param in group["params"]
            if "step" in (state := optimizer.state.get(param, {}))
        ]
    for state, counter in counters:
        state["step"] = counter
    for group in optimizer.param_groups:
        group.update(_FUSED)
    optimizer.defaults.update(_FUSED)
    vars(optimizer)["_step_supports_amp_scaling"] = True
    if _stay_fused not in optimizer._optimizer_load_state_dict_pre_hooks.values():
        optimizer.register_load_state_dict_pre_hook(_stay_fused)
    return optimizer


def _stay_fused(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """State dict as saved by a fused optimizer, whose counters torch moves when loading."""
    saved = state_dict["param_groups"]
    refuse_differentiable(saved, _FUSED_DOES, " of the state dict")
    return {**state_dict, "param_groups": [{**group, **_FUSED} for group in saved]}


def _check_group(optimizer: torch.optim.Optimizer, index: int, group: dict[str, Any]) -> None:
    tried = set()
    for number, param in enumerate(group["params"]):
        state = optimizer.state.get(param)
        # A parameter without a step may have any dtype, as in a quantised model.
        if not state and not param.requires_grad and param.grad is None:
            continue
        where = f"parameter {number} of group {index}"
        if "param_names" in group:
            where += f" ({group['param_names'][number]})"
        like = param.device, param.dtype
        if like not in tried:
            tried.add(like)
            _try_step(type(optimizer), group, param, where)
        tensors = {f"the {key!r}": (state or {}).get(key) for key in _ELEMENTWISE_STATE}
        _check_memory(param, {"the gradient": param.grad, **tensors}, where)


def _try_step(
    kind: type[torch.optim.Optimizer], group: dict[str, Any], param: Tensor, where: str
) -> None:
    """Steps a one-element parameter like `param`, since kernels differ between torch versions."""
    trial = allocate(torch.zeros, 1, dtype=param.dtype, device=param.device)
    trial.grad = torch.zeros_like(trial)
    optimizer = kind([trial], fused=True)  # type: ignore[call-arg]
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    optimizer.param_groups[0].update(options, **_FUSED)
    try:
        # Unwrapped, since global optimizer hooks would see this step.
        inspect.unwrap(kind.step)(optimizer)
    except (RuntimeError, TypeError, ValueError) as error:
        what = "" if type(param) in _PLAIN else f" {type(param).__name__}"
        raise ValueError(
            f"torch's fused {kind.__name__} cannot step {where}, a {param.dtype}{what} on "
            f"{param.device}: {error}"
        ) from error
    fault = fault_of(kind, param.dtype, param.device)
    if fault is not None:
        raise ValueError(
            f"torch's fused {kind.__name__} {fault}, for {where}, a {param.dtype} on "
            f"{param.device}, as a trial has found: keep the optimizer, which GradScaler steps "
            "with one host sync"
        )


def _check_memory(param: Tensor, tensors: dict[str, Any], where: str) -> None:
    """Refuses layouts that fused kernels, which index memory linearly, would misread."""
    if type(param) not in _PLAIN:
        return  # a subclass defines its own layout
    if param.layout is not torch.strided:
        raise ValueError(f"{where} is {param.layout}; torch's fused kernels need strided tensors")
    # empty_like preserves strides only of dense tensors without overlap.
    if torch.empty_like(param, device="meta").stride() != param.stride():
        raise ValueError(
            f"{where} has strides {param.stride()} for shape {tuple(param.shape)}: its elements "
            "overlap or leave gaps, and torch's fused kernels need dense tensors"
        )
    for (name, value), what in product(tensors.items(), _ATTRIBUTES):
        if isinstance(value, Tensor):
            get = Tensor.stride if what == "order in memory" else attrgetter(what)
            if get(value) != get(param):
                raise ValueError(
                    f"{name} of {where} has another {what}: {get(value)}, not {get(param)}; "
                    "torch's fused kernels need the same"
                )
