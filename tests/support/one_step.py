"""One step of a scaler: parameters, optimizer and what the optimizer was given."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampfast import GradScaler
from support.gradients import parameter_with
from support.optimizers import FUSED, OPTIMIZERS
from support.scalers import TorchScaler

F32_MAX = torch.finfo(torch.float32).max
# An inverse of this scale or a smaller one is infinite in float32.
TINY = 2.0**-128


def _takes_grad_scale(kind: str) -> bool:
    parameter = torch.nn.Parameter(torch.ones(1))
    return getattr(OPTIMIZERS[kind]([parameter]), "_step_supports_amp_scaling", False)


# Scalers take the fused Adagrad of torch 2.11 for a plain optimizer.
TAKE_GRAD_SCALE = tuple(kind for kind in FUSED if _takes_grad_scale(kind))


@dataclass
class Setup:
    """Started scaler, parameters of value 1 with given gradients, and their optimizer."""

    scaler: Any
    optimizer: Any
    parameters: list[torch.nn.Parameter]
    calls: list[tuple[Any, Any]]

    def step(self) -> Any:
        return self.scaler.step(self.optimizer)

    def finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.parameters)

    def untouched(self) -> bool:
        return all(bool((p == 1).all()) for p in self.parameters)

    def values(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.parameters]


def setup(
    scaler_type: type,
    optimizer: str | Callable[..., Any],
    gradients: Sequence[torch.Tensor],
    scale: float = 2.0**16,
    **arguments: Any,
) -> Setup:
    parameters = [parameter_with(g.clone()) for g in gradients]
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    scaler = scaler_type("cpu", init_scale=scale, **arguments)
    scaler.scale(torch.ones(()))
    made = make(parameters)
    calls: list[tuple[Any, Any]] = []
    real_step = made.step

    def counted(_: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((getattr(made, "grad_scale", None), getattr(made, "found_inf", None)))
        return real_step(*args, **kwargs)

    # Learning rate schedules require a bound method.
    made.step = types.MethodType(counted, made)
    return Setup(scaler, made, parameters, calls)


def floats(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def both(*arguments: Any, **keywords: Any) -> tuple[Setup, Setup]:
    return setup(GradScaler, *arguments, **keywords), setup(TorchScaler, *arguments, **keywords)


def flags(run: Setup) -> list[float]:
    return [t.item() for t in run.scaler._found_inf_per_device(run.optimizer).values()]


def host_reads(call: Callable[[], Any]) -> int:
    """Number of tensor values read by the host in a call, outside of torch's own kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    items = [event for event in profile.events() if event.name == "aten::item"]
    # torch's fused kernels read their step counters in this way on the CPU.
    return sum(not (e.cpu_parent and "_fused_" in e.cpu_parent.name) for e in items)
