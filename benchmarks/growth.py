"""Cost of unscaling and updating as the number of tensors or of elements grows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import counts, providers
from .cases import GradCase, make_gradients
from .device_time import EventTimer, Queue, host_timer
from .harness import Contender, Effort, Job, Measured, assert_same, interleave
from .host_time import NoOptimizer
from .machine import require_memory
from .results import Row
from .rows import Timed
from .steps import make_scaler, optimizer_over
from .training import scaler_state

DTYPE = torch.float32
TENSORS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
ELEMENTS = (*(digit * 10**power for power in range(3, 9) for digit in (1, 3)), 10**9)
ELEMENTS_EACH = 100
# Gradients and a copy, compared piecewise.
MEMORY_OF_LISTS = 2.25
# A point of a curve takes only a fraction of a comparison's time.
PART_OF_COMPARISON = 1 / 3


@dataclass
class Curve:
    """Cost as a function of one number, with the other fixed.

    Attributes:
        path: Name of the rows.
        unit: Unit of the sizes.
        sizes: Sizes to measure.
        linear_from: Size from which fixed costs and caches no longer count.
        case: Gradients for a size.
        points: Measured milliseconds by provider and size.
    """

    path: str
    unit: str
    sizes: tuple[int, ...]
    linear_from: int
    case: Callable[[int], GradCase]
    points: dict[str, dict[int, float]] = field(default_factory=dict)

    def slope(self) -> Measured:
        """A row for each provider with the cost of one more, from at least two points.

        Least squares of relative distances: by absolute ones the largest point would decide alone.
        """
        measured = Measured()
        slopes: dict[str, float] = {}
        for provider, points in self.points.items():
            line = {size: ms for size, ms in points.items() if size >= self.linear_from}
            if len(line) < 2:
                measured.notes.append(
                    f"growth: no slope {self.path} of {provider}: it takes two points from "
                    f"{self.linear_from:,} {self.unit} on"
                )
                continue
            sizes = torch.tensor(list(line), dtype=torch.float64)
            times = torch.tensor(list(line.values()), dtype=torch.float64) * 1e6
            fixed_and_each = torch.stack([1 / times, sizes / times], dim=1)
            solved = torch.linalg.lstsq(fixed_and_each, torch.ones(len(line), 1).double())
            slopes[provider] = solved.solution[1].item()
            measured.rows.append(
                Row(
                    *("growth", f"{min(line):,} to {max(line):,} {self.unit}", "float32"),
                    *(f"{self.path}, slope", provider),
                    ns_each=slopes[provider],
                    vs_torch=None
                    if provider == "torch" or "torch" not in slopes
                    else slopes["torch"] / slopes[provider],
                )
            )
        return measured


def curves(effort: Effort) -> list[Curve]:
    """Both curves, without points."""
    tensors: tuple[int, ...] = TENSORS
    elements: tuple[int, ...] = ELEMENTS
    if effort.quick:
        tensors, elements = tensors[::2], elements[:-2:2]
    return [
        Curve(
            *("by tensors", "tensors", tensors, 10_000),
            lambda size: GradCase(f"{size}x{ELEMENTS_EACH}", size * ((ELEMENTS_EACH,),)),
        ),
        Curve(
            *("by elements", "elements", elements, 10**7),
            lambda size: GradCase(f"1x{size}", ((size,),)),
        ),
    ]


def jobs(effort: Effort, device: torch.device, queue: Queue | None) -> list[Job]:
    """One job for each point, and one for each curve's slope; `queue` is that of a GPU."""
    return [
        job
        for curve in curves(effort)
        for job in (
            *(
                Job(
                    f"{size:,} {curve.unit}",
                    functools.partial(measure, curve, size, device, effort, queue),
                )
                for size in curve.sizes
            ),
            Job(f"slope {curve.path}", curve.slope),
        )
    ]


def measure(
    curve: Curve, size: int, device: torch.device, effort: Effort, queue: Queue | None = None
) -> Measured:
    """Times a point and adds it to the curve.

    Raises:
        AssertionError: If gradients, scale or tracker are not torch's, or they drifted.
        MemoryError: If the gradients would not fit.
    """
    case = curve.case(size)
    require_memory(int(MEMORY_OF_LISTS * case.list_bytes(DTYPE)), device)
    names, notes = providers.available(device)
    gradients = make_gradients(case, DTYPE, device)
    for name in names:
        assert_parity(case, gradients, name)
    optimizer = optimizer_over(gradients, fused=False)
    contenders = [
        Contender(curve.path, name, caller(name, optimizer, device)) for name in ("torch", *names)
    ]
    short = replace(effort, comparison_s=PART_OF_COMPARISON * effort.comparison_s)
    counted: dict[tuple[str, str], counts.Counts | None] = {}
    host = None
    if queue is None:
        timer_name, samples = "wall", interleave(contenders, short)
    else:
        counted = counts.of_contenders(contenders, queue)
        host = interleave(contenders, replace(short, sample_s=0.0), timer=host_timer(queue))
        timer = EventTimer(queue, counts.launches(counted), 2)
        timer_name, samples = timer.name, interleave(contenders, short, timer=timer)
    low, high = torch.aminmax(gradients[-1])
    if not (low >= 0.5 and high <= 2.0):
        raise AssertionError(f"{case.name}: the gradients drifted while timed")

    timed = Timed(
        *("growth", case, DTYPE, 1, contenders, samples, timer_name), host=host, counts=counted
    )
    measured = Measured(notes=notes)
    for row in timed.rows():
        measured.rows.append(replace(row, tensors=len(case.shapes), elements=case.elements))
        curve.points.setdefault(row.provider, {})[size] = row.ms_p50 or 0.0
    return measured


def caller(name: str, optimizer: NoOptimizer, device: torch.device) -> Callable[[int], None]:
    """`unscale_` and `update`: gradients are halved in one call and doubled in the next."""
    scalers = [make_scaler(name, device, scale) for scale in (2.0, 0.5)]

    def call(number: int) -> None:
        scaler = scalers[number % 2]
        scaler.unscale_(optimizer)
        scaler.update()

    return call


def assert_parity(case: GradCase, gradients: Sequence[Tensor], name: str) -> None:
    """Compares gradients, scale and tracker with torch's, with an infinity and without.

    A second call undoes the first, so the gradients end unchanged.
    """
    middle = gradients[len(gradients) // 2]
    kept = middle[-1].clone()
    middle[-1] = torch.inf
    _assert_same_pass(case, gradients, name, 2.0, "with an infinity")
    middle[-1] = kept / 2
    _assert_same_pass(case, gradients, name, 0.5, "without an infinity")


def _assert_same_pass(
    case: GradCase, gradients: Sequence[Tensor], name: str, scale: float, what: str
) -> None:
    ours = [gradient.clone() for gradient in gradients]
    states: list[list[Tensor]] = []
    for provider, tensors in ((name, ours), ("torch", gradients)):
        scaler = make_scaler(provider, gradients[0].device, scale)
        scaler.unscale_(optimizer_over(tensors, fused=False))
        scaler.update()
        states.append([*scaler_state(scaler), *tensors])
    assert_same(states[0], states[1], f"{case.name} by {name}, {what}")
