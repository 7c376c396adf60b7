"""Calls of the scaler over gradients, up to whole steps, beside torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import ampfast

from . import goals, providers
from .cases import GradCase, make_gradients
from .goals import FUSED_STEP, STEP
from .harness import Contender, Measured, Setting, assert_same
from .kernels import MEMORY_OF_LISTS, Lists, lists_beyond_cache
from .machine import require_memory
from .timing import Timed, dtype_name, time_contenders

UNSCALE = "unscale_ + update"
STEP_AND_UPDATE = "step_and_update"
FUSED_STEP_AND_UPDATE = "step_and_update, fused"
# Calls without a counterpart in torch are compared with those that they replace.
REPLACES = {STEP_AND_UPDATE: STEP, FUSED_STEP_AND_UPDATE: FUSED_STEP}
FUSED = (FUSED_STEP, FUSED_STEP_AND_UPDATE)
PATHS = (STEP, STEP_AND_UPDATE, *FUSED)

# The scaler keeps some tens of tables; more lists would upload at every call, unlike a loop with
# one optimizer.
MOST_LISTS = 8
# Beyond the tracker, so the scale is constant.
NEVER = 2**31 - 1


class NoOptimizer(torch.optim.Optimizer):
    """Optimizer that leaves its parameters alone."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        return None


class NoFusedOptimizer(NoOptimizer):
    """The same with `grad_scale` and `found_inf`."""

    _step_supports_amp_scaling = True


def measure(case: GradCase, dtype: torch.dtype, on: Setting) -> Measured:
    """Times the scaler's part of a step."""
    lists = lists_in_turn(case, dtype, on)
    notes = []
    if dtype is torch.float16:
        notes.append("full step: float16 gradients are unscaled by fused optimizers only")
    timed, more = time_calls("steps", PATHS, case, dtype, on, lists)
    measured = Measured(timed.rows(), notes=notes + more)
    for name in providers.available(on.device)[0]:
        measured.goals += goals.of_steps(timed, name)
    return measured


def lists_in_turn(case: GradCase, dtype: torch.dtype, on: Setting) -> int:
    """Number of lists in turn for whole calls, which must fit: more than one only on a GPU."""
    size = case.list_bytes(dtype)
    lists = 1 if on.queue is None else lists_beyond_cache(size, on.device, MOST_LISTS)
    require_memory(int(max(lists, MEMORY_OF_LISTS) * size), on.device)
    return lists


def time_calls(
    subject: str,
    paths: Sequence[str],
    case: GradCase,
    dtype: torch.dtype,
    on: Setting,
    lists: int = 1,
) -> tuple[Timed, list[str]]:
    """Times calls of the scaler with optimizers without work, and returns notes."""
    names, notes = providers.available(on.device)
    if dtype is torch.float16:
        # torch refuses to unscale them, so there is no reference.
        paths = [path for path in paths if path in FUSED]
    for path in paths:
        for name in names:
            assert_parity(case, dtype, on.device, path, name)
    gradients = Lists(case, dtype, on.device, lists)
    optimizers = {
        fused: [optimizer_over(tensors, fused) for tensors in gradients.lists]
        for fused in (False, True)
    }
    torchs = ("torch",) if providers.torch_takes(dtype, on.device) else ()

    def contenders(lists: int) -> list[Contender]:
        return [
            Contender(
                path,
                name,
                caller(path, name, optimizers[path in FUSED][:lists], on.device),
                # The host decides whether to skip a plain step.
                waits=on.queue is not None and path not in (UNSCALE, *FUSED),
            )
            for path in paths
            for name in (*(() if path in REPLACES else torchs), *names)
        ]

    timed = time_contenders(
        *(subject, case, dtype, contenders(lists), on),
        lists=lists,
        alone=contenders(1),
        replaces=REPLACES,
    )
    gradients.assert_steady()
    return timed, notes


def optimizer_over(gradients: Sequence[Tensor], fused: bool) -> NoOptimizer:
    """Optimizer over one-element parameters with these gradients.

    Values of parameters are never read, so all may be one tensor.
    """
    parameters = []
    for gradient in gradients:
        parameter = gradient.new_zeros(()).expand(gradient.shape).requires_grad_()
        parameter.grad = gradient
        parameters.append(parameter)
    return (NoFusedOptimizer if fused else NoOptimizer)(parameters)


def make_scaler(name: str, device: torch.device, scale: float, **features: Any) -> Any:
    """Started scaler of torch, or with one of ampfast's backends; its scale never grows.

    `features` are for ampfast's alone.
    """
    settings: dict[str, Any] = {"init_scale": scale, "growth_interval": NEVER}
    if name == "torch":
        scaler: Any = torch.amp.GradScaler(device.type, **settings)
    else:
        scaler = ampfast.GradScaler(device.type, **settings, backend=name, **features)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def scaler_state(scaler: torch.amp.GradScaler) -> list[Tensor]:
    """Scale and growth tracker of a used scaler."""
    return [scaler._scale, scaler._growth_tracker]


def iteration(path: str, scaler: Any, loss: Tensor) -> Callable[[NoOptimizer], object]:
    """Calls of a path, as in a training loop."""

    def unscale_and_update(optimizer: NoOptimizer) -> None:
        scaler.unscale_(optimizer)
        scaler.update()

    def step(optimizer: NoOptimizer) -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    def step_and_update(optimizer: NoOptimizer) -> None:
        scaler.scale(loss)
        scaler.step_and_update(optimizer)

    if path == UNSCALE:
        return unscale_and_update
    at_once = path in REPLACES and isinstance(scaler, ampfast.GradScaler)
    return step_and_update if at_once else step


def caller(
    path: str, name: str, optimizers: Sequence[NoOptimizer], device: torch.device
) -> Callable[[int], object]:
    """One iteration per call: optimizers in turn, gradients halved and then doubled."""
    loss = torch.ones((), device=device)
    halve, double = (iteration(path, make_scaler(name, device, s), loss) for s in (2.0, 0.5))
    count = len(optimizers)
    return lambda call: (double if call // count % 2 else halve)(optimizers[call % count])


def assert_parity(
    case: GradCase, dtype: torch.dtype, device: torch.device, path: str, name: str
) -> None:
    """Compares gradients, scale and tracker after a step without an infinity and one with one.

    torch's scaler steps on the CPU where its op lacks the dtype on that device.
    """
    oracle = device if providers.torch_takes(dtype, device) else torch.device("cpu")
    ours = make_gradients(case, dtype, device)
    theirs = [gradient.to(oracle, copy=True) for gradient in ours]
    states = []
    for provider, tensors, place in (("torch", theirs, oracle), (name, ours, device)):
        scaler = make_scaler(provider, place, 3.0)
        call = iteration(path, scaler, torch.ones((), device=place))
        states.append((scaler, call, optimizer_over(tensors, path in FUSED), tensors))
    for bad in (False, True):
        for _, call, optimizer, tensors in states:
            if bad:
                tensors[len(tensors) // 2].view(-1)[-1] = math.inf
            call(optimizer)
        expected, found = ([*tensors, *scaler_state(scaler)] for scaler, _, _, tensors in states)
        assert_same(
            found,
            [tensor.to(device) for tensor in expected],
            f"{path} by {name}, {case.name} {dtype_name(dtype)}, "
            f"{'with' if bad else 'without'} an infinity",
        )
