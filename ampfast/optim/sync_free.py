"""In-place switch of torch's optimizers to their fused implementation, for steps without a sync."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.errors import refuse_differentiable
from ampfast.optim.fused_support import fault_of

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)

_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_FUSED = {"fused": True, "foreach": False}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# State that kernels index like the parameter.
_ELEMENTWISE_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")


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
            f"got {kind.__module__}.{kind.__qualname__}: pass the optimizer that it wraps, before "
            "master_weights_, or fused=True to its constructor, or keep it, which GradScaler steps "
            "with one host sync"
        )
    refuse_capture("sync_free_, which moves step counters", "call it before")
    refuse_differentiable(optimizer.param_groups, "torch's fused implementation does")
    # Counters created in inference mode could not be written outside of it.
    with torch.inference_mode(False), torch.no_grad():
        for index, group in enumerate(optimizer.param_groups):
            _check_group(optimizer, index, group)
        for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            state: Any = optimizer.state.get(param, {})
            if "step" in state:
                at = param.device
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=at)
    for group in optimizer.param_groups:
        group.update(_FUSED)
    optimizer.defaults.update(_FUSED)
    vars(optimizer)["_step_supports_amp_scaling"] = True
    if _stay_fused not in optimizer._optimizer_load_state_dict_pre_hooks.values():
        optimizer.register_load_state_dict_pre_hook(_stay_fused)
    return optimizer


def _stay_fused(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """State dict as saved by a fused optimizer, whose counters torch moves when loading."""
    groups = [{**group, **_FUSED} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def _check_group(optimizer: torch.optim.Optimizer, index: int, group: dict[str, Any]) -> None:
    """Refuses parameters whose kernels fail a trial, or would misread memory."""
    for number, param in enumerate(group["params"]):
        state = optimizer.state.get(param, {})
        # A parameter without a step may have any dtype, as in a quantised model.
        if not state and not param.requires_grad and param.grad is None:
            continue
        where = f"parameter {number} of group {index}"
        if "param_names" in group:
            where += f" ({group['param_names'][number]})"
        if fault := fault_of(type(optimizer), param.dtype, param.device):
            raise ValueError(
                f"torch's fused {type(optimizer).__name__} cannot step {where}, a {param.dtype} on "
                f"{param.device}: it {fault}, as a trial has found: keep the optimizer, which "
                "GradScaler steps with one host sync"
            )
        if type(param) in _PLAIN:  # a subclass defines its own layout
            tensors = {f"the {key!r} of {where}": state.get(key) for key in _ELEMENTWISE_STATE}
            tensors = {where: param, f"the gradient of {where}": param.grad, **tensors}
            _require_same_memory(param, tensors)


def _require_same_memory(param: Tensor, tensors: dict[str, Any]) -> None:
    """Refuses layouts that fused kernels, which index memory linearly, would misread."""
    look, is_dense = _look(param), param.layout is torch.strided
    # empty_like preserves strides only of dense tensors without overlap.
    is_dense = is_dense and torch.empty_like(param, device="meta").stride() == param.stride()
    for name, value in tensors.items():
        if isinstance(value, Tensor) and not (is_dense and _look(value) == look):
            raise ValueError(
                f"{name} is {_look(value)}: torch's fused kernels need dense tensors, without "
                f"overlap or gaps, that are all as the parameter is, {look}"
            )


def _look(tensor: Tensor) -> str:
    strides = tensor.stride() if tensor.layout is torch.strided else "none"
    kind = f"{tensor.layout}, {tensor.dtype}, on {tensor.device}"
    return f"{kind}, of shape {tuple(tensor.shape)} and strides {strides}"
