"""Per-parameter tracking of overflows and gradient health, and its reports."""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ampfast.backends import aten
from ampfast.backends.cpu import HEALTH_WORDS, MARK_WORDS, Track
from ampfast.errors import refuse_capture
from ampfast.optimizers import ByOptimizer

__all__ = [
    "GradientHealth",
    "OverflowReport",
    "ParameterHealth",
    "ParameterOverflows",
    "Tracking",
    "Tracks",
    "named",
    "require_known",
]

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


_KINDS = ("overflow", "health")


_COMPLEMENT = 2**63 - 1


def require_known(track: str | None) -> None:
    """Raises TypeError or ValueError unless `track` is what the scaler's keyword takes."""
    if track is not None and not isinstance(track, str):
        raise TypeError(f"track must be a string or None, got {type(track).__name__}")
    if track is not None and track not in _KINDS:
        raise ValueError(f"track must be 'overflow', 'health' or None, got {track!r}")


def named(model: torch.nn.Module | Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns the names and parameters of a module, or those listed.

    Raises:
        TypeError: If it is neither, or something listed is not a name and a tensor.
        ValueError: If a name is listed twice.
    """
    pairs: Any = model.named_parameters() if isinstance(model, torch.nn.Module) else model
    if isinstance(pairs, (str, Tensor)) or not isinstance(pairs, Iterable):
        raise TypeError(
            "name_parameters takes a torch.nn.Module or pairs of a name and a parameter, got "
            f"{type(model).__name__}"
        )
    found: dict[str, Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                "name_parameters takes pairs of a name and a parameter, as from "
                f"model.named_parameters(); got {type(pair).__name__}"
            )
        name, parameter = pair
        if not isinstance(name, str) or not isinstance(parameter, Tensor):
            raise TypeError(
                f"a name must be a string and a parameter a tensor, got {type(name).__name__} and "
                f"{type(parameter).__name__}"
            )
        if name in found:
            raise ValueError(f"two parameters have the name {name!r}")
        found[name] = parameter
    return list(found.items())


@dataclass(frozen=True)
class _Place:
    """Where a parameter stood when it was last looked at."""

    parameter: Callable[[], object]
    group: int
    index: int


@dataclass
class _Record:
    """What is noted of the parameters of one optimizer, by device."""

    identity: int
    places: list[_Place]
    marks: dict[torch.device, Tensor] = field(default_factory=dict)
    # A row for each parameter, and one more that begins with the scale as float32 bits.
    health: dict[torch.device, Tensor] = field(default_factory=dict)
    # Where that stands, and zero for all that is elsewhere.
    scale_at: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return len(self.places)

    def move(self, identity: int, places: list[_Place]) -> None:
        """Takes other parameters, or these in other places, whose counts go along."""
        rows = {id(place.parameter()): row for row, place in enumerate(self.places)}
        rows.pop(id(None), None)
        pairs = [
            (rows[id(place.parameter())], row)
            for row, place in enumerate(places)
            if id(place.parameter()) in rows
        ]
        before, self.marks = self.marks, {}
        self.identity, self.places = identity, places
        self.health, self.scale_at = {}, {}
        for device, marks in before.items():
            if pairs:
                old, new = torch.tensor(pairs, device=device).unbind(1)
                self.marks_on(device).index_copy_(0, new, marks[old])

    def marks_on(self, device: torch.device) -> Tensor:
        if device not in self.marks:
            self.marks[device] = _zeros(self.parameters, MARK_WORDS, device)
        return self.marks[device]

    def health_on(self, device: torch.device) -> Tensor:
        if device not in self.health:
            health = _zeros(self.parameters + 1, HEALTH_WORDS, device)
            place = _zeros(self.parameters + 1, HEALTH_WORDS, device).view(torch.float32) != 0
            place[-1, 0] = True
            zero = torch.zeros((), dtype=torch.float32, device=device)
            self.health[device], self.scale_at[device] = health, (place, zero)
        return self.health[device]

    @torch.no_grad()
    def clear_health(self, device: torch.device, scale: Tensor) -> None:
        """Empties all rows and writes the scale, in one launch."""
        scale = aten.moved(scale.detach().float(), device).reshape(())
        health = self.health_on(device).view(torch.float32)
        place, zero = self.scale_at[device]
        torch.where(place, scale, zero, out=health)


class Tracking:
    """The notes of one scaler on the parameters of its optimizers, and their names."""

    def __init__(self, *, health: bool) -> None:
        self._health = health
        self._records: ByOptimizer[_Record] = ByOptimizer()
        self._names = WeakTensorKeyDictionary()
        self._has_names = False
        self._has_looked = False

    @property
    def is_empty(self) -> bool:
        """Whether no optimizer's gradients were looked at, of those that are gone neither."""
        return not self._has_looked

    def name(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Gives parameters their names."""
        for name, parameter in pairs:
            self._names[parameter] = name
            self._has_names = True

    def start(
        self, optimizer: Any, identity: int, scale: Tensor, steps: Tensor, *, measures: bool
    ) -> Tracks:
        """Begins a pass over an optimizer's gradients.

        Args:
            optimizer: Which.
            identity: That of its parameters, as `gradients.Gradients` has it.
            scale: One-element, that of the gradients.
            steps: int64, whose first element is how many updates were completed.
            measures: Whether the gradients are still scaled, so that their range is of interest.
        """
        self._has_looked = True
        record = self._records.get(optimizer)
        if record is None:
            record = _Record(identity, _places(optimizer))
        elif record.identity != identity:
            refuse_capture("other parameters than before")
            record.move(identity, _places(optimizer))
        self._records.record(optimizer, record)
        tracks = Tracks(record, steps[:1], self._health and measures)
        if tracks.measures:
            # On every device that ever had gradients: what stands there is of an earlier pass.
            tracks.scale = scale
            for device in record.health:
                tracks.clear(device)
        return tracks

    def end_iteration(self) -> None:
        """Lets go of what cannot be referenced weakly."""
        self._records.end_iteration()

    def overflow_report(self) -> OverflowReport:
        """Reads the marks of all optimizers, with one host sync."""
        totals = []
        for places, devices in self._read(lambda record: record.marks):
            for place, rows in zip(places, zip(*devices, strict=True), strict=False):
                last, last_nan = (max(row[i] for row in rows) for i in (0, 1))
                times, nans = (sum(row[i] for row in rows) for i in (2, 3))
                if last:
                    kind: Any = "nan" if last_nan == last else "inf"
                    totals.append(ParameterOverflows(*place, kind, last - 1, times - nans, nans))
        return OverflowReport.of(totals)

    def health(self) -> GradientHealth:
        """Reads the ranges of all optimizers' gradients, with one host sync."""
        found = []
        for places, devices in self._read(lambda record: record.health):
            scales = [_float32(rows[-1][0]) for rows in devices]
            by_parameter = zip(*(rows[:-1] for rows in devices), strict=True)
            for place, rows in zip(places, by_parameter, strict=False):
                for row, scale in zip(rows, scales, strict=True):
                    if row[0]:
                        found.append(_health_of(place, row, scale))
        return GradientHealth(tuple(found))

    def _read(
        self, tables: Callable[[_Record], dict[torch.device, Tensor]]
    ) -> Iterator[tuple[list[tuple[str, int, str, int, int]], list[list[list[int]]]]]:
        """Gives for each optimizer where its parameters stand and the rows of each device."""
        records = list(self._records)
        self._require_names([optimizer for optimizer, _ in records])
        read = _on_host([list(tables(record).values()) for _, record in records])
        for number, ((optimizer, record), devices) in enumerate(zip(records, read, strict=True)):
            yield self._told(number, optimizer, record), devices

    def _require_names(self, optimizers: list[Any]) -> None:
        """Refuses names that are all of something else; some without a name get their place."""
        params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if self._has_names and params and not any(param in self._names for param in params):
            raise ValueError(
                f"none of the {len(params)} parameters of the optimizers has a name: call "
                "name_parameters() with the model that they train, and again if its parameters "
                "were replaced"
            )

    def _told(
        self, number: int, optimizer: object, record: _Record
    ) -> list[tuple[str, int, str, int, int]]:
        """The name and place of every parameter of a record."""
        kind, told = type(optimizer).__name__, []
        for place in record.places:
            parameter = place.parameter()
            name = self._names.get(parameter) if isinstance(parameter, Tensor) else None
            if name is None:
                name = f"group {place.group}, parameter {place.index}"
            told.append((name, number, kind, place.group, place.index))
        return told


def _places(optimizer: Any) -> list[_Place]:
    """The places of all parameters, in the order in which they are numbered."""
    return [
        _Place(weakref.ref(param), group, index)
        for group, params in enumerate(list(g["params"]) for g in optimizer.param_groups)
        for index, param in enumerate(params)
    ]


class Tracks:
    """Where a pass notes what it sees, by device."""

    def __init__(self, record: _Record, steps: Tensor, measures: bool) -> None:
        self.measures = measures
        self.scale: Tensor | None = None
        self._record = record
        self._steps = steps

    def clear(self, device: torch.device) -> None:
        if self.scale is not None:
            self._record.clear_health(device, self.scale)

    def __call__(self, device: torch.device) -> Track:
        """Returns what a pass over gradients on `device` takes along."""
        record = self._record
        health = None
        if device not in record.marks or (self.measures and device not in record.health):
            refuse_capture("the creation of what is noted of gradients")
        if self.measures:
            is_new = device not in record.health
            health = record.health_on(device)[:-1]
            if is_new:
                self.clear(device)
        return Track(record.marks_on(device), aten.moved(self._steps, device), health)


def _zeros(rows: int, words: int, device: torch.device) -> Tensor:
    return torch.zeros((rows, words), dtype=torch.int64, device=device)


def _on_host(tensors: list[list[Tensor]]) -> list[list[list[list[int]]]]:
    """Reads tables of several optimizers and devices, in the same order, with one host sync."""
    flat = [tensor for some in tensors for tensor in some]
    if not flat:
        return [[] for _ in tensors]
    place = next((t.device for t in flat if t.device.type != "cpu"), flat[0].device)
    together = torch.cat([aten.moved(t, place).reshape(-1) for t in flat]).cpu()
    parts: Iterator[Tensor] = iter(together.split([t.numel() for t in flat]))
    return [[next(parts).view(t.shape).tolist() for t in some] for some in tensors]


def _float32(bits: int) -> float:
    return float(struct.unpack("=ff", struct.pack("=q", bits))[0])


def _float64(bits: int) -> float:
    return float(struct.unpack("=d", struct.pack("=q", bits))[0])


def _health_of(
    place: tuple[str, int, str, int, int], row: list[int], scale: float
) -> ParameterHealth:
    elements, nonzero, vanishing, subnormal, overflowing, largest, smallest = row
    return ParameterHealth(
        *place,
        elements,
        elements - nonzero,
        vanishing,
        subnormal,
        overflowing,
        _float64(largest),
        _float64(_COMPLEMENT - smallest) if smallest else 0.0,
        scale,
    )
