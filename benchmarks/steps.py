"""Calls of the scaler over gradients, clipping and whole steps included, beside torch's."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import ampfast

from . import providers
from .cases import GradCase, dtype_name, make_gradients
from .kernels import MEMORY_OF_LISTS, assert_steady, in_turn, lists_in_turn
from .machine import require_memory
from .providers import exact_norm
from .timing import Contenders, Job, Measured, Setting, Subject, assert_same

UNSCALE = "unscale_ + update"
STEP, FUSED_STEP = "full step", "full step, fused"
STEP_AND_UPDATE, FUSED_STEP_AND_UPDATE = "step_and_update", "step_and_update, fused"
CLIP, DEFERRED_CLIP = CLIPS = ("clip", "clip, in_place=False")
# Calls without a counterpart in torch are compared with those that they replace.
REPLACES = {STEP_AND_UPDATE: STEP, FUSED_STEP_AND_UPDATE: FUSED_STEP, DEFERRED_CLIP: CLIP}
PATHS = (STEP, STEP_AND_UPDATE, FUSED_STEP, FUSED_STEP_AND_UPDATE)
# Calls of the subjects over real lists.
OVER_LISTS = {"steps": PATHS, "clip": CLIPS}
# Relative tolerances: of a norm, of float64 sums of the same 1e8 squares in different orders, and
# of values that are clipped again and again, which are rounded each time.
NORM_TOLERANCE, ORDER_OF_SUMS, DRIFT = 1e-6, 1e-12, 0.02

# Parameters of small lists, of so few elements that overhead alone remains.
HOST_PARAMETERS = (1000, 160, 10)
ATEN_PARAMETERS = (10, 62, 1000)
ELEMENTS = 4
# Beyond the tracker, so the scale is constant.
NEVER = 2**31 - 1


class NoOptimizer(torch.optim.Optimizer):
    """Optimizer that leaves its parameters alone; `limit` is that of a clip."""

    limit = math.inf

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        return None


class NoFusedOptimizer(NoOptimizer):
    """The same with `grad_scale` and `found_inf`."""

    _step_supports_amp_scaling = True


def is_fused(path: str) -> bool:
    """Whether the optimizer unscales, or leaves it to the clipping by either side."""
    return ", fused" in path or path in CLIPS


def small_job(
    subject: str, parameters: int, paths: Sequence[str], on: Setting, names: Sequence[str] = ()
) -> Job:
    """Times calls over small gradients until they return."""
    case = GradCase(f"{parameters}x{ELEMENTS}", parameters * ((ELEMENTS,),))
    over = Subject(subject, case, torch.float32, is_host=True)
    measure = functools.partial(time_calls, over, paths, on, names)
    return Job(f"{parameters} parameters, {paths[0]}", measure)


def host_jobs(on: Setting) -> list[Job]:
    """One job for each number of parameters and kind of step."""
    kinds = ((UNSCALE,), PATHS[:2], PATHS[2:])
    return [small_job("host", count, each, on) for count in HOST_PARAMETERS for each in kinds]


def aten_jobs(on: Setting) -> list[Job]:
    """Plain and fused steps with torch's ops as the backend, for each number of parameters."""
    paths = STEP, FUSED_STEP
    return [small_job("aten", count, paths, on, ["aten"]) for count in ATEN_PARAMETERS]


def measure(name: str, case: GradCase, dtype: torch.dtype, on: Setting) -> Measured:
    """Times the calls of a subject over a list."""
    paths, notes = OVER_LISTS[name], []
    if dtype is torch.float16:
        # There is no reference.
        paths = tuple(path for path in paths if ", fused" in path)
        notes = ["torch refuses to unscale float16 gradients, so fused steps alone are measured"]
    if not paths:
        return Measured(notes=notes)
    lists = lists_in_turn(case, dtype, on, whole_calls=True)
    measured = time_calls(Subject(name, case, dtype, lists), paths, on)
    return replace(measured, notes=notes + measured.notes)


def time_calls(
    subject: Subject, paths: Sequence[str], on: Setting, names: Sequence[str] = ()
) -> Measured:
    """Times calls of torch's scaler and of ours with optimizers without work."""
    case, dtype, device = subject.case, subject.dtype, on.device
    require_memory(MEMORY_OF_LISTS * subject.lists * case.list_bytes(dtype), device)
    available, notes = providers.available(device)
    names = names or available
    for path, name in itertools.product(paths, names):
        compare = assert_clip_parity if path in CLIPS else assert_parity
        compare(case, dtype, device, path, name)
    lists = [make_gradients(case, dtype, device) for _ in range(subject.lists)]
    optimizers = {
        fused: [optimizer_over(tensors, fused) for tensors in lists] for fused in (False, True)
    }
    has_torch = providers.torch_takes(dtype, device)
    contenders: Contenders = {}
    for path in paths:
        for name in (["torch"] if has_torch and path not in REPLACES else []) + [*names]:
            contenders[path, name] = caller(path, name, optimizers[is_fused(path)], device)
    rows = replace(subject, replaces=REPLACES).time(contenders, on)
    drift = DRIFT if CLIP in paths else 0.0
    assert_steady(lists, f"{case.name} {dtype_name(dtype)}", drift=drift)
    return Measured(rows, notes)


def optimizer_over(gradients: Sequence[Tensor], fused: bool) -> NoOptimizer:
    """Optimizer over one-element parameters with these gradients."""
    parameters = []
    for gradient in gradients:
        parameter = gradient.new_zeros(()).expand(gradient.shape).requires_grad_()
        parameter.grad = gradient
        parameters.append(parameter)
    return (NoFusedOptimizer if fused else NoOptimizer)(parameters)


def make_scaler(name: str, device: torch.device, scale: float, **features: Any) -> Any:
    """Started scaler of torch, or with one of ampfast's backends; its scale never grows."""
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


def iteration(
    path: str, name: str, device: torch.device, scale: float
) -> tuple[Any, Callable[[NoOptimizer], Any]]:
    """A scaler, and the calls of a path, as in a training loop."""
    scaler = make_scaler(name, device, scale)
    loss, in_place = torch.ones((), device=device), path == CLIP

    def clip(optimizer: NoOptimizer) -> Tensor:
        # Drops the previous record, as there is no update.
        scaler._per_optimizer_states.clear()
        if name != "torch":
            return scaler.clip_grad_norm_(optimizer, optimizer.limit, in_place=in_place)
        scaler.unscale_(optimizer)
        return clip_grad_norm_(optimizer.param_groups[0]["params"], optimizer.limit)

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

    if path in CLIPS:
        return scaler, clip
    if path == UNSCALE:
        return scaler, unscale_and_update
    return scaler, step_and_update if path in REPLACES and name != "torch" else step


def caller(
    path: str, name: str, optimizers: Sequence[NoOptimizer], device: torch.device
) -> Callable[[int], object]:
    """One iteration per call: optimizers in turn, gradients halved and then doubled.

    Where they are clipped, they are doubled and clipped to the norm that they had.
    """
    for optimizer in optimizers if path in CLIPS else ():
        optimizer.limit = exact_norm([p.grad for p in optimizer.param_groups[0]["params"]])
    scales = (0.5, 0.5) if path in CLIPS else (2.0, 0.5)
    turns = [iteration(path, name, device, scale)[1] for scale in scales]
    return in_turn(lambda optimizer, turn: turns[turn](optimizer), optimizers)


def _sides(
    case: GradCase, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor], torch.device]:
    """Gradients, equal ones for torch, and their device: the CPU where its op lacks the dtype."""
    oracle = device if providers.torch_takes(dtype, device) else torch.device("cpu")
    ours = make_gradients(case, dtype, device)
    return ours, [gradient.to(oracle, copy=True) for gradient in ours], oracle


def assert_parity(
    case: GradCase, dtype: torch.dtype, device: torch.device, path: str, name: str
) -> None:
    """Compares gradients, scale and tracker after a finite step and one with an inf and a NaN."""
    ours, theirs, oracle = _sides(case, dtype, device)
    sides = []
    for provider, tensors, place in (("torch", theirs, oracle), (name, ours, device)):
        scaler, call = iteration(path, provider, place, 3.0)
        sides.append((scaler, call, optimizer_over(tensors, is_fused(path)), tensors))
    for bad in (False, True):
        for _, call, optimizer, tensors in sides:
            if bad:
                tensors[-1].view(-1)[0] = math.nan
                tensors[len(tensors) // 2].view(-1)[-1] = math.inf
            call(optimizer)
        expected, found = ([*tensors, *scaler_state(scaler)] for scaler, _, _, tensors in sides)
        what = f"{path} by {name}, {case.name} {dtype_name(dtype)}, "
        what += f"{'with' if bad else 'without'} an infinity"
        assert_same(found, [tensor.to(device) for tensor in expected], what)


def assert_clip_parity(
    case: GradCase, dtype: torch.dtype, device: torch.device, path: str, name: str
) -> None:
    """Compares norm and gradients with torch's, within the error of torch's own norm."""
    ours, theirs, oracle = _sides(case, dtype, device)
    scale, what = 0.5, f"{path} by {name}, {case.name} {dtype_name(dtype)}"
    exact = exact_norm(ours) / scale
    optimizers = [optimizer_over(tensors, True) for tensors in (theirs, ours)]
    for optimizer in optimizers:
        optimizer.limit = exact / 3
    _, call = iteration(path, "torch", oracle, scale)
    # torch rounds 16-bit norms to 16 bit.
    error = abs(call(optimizers[0]).item() - exact) / exact
    scaler, call = iteration(path, name, device, scale)
    norm = call(optimizers[1]).item()
    if abs(norm - exact) > NORM_TOLERANCE * exact:
        raise AssertionError(f"{what}: the norm is {norm}, not {exact}")
    if path == DEFERRED_CLIP:
        # Left to the optimizer.
        torch._foreach_div_(ours, scaler._per_optimizer_states[id(optimizers[1])].divisor)
    tolerance = error + 4 * torch.finfo(dtype).eps + ORDER_OF_SUMS
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their.to(device), rtol=tolerance, atol=0)
