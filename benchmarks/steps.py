"""Whole steps, from scale(loss) to update(), over real lists: scalers of ampfast and torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import ampfast

from . import counts, goals, providers
from .cases import GradCase, make_gradients
from .device_time import EventTimer, Queue, host_timer
from .goals import FUSED_STEP, STEP
from .harness import Contender, Effort, Measured, assert_same, interleave
from .host_time import NoFusedOptimizer, NoOptimizer
from .kernels import MEMORY_OF_LISTS, Lists, lists_beyond_cache
from .machine import require_memory, tensors_per_launch
from .rows import Timed, dtype_name

STEP_AND_UPDATE = "step_and_update"
FUSED_STEP_AND_UPDATE = "step_and_update, fused"
REPLACES = {STEP_AND_UPDATE: STEP, FUSED_STEP_AND_UPDATE: FUSED_STEP}
FUSED = (FUSED_STEP, FUSED_STEP_AND_UPDATE)

# The scaler keeps some tens of tables; more lists would upload at every call, unlike a loop with
# one optimizer.
MOST_LISTS = 8
# Beyond the tracker, so the scale is constant.
NEVER = 2**31 - 1


def lists_in_turn(
    case: GradCase, dtype: torch.dtype, device: torch.device, queue: Queue | None
) -> int:
    """Number of lists in turn for whole calls: more than one only on a GPU.

    Raises:
        MemoryError: If they would not fit.
    """
    list_bytes = case.list_bytes(dtype)
    lists = 1 if queue is None else lists_beyond_cache(list_bytes, device, MOST_LISTS)
    require_memory(int(max(lists, MEMORY_OF_LISTS) * list_bytes), device)
    return lists


def measure(
    case: GradCase,
    dtype: torch.dtype,
    device: torch.device,
    effort: Effort,
    queue: Queue | None = None,
) -> Measured:
    """Times the scaler's part of a step, with optimizers without work.

    Raises:
        AssertionError: If a result is not torch's, or the gradients drifted while timed.
        MemoryError: If the gradients would not fit.
    """
    lists = lists_in_turn(case, dtype, device, queue)
    names, notes = providers.available(device)
    measured = Measured(notes=notes)
    paths = [STEP, STEP_AND_UPDATE, FUSED_STEP, FUSED_STEP_AND_UPDATE]
    if dtype is torch.float16:
        # torch refuses to unscale them, so there is no reference.
        paths = list(FUSED)
        measured.notes.append("full step: float16 gradients are unscaled by fused optimizers only")
    takes = providers.torch_takes(dtype, device)
    for path in paths:
        for name in names:
            assert_parity(case, dtype, device, path, name)

    gradients = Lists(case, dtype, device, lists)
    subjects = [(path, name) for path in paths for name in names]
    if takes:
        subjects = [(path, "torch") for path in paths if path not in REPLACES] + subjects
    optimizers = {
        fused: [optimizer_over(tensors, fused) for tensors in gradients.lists]
        for fused in (False, True)
    }

    def contenders(lists: int) -> list[Contender]:
        return [
            Contender(
                path,
                name,
                caller(path, name, optimizers[path in FUSED][:lists], device),
                # The host decides whether to skip a plain step.
                waits=queue is not None and path not in FUSED,
            )
            for path, name in subjects
        ]

    counted: dict[tuple[str, str], counts.Counts | None] = {}
    host = None
    if queue is not None:
        alone = contenders(1)
        counted = counts.of_contenders(alone, queue)
        host = interleave(alone, replace(effort, sample_s=0.0), timer=host_timer(queue))
    in_turn = contenders(lists)
    if queue is None:
        name, samples = "wall", interleave(in_turn, effort, cycle=2 * lists)
    else:
        timer = EventTimer(queue, counts.launches(counted), 2 * lists)
        name, samples = timer.name, interleave(in_turn, effort, cycle=2 * lists, timer=timer)
    gradients.assert_steady()

    timed = Timed(
        *("steps", case, dtype, lists, in_turn, samples, name),
        host=host,
        counts=counted,
        replaces=REPLACES,
    )
    measured.rows += timed.rows()
    few = None
    if queue is not None:
        few = tensors_per_launch(torch.__version__, torch.version.cuda)
    place = goals.Place(
        case.name, measured.rows[0].list_name, dtype_name(dtype), case.list_bytes(dtype), few
    )
    for name in names:
        measured.goals += goals.of_steps(place, name, samples, host)
    return measured


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


def make_scaler(name: str, device: torch.device, scale: float) -> torch.amp.GradScaler:
    """Started scaler of torch, or with one of ampfast's backends; its scale never grows."""
    if name == "torch":
        scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=NEVER)
    else:
        scaler = ampfast.GradScaler(
            device.type, init_scale=scale, growth_interval=NEVER, backend=name
        )
    scaler.scale(torch.zeros((), device=device))
    return scaler


def caller(
    path: str, name: str, optimizers: Sequence[NoOptimizer], device: torch.device
) -> Callable[[int], None]:
    """One iteration per call: optimizers in turn, gradients halved and then doubled."""
    scalers = [make_scaler(name, device, scale) for scale in (2.0, 0.5)]
    loss = torch.ones((), device=device)

    def step(call: int) -> None:
        scaler = scalers[call // len(optimizers) % 2]
        scaler.scale(loss)
        scaler.step(optimizers[call % len(optimizers)])
        scaler.update()

    def step_and_update(call: int) -> None:
        scaler = scalers[call // len(optimizers) % 2]
        scaler.scale(loss)
        scaler.step_and_update(optimizers[call % len(optimizers)])

    return step_and_update if path in REPLACES else step


def assert_parity(
    case: GradCase, dtype: torch.dtype, device: torch.device, path: str, name: str
) -> None:
    """Compares gradients, scale and tracker after a step without an infinity and one with one.

    torch's scaler steps on the CPU where its op lacks the dtype on that device.
    """
    oracle = device if providers.torch_takes(dtype, device) else torch.device("cpu")
    theirs = make_gradients(case, dtype, device)
    ours = [gradient.clone() for gradient in theirs]
    theirs = [gradient.to(oracle) for gradient in theirs]
    fused = path in FUSED
    states = []
    for provider, tensors, place in (("torch", theirs, oracle), (name, ours, device)):
        scaler, optimizer = make_scaler(provider, place, 3.0), optimizer_over(tensors, fused)
        states.append((scaler, optimizer, tensors))
    for bad in (False, True):
        for scaler, optimizer, tensors in states:
            if bad:
                tensors[len(tensors) // 2].view(-1)[-1] = math.inf
            if path in REPLACES and isinstance(scaler, ampfast.GradScaler):
                scaler.step_and_update(optimizer)
            else:
                scaler.step(optimizer)
                scaler.update()
        expected, found = (
            [*tensors, scaler._scale, scaler._growth_tracker] for scaler, _, tensors in states
        )
        what = f"{path} by {name}, {case.name} {dtype_name(dtype)}"
        assert_same(
            found,
            [tensor.to(device) for tensor in expected],
            f"{what}, {'with' if bad else 'without'} an infinity",
        )
