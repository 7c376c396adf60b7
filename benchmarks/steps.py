"""Calls of the scaler over gradients, up to whole steps, beside torch's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor

import ampfast

from . import providers
from .cases import GradCase, make_gradients
from .kernels import QUICK_DTYPES, Lists, chosen, in_turn, lists_in_turn, lists_jobs
from .results import Row, Spread
from .timing import (
    Contender,
    Job,
    Measured,
    Setting,
    assert_same,
    dtype_name,
    ratio,
    time_contenders,
)

UNSCALE = "unscale_ + update"
STEP = "full step"
FUSED_STEP = "full step, fused"
STEP_AND_UPDATE = "step_and_update"
FUSED_STEP_AND_UPDATE = "step_and_update, fused"
# Calls without a counterpart in torch are compared with those that they replace.
REPLACES = {STEP_AND_UPDATE: STEP, FUSED_STEP_AND_UPDATE: FUSED_STEP}
PATHS = (STEP, STEP_AND_UPDATE, FUSED_STEP, FUSED_STEP_AND_UPDATE)
# With a record of each parameter's overflows, beside the same without.
TRACKED = {f"{path}, overflow": path for path in (UNSCALE, FUSED_STEP)}

# Parameters of small lists, of so few elements that overhead alone remains.
HOST_PARAMETERS = (1000, 160, 10)
ATEN_PARAMETERS = (10, 62, 1000)
ELEMENTS = 4
TRACKED_CPU_CASES = ("bert_base", "one_16m")
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


def is_fused(path: str) -> bool:
    return ", fused" in path


def measure(case: GradCase, dtype: torch.dtype, on: Setting) -> Measured:
    """Times the scaler's part of a step."""
    measured = time_calls("steps", PATHS, case, dtype, on, turns=True)
    if dtype is torch.float16:
        told = "full step: float16 gradients are unscaled by fused optimizers only"
        measured.notes.append(told)
    return measured


def small_case(parameters: int) -> GradCase:
    return GradCase(f"{parameters}x{ELEMENTS}", parameters * ((ELEMENTS,),))


def measure_host(parameters: int, paths: Sequence[str], on: Setting) -> Measured:
    """Times calls over small gradients until they return."""
    return _of_host(time_calls("host", paths, small_case(parameters), torch.float32, on))


def measure_aten(parameters: int, on: Setting) -> Measured:
    """Times plain and fused steps with torch's ops as the backend until they return."""
    case, paths = small_case(parameters), (STEP, FUSED_STEP)
    return _of_host(time_calls("aten", paths, case, torch.float32, on, ["aten"]))


def _of_host(measured: Measured) -> Measured:
    """Rows with host time only: on a CPU the call does the work itself."""

    def of_host(row: Row) -> Row:
        us, faster = row.host_us, row.host_vs_torch
        if us is None:
            us, faster = Spread(*(1e3 * ms for ms in row.ms)), row.vs_torch
        return replace(row, ms=None, timer=None, host_us=us, vs_torch=faster, host_vs_torch=None)

    return replace(measured, rows=list(map(of_host, measured.rows)))


def measure_tracking(case: GradCase, dtype: torch.dtype, on: Setting) -> Measured:
    """Times calls of ampfast's scaler with a record of each parameter's overflows and without."""
    paths = [path for pair in TRACKED.items() for path in reversed(pair)]
    measured = time_calls("tracking", paths, case, dtype, on, turns=True)
    ours = [replace(row, vs_torch=None) for row in measured.rows if row.side != "torch"]
    return replace(measured, rows=ours)


def host_jobs(on: Setting) -> list[Job]:
    """One job for each number of parameters and kind of step."""
    return [
        Job(f"{count} parameters, {paths[0]}", functools.partial(measure_host, count, paths, on))
        for count in HOST_PARAMETERS
        for paths in ((UNSCALE,), PATHS[:2], PATHS[2:])
    ]


def aten_jobs(on: Setting) -> list[Job]:
    """One job for each number of parameters."""
    return [
        Job(f"{count} parameters", functools.partial(measure_aten, count, on))
        for count in ATEN_PARAMETERS
    ]


def tracking_jobs(on: Setting) -> list[Job]:
    """One job for each list; on a CPU for some."""
    lists = chosen(on)
    if on.queue is None:
        lists = [(c, d) for c, d in lists if c.name in TRACKED_CPU_CASES and d in QUICK_DTYPES]
    return lists_jobs(on, measure_tracking, lists)


def time_calls(
    subject: str,
    paths: Sequence[str],
    case: GradCase,
    dtype: torch.dtype,
    on: Setting,
    names: Sequence[str] = (),
    turns: bool = False,
) -> Measured:
    """Times calls of torch's scaler and of ours with optimizers without work."""
    device, count = on.device, lists_in_turn(case, dtype, on, whole_calls=True)
    count = count if turns else 1
    available, notes = providers.available(device)
    names = names or available
    if dtype is torch.float16:
        # torch refuses to unscale them, so there is no reference.
        paths = [path for path in paths if is_fused(path)]
    for path in paths:
        for name in names:
            assert_parity(case, dtype, device, path, name)
    lists = Lists(case, dtype, device, count)
    optimizers = {
        fused: [optimizer_over(tensors, fused) for tensors in lists.lists]
        for fused in (False, True)
    }
    torchs = ["torch"] if providers.torch_takes(dtype, device) else []
    sides = [
        (path, name)
        for path in paths
        for name in ([] if path in REPLACES or path in TRACKED else torchs) + [*names]
    ]

    def contenders(count: int) -> list[Contender]:
        found = []
        for path, name in sides:
            call = caller(path, name, optimizers[is_fused(path)][:count], device)
            # The host decides whether to skip a plain step.
            waits = on.queue is not None and path.startswith((STEP, STEP_AND_UPDATE))
            found.append(Contender(path, name, call, waits=waits and not is_fused(path)))
        return found

    timed = time_contenders(
        *(subject, case, dtype, contenders(count), on),
        lists=count,
        alone=contenders(1),
        replaces=REPLACES,
    )
    lists.assert_steady()
    rows = [
        replace(row, over_none=ratio(timed.samples, (path, name), (TRACKED[path], name)))
        if path in TRACKED
        else row
        for (path, name), row in zip(sides, timed.rows(), strict=True)
    ]
    return Measured(rows, notes + timed.notes)


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
) -> tuple[Any, Callable[[NoOptimizer], object]]:
    """A scaler, and the calls of a path, as in a training loop."""
    scaler = make_scaler(name, device, scale, **{"track": "overflow"} if path in TRACKED else {})
    loss = torch.ones((), device=device)

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

    if path.startswith(UNSCALE):
        return scaler, unscale_and_update
    return scaler, step_and_update if path in REPLACES and name != "torch" else step


def caller(
    path: str, name: str, optimizers: Sequence[NoOptimizer], device: torch.device
) -> Callable[[int], object]:
    """One iteration per call: optimizers in turn, gradients halved and then doubled."""
    turns = [iteration(path, name, device, scale)[1] for scale in (2.0, 0.5)]
    return in_turn(lambda optimizer, turn: turns[turn](optimizer), optimizers)


def assert_parity(
    case: GradCase, dtype: torch.dtype, device: torch.device, path: str, name: str
) -> None:
    """Compares gradients, scale and tracker after a finite step and one with an inf and a NaN.

    torch's scaler steps on the CPU where its op lacks the dtype on that device.
    """
    oracle = device if providers.torch_takes(dtype, device) else torch.device("cpu")
    ours = make_gradients(case, dtype, device)
    theirs = [gradient.to(oracle, copy=True) for gradient in ours]
    bad_ones = sorted({len(ours) // 2, len(ours) - 1})
    sides = []
    for provider, tensors, place in (("torch", theirs, oracle), (name, ours, device)):
        scaler, call = iteration(path, provider, place, 3.0)
        sides.append((scaler, call, optimizer_over(tensors, is_fused(path)), tensors))
    for bad in (False, True):
        for _, call, optimizer, tensors in sides:
            if bad:
                tensors[bad_ones[-1]].view(-1)[0] = math.nan
                tensors[bad_ones[0]].view(-1)[-1] = math.inf
            call(optimizer)
        expected, found = ([*tensors, *scaler_state(scaler)] for scaler, _, _, tensors in sides)
        what = f"{path} by {name}, {case.name} {dtype_name(dtype)}, "
        what += f"{'with' if bad else 'without'} an infinity"
        assert_same(found, [tensor.to(device) for tensor in expected], what)
        if path in TRACKED:
            marked = [each.index for each in sides[1][0].overflow_report().totals]
            if marked != (bad_ones if bad else []):
                raise AssertionError(f"marks of {what}: {marked}")


# Growth: lists of ever more tensors, and one tensor of ever more elements.
TENSORS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
TENSOR_SIZES = tuple(10**power for power in range(3, 10))
ELEMENTS_EACH = 100
# A point of a curve takes only a fraction of a comparison's time.
PART_OF_COMPARISON = 1 / 3


@dataclass
class Curve:
    """Cost as a function of one number, with the other fixed."""

    unit: str
    sizes: tuple[int, ...]
    linear_from: int
    points: dict[str, dict[int, float]] = field(default_factory=dict)

    def measure(self, size: int, on: Setting) -> Measured:
        """Times `unscale_` and `update` of a point and adds it to the curve."""
        tensors, elements = (size, ELEMENTS_EACH) if self.unit == "tensors" else (1, size)
        case = GradCase(f"{tensors}x{elements}", tensors * ((elements,),))
        comparison_s = PART_OF_COMPARISON * on.effort.comparison_s
        short = replace(on, effort=replace(on.effort, comparison_s=comparison_s))
        measured = time_calls("growth", (UNSCALE,), case, torch.float32, short)
        about = {"call": f"by {self.unit}", "tensors": tensors, "elements": case.elements}
        for row in measured.rows:
            self.points.setdefault(row.side, {})[size] = row.ms.p50
        return replace(measured, rows=[replace(row, **about) for row in measured.rows])

    def slope(self) -> Measured:
        """A row for each side with the cost of one more, from at least two points.

        Least squares of relative distances: by absolute ones the largest point would decide alone.
        """
        measured = Measured()
        for side, points in self.points.items():
            line = {size: 1e6 * ms for size, ms in points.items() if size >= self.linear_from}
            if len(line) < 2:
                told = f"two points from {self.linear_from:,} {self.unit} on"
                measured.notes.append(f"growth: no slope of {side}: it takes {told}")
                continue
            ns = numpy.array(list(line.values()))
            each = float(numpy.polyfit(list(line), ns, 1, w=1 / ns)[0])
            theirs = next((row.ns_each for row in measured.rows if row.side == "torch"), None)
            name = ("growth", f"{min(line):,} to {max(line):,} {self.unit}", "float32")
            row = Row(*name, f"by {self.unit}, slope", side, ns_each=each)
            measured.rows.append(replace(row, vs_torch=theirs and theirs / each))
        return measured


def curves(quick: bool) -> list[Curve]:
    tensors, sizes = (TENSORS[::2], TENSOR_SIZES[:-1]) if quick else (TENSORS, TENSOR_SIZES)
    return [Curve("tensors", tensors, 10_000), Curve("elements", sizes, 10**7)]


def growth_jobs(on: Setting) -> list[Job]:
    """One job for each point, and one for each curve's slope."""
    return [
        job
        for curve in curves(on.effort.quick)
        for job in (
            *(
                Job(f"{size:,} {curve.unit}", functools.partial(curve.measure, size, on))
                for size in curve.sizes
            ),
            Job(f"slope by {curve.unit}", curve.slope),
        )
    ]
