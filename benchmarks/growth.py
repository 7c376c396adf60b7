"""Cost of unscaling and updating as the number of tensors or of elements grows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy
import torch

from .cases import GradCase
from .harness import Job, Measured, Setting
from .results import Row
from .steps import UNSCALE, lists_in_turn, time_calls

DTYPE = torch.float32
TENSORS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
ELEMENTS = tuple(10**power for power in range(3, 10))
ELEMENTS_EACH = 100
# A point of a curve takes only a fraction of a comparison's time.
PART_OF_COMPARISON = 1 / 3


@dataclass
class Curve:
    """Cost as a function of one number, with the other fixed.

    From `linear_from` on, fixed costs and caches no longer count. `points` are milliseconds by side
    and size.
    """

    call: str
    unit: str
    sizes: tuple[int, ...]
    linear_from: int
    case: Callable[[int], GradCase]
    points: dict[str, dict[int, float]] = field(default_factory=dict)

    def slope(self) -> Measured:
        """A row for each side with the cost of one more, from at least two points.

        Least squares of relative distances: by absolute ones the largest point would decide alone.
        """
        measured = Measured()
        torchs = None
        for side, points in self.points.items():
            line = {size: ms for size, ms in points.items() if size >= self.linear_from}
            if len(line) < 2:
                told = f"two points from {self.linear_from:,} {self.unit} on"
                measured.notes.append(f"growth: no slope {self.call} of {side}: it takes {told}")
                continue
            ns = 1e6 * numpy.array(list(line.values()))
            each = float(numpy.polyfit(list(line), ns, 1, w=1 / ns)[0])
            torchs = each if side == "torch" else torchs
            faster = None if side == "torch" or torchs is None else torchs / each
            case = f"{min(line):,} to {max(line):,} {self.unit}"
            row = Row("growth", case, "float32", f"{self.call}, slope", side, ns_each=each)
            measured.rows.append(replace(row, vs_torch=faster))
        return measured


def curves(quick: bool) -> list[Curve]:
    """Both curves, without points."""
    tensors, elements = (TENSORS[::2], ELEMENTS[:-1]) if quick else (TENSORS, ELEMENTS)
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


def jobs(on: Setting) -> list[Job]:
    """One job for each point, and one for each curve's slope."""
    found = []
    for curve in curves(on.effort.quick):
        for size in curve.sizes:
            point = functools.partial(measure, curve, size, on)
            found.append(Job(f"{size:,} {curve.unit}", point))
        found.append(Job(f"slope {curve.call}", curve.slope))
    return found


def measure(curve: Curve, size: int, on: Setting) -> Measured:
    """Times a point and adds it to the curve."""
    case = curve.case(size)
    lists_in_turn(case, DTYPE, on)
    short = replace(on.effort, comparison_s=PART_OF_COMPARISON * on.effort.comparison_s)
    timed, notes = time_calls("growth", (UNSCALE,), case, DTYPE, replace(on, effort=short))
    measured = Measured(notes=notes)
    for row in timed.rows():
        sizes = {"tensors": len(case.shapes), "elements": case.elements}
        measured.rows.append(replace(row, call=curve.call, **sizes))
        curve.points.setdefault(row.side, {})[size] = row.ms.p50
    return measured
