"""What tracked gradients tell: which parameters overflowed, and how their values fit float16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["GradientHealth", "OverflowReport", "ParameterHealth", "ParameterOverflows"]

# So many lines of a table are printed.
MOST_LINES = 40


@dataclass(frozen=True)
class ParameterOverflows:
    """When the gradient of a parameter was not finite, as the optimizer would have used it.

    Attributes:
        name: From `name_parameters`, or its place.
        optimizer: The place of its optimizer among those that are tracked.
        optimizer_type: The name of that one's class.
        group: The place of its group in the optimizer.
        index: Its place in the group.
        kind: What its gradient held in the last such step; "nan" if it held infinities, too.
        step: The last such step, as the number of updates that were complete before it.
        infinities: In how many steps so far it held infinities and no NaN.
        nans: In how many steps so far it held a NaN.
    """

    name: str
    optimizer: int
    optimizer_type: str
    group: int
    index: int
    kind: Literal["inf", "nan"]
    step: int
    infinities: int
    nans: int


@dataclass(frozen=True)
class OverflowReport:
    """Which parameters were the reason that steps were skipped.

    Attributes:
        step: The last step with a gradient that was not finite, as the number of updates that were
            complete before it; None if there was none.
        parameters: Those whose gradients were not finite in that step.
        totals: Those for which that was ever so.
    """

    step: int | None
    parameters: tuple[ParameterOverflows, ...]
    totals: tuple[ParameterOverflows, ...]

    @classmethod
    def of(cls, totals: Iterable[ParameterOverflows]) -> OverflowReport:
        """Returns the report of which these are the totals.

        Args:
            totals: Of every parameter whose gradient was ever not finite.
        """
        rows = tuple(totals)
        step = max((row.step for row in rows), default=None)
        return cls(step, tuple(row for row in rows if row.step == step), rows)

    @classmethod
    def of_all(cls, reports: Sequence[OverflowReport]) -> OverflowReport:
        """Returns what several ranks report together; parameters are known by name and place.

        Args:
            reports: One of each rank.
        """
        rows: dict[tuple[object, ...], ParameterOverflows] = {}
        for row in (row for report in reports for row in report.totals):
            key = (row.name, row.optimizer, row.optimizer_type, row.group, row.index)
            known = rows.setdefault(key, row)
            last = max(known, row, key=lambda each: (each.step, each.kind == "nan"))
            rows[key] = replace(
                last,
                infinities=max(known.infinities, row.infinities),
                nans=max(known.nans, row.nans),
            )
        return cls.of(rows.values())

    def __str__(self) -> str:
        if self.step is None:
            return "No gradient was infinite or NaN so far."
        count = len(self.parameters)
        what = "1 parameter's gradient was" if count == 1 else f"{count} parameters' gradients were"
        titles = ("parameter", "optimizer", "kind", "steps with inf", "with NaN")
        rows = [
            (p.name, _label(p), p.kind, str(p.infinities), str(p.nans)) for p in self.parameters
        ]
        lines = [f"In step {self.step}, {what} not finite.", *_table(titles, rows)]
        before = sorted(
            (p for p in self.totals if p.step != self.step), key=lambda p: -p.infinities - p.nans
        )
        if before:
            told = [(p.name, _label(p), p.kind, str(p.infinities), str(p.nans)) for p in before]
            lines += ["", "In earlier steps only:", *_table(titles, told)]
        return "\n".join(lines)


@dataclass(frozen=True)
class ParameterHealth:
    """How the values of one gradient fit the range of float16, as backward() left them: scaled.

    Attributes:
        name: From `name_parameters`, or its place.
        optimizer: The place of its optimizer among those that are tracked.
        optimizer_type: The name of that one's class.
        group: The place of its group in the optimizer.
        index: Its place in the group.
        elements: How many there are; of complex values the parts count by themselves.
        zeros: How many are zero. What a float16 layer lost to underflow is zero already: a share
            that grows as the scale falls is underflow.
        vanishing: How many are not, but below 2^-24, float16's smallest subnormal; seen only where
            a gradient was computed in another type.
        subnormal: How many are not, but below 2^-14: where float16 loses digits. These include
            the vanishing.
        overflowing: How many are above 65504, infinities and NaN among them.
        scaled_maximum: The largest magnitude; NaN if there is one.
        scaled_minimum: The smallest magnitude that is not zero; 0.0 if all are.
        scale: By which they were scaled.
    """

    name: str
    optimizer: int
    optimizer_type: str
    group: int
    index: int
    elements: int
    zeros: int
    vanishing: int
    subnormal: int
    overflowing: int
    scaled_maximum: float
    scaled_minimum: float
    scale: float

    @property
    def absolute_maximum(self) -> float:
        """The largest magnitude without the scale."""
        return self.scaled_maximum / self.scale if self.scale else math.nan

    @property
    def zero_share(self) -> float:
        """The part of the elements that is zero."""
        return self.zeros / self.elements

    @property
    def vanishing_share(self) -> float:
        """The part that float16 cannot tell from zero, but for rounding."""
        return self.vanishing / self.elements

    @property
    def subnormal_share(self) -> float:
        """The part below float16's smallest normal, the vanishing included."""
        return self.subnormal / self.elements

    @property
    def overflowing_share(self) -> float:
        """The part above float16's largest."""
        return self.overflowing / self.elements


@dataclass(frozen=True)
class GradientHealth:
    """The gradients of the last iteration of each optimizer.

    Attributes:
        parameters: Those that had a gradient with elements, in the order of the optimizers.
    """

    parameters: tuple[ParameterHealth, ...]

    def worst_first(self) -> list[ParameterHealth]:
        """Returns the parameters: what overflows before what is lost before what loses digits."""
        return sorted(
            self.parameters,
            key=lambda p: (
                -p.overflowing_share,
                -p.vanishing_share - p.zero_share,
                -p.subnormal_share,
            ),
        )

    def __str__(self) -> str:
        if not self.parameters:
            return "No gradients were looked at so far."
        titles = (
            *("parameter", "elements", "max", "scaled max", "scaled min"),
            *("zero", "vanishing", "subnormal", "overflowing", "scale"),
        )
        rows = [
            (
                *(p.name, f"{p.elements:,}", f"{p.absolute_maximum:.3g}"),
                *(f"{p.scaled_maximum:.3g}", f"{p.scaled_minimum:.3g}"),
                *(_percent(p.zero_share), _percent(p.vanishing_share)),
                *(_percent(p.subnormal_share), _percent(p.overflowing_share), f"{p.scale:g}"),
            )
            for p in self.worst_first()
        ]
        return "\n".join(_table(titles, rows))


def _label(row: ParameterOverflows) -> str:
    return f"{row.optimizer}: {row.optimizer_type}"


def _percent(share: float) -> str:
    """A share that is not nothing does not look like it."""
    if 0 < share < 0.0001:
        return "<0.01%"
    return f"{share:.2%}" if share else "-"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side, text to the left and numbers to the right."""
    shown = rows[:MOST_LINES]
    widths = [max(map(len, column)) for column in zip(titles, *shown, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (titles, *shown)
    ]
    more = len(rows) - len(shown)
    return [*lines, f"... and {more} more"] if more else lines
