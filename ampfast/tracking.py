"""Per-parameter tracking of overflows and gradient health, and the reports on it."""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ampfast.backends import scalars
from ampfast.backends.core import (
    HEALTH_WORDS,
    MARK_WORDS,
    Pass,
    Track,
    drop_unheld,
    has_parameters,
)
from ampfast.capture import refuse_capture
from ampfast.optimizers import ByOptimizer

# Longest table that is printed, in lines.
MOST_LINES = 40

# Where all parameters overflowed.
_EVERYWHERE = (
    "These are all trainable parameters of {}: the loss or a forward activation was not finite, or "
    "the loss times the scale was not. Forward hooks find the layer: see "
    '"Every gradient is infinite or NaN" in docs/troubleshooting.md.'
)

# Parameters by group.
Groups = Sequence[Sequence[Tensor]]

# Values of a `TrackedParameter`.
_Location = tuple[str, int, str, int, int]


@dataclass(frozen=True)
class TrackedParameter:
    """Name and place of a parameter.

    Attributes:
        name: Name from `name_parameters`, else "group 0, parameter 3".
        optimizer: Index of the optimizer among the tracked ones.
        optimizer_type: Class name of the optimizer.
        group: Index of the parameter group.
        index: Index of the parameter in its group.
    """

    name: str
    optimizer: int
    optimizer_type: str
    group: int
    index: int


@dataclass(frozen=True)
class ParameterOverflows(TrackedParameter):
    """Overflows of one parameter's gradient: steps in which a value that is used was inf or NaN.

    Name and place are as in `TrackedParameter`.

    Attributes:
        kind: Kind of the last overflow: "nan" if the gradient held a NaN, else "inf".
        step: Step of the last overflow, as the number of updates completed before it.
        infinities: Number of steps with infinities and no NaN.
        nans: Number of steps with a NaN.
    """

    kind: Literal["inf", "nan"]
    step: int
    infinities: int
    nans: int


@dataclass(frozen=True)
class OverflowReport:
    """Parameters whose gradients overflowed, and with that the reason for skipped steps.

    Attributes:
        step: Last step with an overflow, as the number of updates completed before it; None if
            there was none.
        parameters: The parameters that overflowed in that step.
        totals: All parameters that ever overflowed.
        is_everywhere: Whether these are all trainable parameters, two or more, of the optimizers
            that overflowed in that step: their common cause is the loss or an activation.
    """

    step: int | None
    parameters: tuple[ParameterOverflows, ...]
    totals: tuple[ParameterOverflows, ...]
    is_everywhere: bool = False

    @classmethod
    def of(cls, totals: Iterable[ParameterOverflows]) -> OverflowReport:
        """Returns the report on the overflows of all parameters.

        Args:
            totals: One row for each parameter that ever overflowed.
        """
        rows = tuple(totals)
        step = max((row.step for row in rows), default=None)
        return cls(step, tuple(row for row in rows if row.step == step), rows)

    @classmethod
    def of_all(cls, reports: Sequence[OverflowReport]) -> OverflowReport:
        """Returns the joint report of several ranks, with parameters matched by name and place.

        Args:
            reports: One report from each rank.
        """
        rows: dict[tuple[Any, ...], ParameterOverflows] = {}
        for row in chain.from_iterable(report.totals for report in reports):
            location = astuple(row)[:5]
            known = rows.setdefault(location, row)
            rows[location] = replace(
                max(known, row, key=lambda each: (each.step, each.kind == "nan")),
                infinities=max(known.infinities, row.infinities),
                nans=max(known.nans, row.nans),
            )
        joint = cls.of(rows.values())
        everywhere = all(each.is_everywhere and each.step == joint.step for each in reports)
        return replace(joint, is_everywhere=everywhere)

    def __str__(self) -> str:
        if self.step is None:
            return "No infinite or NaN gradients so far."
        count = len(self.parameters)
        what = "1 parameter's gradient was" if count == 1 else f"{count} parameters' gradients were"
        lines = [f"In step {self.step}, {what} not finite.", *_table(_OVERFLOWS, self.parameters)]
        if self.is_everywhere:
            is_one = len({row.optimizer for row in self.parameters}) == 1
            whose = "their optimizer" if is_one else "their optimizers"
            lines.insert(1, _EVERYWHERE.format(whose))
        earlier = [row for row in self.totals if row.step != self.step]
        if earlier:
            earlier.sort(key=lambda row: -row.infinities - row.nans)
            lines += ["", "In earlier steps only:", *_table(_OVERFLOWS, earlier)]
        return "\n".join(lines)


@dataclass(frozen=True)
class ParameterHealth(TrackedParameter):
    """Range of one parameter's gradient, still scaled, against the range of float16.

    Name and place are as in `TrackedParameter`.

    Attributes:
        elements: Number of elements; real and imaginary parts count separately.
        zeros: Number of zeros, to which a float16 layer flushes what underflows: a fraction that
            grows as the scale falls is underflow.
        vanishing: Number of nonzero magnitudes below 2^-24, float16's smallest subnormal; only in
            gradients computed in another dtype.
        subnormal: Number of nonzero magnitudes below 2^-14, float16's smallest normal, the
            vanishing ones included; float16 loses digits there.
        overflowing: Number of magnitudes above 65504, float16's largest; infinities and NaN count.
        scaled_maximum: Largest magnitude; NaN if there is a NaN.
        scaled_minimum: Smallest nonzero magnitude; 0.0 if there is none.
        scale: Loss scale of the gradient.
    """

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
        """Largest magnitude of the unscaled gradient."""
        return self.scaled_maximum / self.scale if self.scale else math.nan

    @property
    def zero_share(self) -> float:
        """Fraction of zeros."""
        return self.zeros / self.elements

    @property
    def vanishing_share(self) -> float:
        """Fraction that float16 flushes to zero, but for rounding."""
        return self.vanishing / self.elements

    @property
    def subnormal_share(self) -> float:
        """Fraction below float16's smallest normal number, the vanishing included."""
        return self.subnormal / self.elements

    @property
    def overflowing_share(self) -> float:
        """Fraction above float16's largest number."""
        return self.overflowing / self.elements


@dataclass(frozen=True)
class GradientHealth:
    """Ranges of the gradients in each optimizer's last iteration.

    Attributes:
        parameters: The parameters that had a gradient with elements, in optimizer order.
    """

    parameters: tuple[ParameterHealth, ...]

    def worst_first(self) -> list[ParameterHealth]:
        """Returns the parameters by fraction: overflowing, then vanishing or 0, then subnormal."""

        def severity(p: ParameterHealth) -> tuple[float, float, float]:
            return p.overflowing_share, p.vanishing_share + p.zero_share, p.subnormal_share

        return sorted(self.parameters, key=severity, reverse=True)

    def __str__(self) -> str:
        if not self.parameters:
            return "No gradients measured so far."
        return "\n".join(_table(_HEALTH, self.worst_first()))


class Tracking:
    """Tables of a scaler with a row for each parameter of its optimizers, and their names."""

    def __init__(self, *, health: bool) -> None:
        self.is_empty = True  # before the first pass
        self._health = health
        self._records: ByOptimizer[_Record] = ByOptimizer()
        self._names = _Names()
        # The names themselves die with their parameters.
        self._has_names = False

    def name(self, pairs: list[tuple[str, Tensor]], model: object) -> None:
        """Names the parameters of pairs, which are those of `model` if it is a module."""
        self._names.give(pairs, model)
        self._has_names |= bool(pairs)

    def start(
        self, optimizer: Any, groups: Groups, scale: Tensor, steps: Tensor, *, measures: bool
    ) -> Callable[[torch.device], Track]:
        """Returns a function that makes the tables of a pass over gradients on a device.

        `groups` are the parameters as the pass read them; the first of `steps` is the number of
        completed updates; `measures` says whether the gradients still bear `scale`.
        """
        self.is_empty = False
        record = self._records.get(optimizer)
        listed = [{"params": list(group)} for group in groups]
        if record is None or not has_parameters(listed, record.groups):
            last, record = record, _Record(groups)
            if last is not None:
                refuse_capture("a change of an optimizer's parameters")
                record.take_marks(last)
        self._records.record(optimizer, record)
        measured = scale if self._health and measures else None
        # On every device that ever had gradients: the rows there are from an earlier pass.
        for device in record.health if measured is not None else ():
            record.clear_health(device, scale)
        return partial(record.tables_on, steps=steps[:1], scale=measured)

    def before(self, optimizer: Any, work: Pass, steps: Tensor | None) -> Pass | None:
        """Returns a pass over plain gradients that marks overflows, without a walk in Python.

        None if the gradients must be sorted first: for health, for parameters without table, and
        for those of other groups than last.
        """
        record = None if self._health else self._records.get(optimizer)
        if record is None or steps is None or steps.device not in record.marks:
            return None
        if not has_parameters(optimizer.param_groups, record.groups):
            return None
        return Pass(*work[:7], record.marks[steps.device], steps, *work[9:])

    def overflow_report(self) -> OverflowReport:
        """Overflows of all optimizers' parameters; one host sync."""
        totals = []
        for location, rows, _ in self._rows(lambda record: record.marks):
            last, last_nan = (max(row[i] for row in rows) for i in (0, 1))
            times, nans = (sum(row[i] for row in rows) for i in (2, 3))
            if last:
                kind: Any = "nan" if last_nan == last else "inf"
                totals.append(ParameterOverflows(*location, kind, last - 1, times - nans, nans))
        report = OverflowReport.of(totals)
        hit = {(row.optimizer, row.group, row.index) for row in report.parameters}
        optimizers = {row.optimizer for row in report.parameters}
        # Of what is empty there is no value that could be infinite.
        trainable = {
            (number, *place)
            for number, (_, record) in enumerate(self._records)
            if number in optimizers
            for param, place in zip(record.params(), record.places, strict=True)
            if param.requires_grad and (is_lazy(param) or param.numel())
        }
        return replace(report, is_everywhere=len(trainable) > 1 and trainable <= hit)

    def health(self) -> GradientHealth:
        """Health of all optimizers' gradients; one host sync."""
        parameters = (
            _health_of(location, row, scale[0])
            for location, rows, scales in self._rows(lambda record: record.health)
            for row, scale in zip(rows, scales, strict=True)
            if row[0]
        )
        return GradientHealth(tuple(parameters))

    def _rows(
        self, tables_of: Callable[[_Record], dict[torch.device, Tensor]]
    ) -> Iterator[tuple[_Location, Sequence[list[int]], Sequence[list[int]]]]:
        """Yields each parameter's location, its row on each device, and the tables' last rows."""
        records, names = list(self._records), self._names.by_parameter()
        self._require_names(names, [record for _, record in records])
        tables = [table for _, record in records for table in tables_of(record).values()]
        device = next((each.device for each in tables if each.device.type != "cpu"), None)
        here = [table if device is None else scalars.moved(table, device) for table in tables]
        on_host = iter(torch.cat(here).tolist() if here else [])
        for number, (optimizer, record) in enumerate(records):
            kind = type(optimizer).__name__
            read = [list(islice(on_host, len(table))) for table in tables_of(record).values()]
            rows_of = zip(*read, strict=True)
            # A table may have one row more.
            for param, at, rows in zip(record.params(), record.places, rows_of, strict=False):
                name = names.get(param, "group {}, parameter {}".format(*at))
                yield (name, number, kind, *at), rows, [table[-1] for table in read]

    def _require_names(self, names: dict[Tensor, str], records: list[_Record]) -> None:
        """Refuses names of which none fits; a single parameter without one is listed by place."""
        params = [param for record in records for param in record.params()]
        if self._has_names and params and not any(param in names for param in params):
            raise ValueError(
                f"none of the optimizers' {len(params)} parameters has a name: call "
                "name_parameters() with the model that they train, again if its parameters were "
                "replaced"
            )


class _Names:
    """Names of parameters.

    There are no weak references to the parameters, which torch then could not convert:
    `torch.utils.swap_tensors` refuses.
    """

    def __init__(self) -> None:
        # By the module that has the parameter, and its name there.
        self._of_modules: dict[tuple[weakref.ref[torch.nn.Module], str], str] = {}
        # Those of parameters without a known module.
        self._given: dict[Tensor, str] = {}

    def give(self, pairs: list[tuple[str, Tensor]], model: object) -> None:
        """Names the parameters of pairs, which are those of `model` if it is a module."""
        modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        places = {
            id(param): (weakref.ref(module), key)
            for module in modules
            for key, param in module._parameters.items()
        }
        kept = {place: name for place, name in self._of_modules.items() if place[0]() is not None}
        for name, param in pairs:
            place = places.get(id(param))
            if place is None:
                self._given[param] = name
            else:
                self._given.pop(param, None)
                kept.pop(place, None)  # the last one counts, as a shared parameter has several
                kept[place] = name
        self._of_modules = kept
        drop_unheld(self._given)

    def by_parameter(self) -> dict[Tensor, str]:
        drop_unheld(self._given)
        names: dict[Tensor, str] = {}
        for (reference, key), name in self._of_modules.items():
            module = reference()
            param = None if module is None else dict(module._parameters.items()).get(key)
            if param is not None:
                names[param] = name
        return {**names, **self._given}


class _Record:
    """Tables of one optimizer, by device."""

    def __init__(self, groups: Groups) -> None:
        # Held as long as the optimizer has them: an address may be that of a new parameter, and
        # torch cannot convert parameters that have weak references.
        self.groups = tuple(map(tuple, groups))
        # Group and index in it of each parameter.
        self.places = [(g, index) for g, group in enumerate(groups) for index in range(len(group))]
        self.marks: dict[torch.device, Tensor] = {}
        # One more row begins with the scale as float32 bits.
        self.health: dict[torch.device, Tensor] = {}
        # The mask of that scale, and a zero for the rest.
        self._scale_mask: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def take_marks(self, last: _Record) -> None:
        """Copies the marks of the parameters that another record has, too."""
        rows = {param: row for row, param in enumerate(last.params())}
        moves = [(rows[param], row) for row, param in enumerate(self.params()) if param in rows]
        for device, marks in last.marks.items() if moves else ():
            old, new = torch.tensor(moves, device=device).unbind(1)
            self.marks_on(device).index_copy_(0, new, marks[old])

    def params(self) -> list[Tensor]:
        """The parameters, in order."""
        return list(chain.from_iterable(self.groups))

    def tables_on(self, device: torch.device, *, steps: Tensor, scale: Tensor | None) -> Track:
        """The tables for one pass over gradients on a device; health with the `scale` only."""
        marks = self.marks_on(device)
        if scale is not None and device not in self.health:
            self.clear_health(device, scale)
        health = None if scale is None else self.health[device][:-1]
        return Track(marks, scalars.moved(steps, device), health)

    def marks_on(self, device: torch.device) -> Tensor:
        if device not in self.marks:
            self.marks[device] = _new_table(len(self.places), MARK_WORDS, device)
        return self.marks[device]

    @torch.no_grad()
    def clear_health(self, device: torch.device, scale: Tensor) -> None:
        """Clears the table, made where there is none, and writes the scale, in one launch."""
        if device not in self.health:
            table = _new_table(len(self.places) + 1, HEALTH_WORDS, device)
            mask = torch.zeros_like(table.view(torch.float32), dtype=torch.bool)
            mask[-1, 0] = True
            zero = torch.zeros((), dtype=torch.float32, device=device)
            self.health[device], self._scale_mask[device] = table, (mask, zero)
        scale = scalars.moved(scale.detach().float(), device).reshape(())
        mask, zero = self._scale_mask[device]
        torch.where(mask, scale, zero, out=self.health[device].view(torch.float32))


def require_known(track: str | None) -> None:
    """Raises TypeError or ValueError unless `track` is a value of the scaler's keyword."""
    if track is not None and not isinstance(track, str):
        raise TypeError(f"track must be a string or None, got {type(track).__name__}")
    if track is not None and track not in ("overflow", "health"):
        raise ValueError(f"track must be 'overflow', 'health' or None, got {track!r}")


def require_tracked(track: str | None, method: str, kinds: Sequence[str]) -> None:
    """Raises RuntimeError unless `track` is one of the kinds that a method reports on."""
    if track not in kinds:
        raise RuntimeError(
            f"{method}() needs a scaler that was made with track="
            f"{' or '.join(map(repr, kinds))}; this one has track={track!r}"
        )
    refuse_capture("a report that the host reads", "ask after the replay")


def named(model: torch.nn.Module | Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Names and parameters, from a module or pairs; refuses a name that occurs twice."""
    pairs: Any = model.named_parameters() if isinstance(model, torch.nn.Module) else model
    found: dict[str, Tensor] = {}
    for pair in pairs if isinstance(pairs, Iterable) else [pairs]:
        match pair:
            case (str() as name, Tensor() as parameter):
                if name in found:
                    raise ValueError(f"two parameters have the name {name!r}")
                found[name] = parameter
            case _:
                items = pair if isinstance(pair, (tuple, list)) else [pair]
                raise TypeError(
                    "name_parameters takes a torch.nn.Module or pairs of a name and a parameter, "
                    "as from its named_parameters(), got "
                    + " and ".join(type(item).__name__ for item in items)
                )
    return list(found.items())


def _new_table(rows: int, words: int, device: torch.device) -> Tensor:
    refuse_capture("the creation of tracking tables")
    return torch.zeros((rows, words), dtype=torch.int64, device=device)


def _health_of(location: _Location, row: list[int], scale_bits: int) -> ParameterHealth:
    elements, nonzero, vanishing, subnormal, overflowing, largest, smallest = row
    (scale,) = struct.unpack("=f4x", struct.pack("=q", scale_bits))
    # The smallest is kept as the complement of its bits, so that kernels take a maximum.
    smallest = 2**63 - 1 - smallest if smallest else 0
    high, low = struct.unpack("=dd", struct.pack("=qq", largest, smallest))
    counts = elements, elements - nonzero, vanishing, subnormal, overflowing
    return ParameterHealth(*location, *counts, high, low, scale)


def _percent(fraction: float) -> str:
    return "<0.01%" if 0 < fraction < 0.0001 else f"{fraction:.2%}" if fraction else "-"


# Columns of the tables.
_OVERFLOWS: dict[str, Callable[[ParameterOverflows], str]] = {
    "parameter": lambda p: p.name,
    "optimizer": lambda p: f"{p.optimizer}: {p.optimizer_type}",
    "kind": lambda p: p.kind,
    "steps with inf": lambda p: str(p.infinities),
    "with NaN": lambda p: str(p.nans),
}
_HEALTH: dict[str, Callable[[ParameterHealth], str]] = {
    "parameter": lambda p: p.name,
    "elements": lambda p: f"{p.elements:,}",
    "max": lambda p: f"{p.absolute_maximum:.3g}",
    "scaled max": lambda p: f"{p.scaled_maximum:.3g}",
    "scaled min": lambda p: f"{p.scaled_minimum:.3g}",
    "zero": lambda p: _percent(p.zero_share),
    "vanishing": lambda p: _percent(p.vanishing_share),
    "subnormal": lambda p: _percent(p.subnormal_share),
    "overflowing": lambda p: _percent(p.overflowing_share),
    "scale": lambda p: f"{p.scale:g}",
}


def _table(columns: dict[str, Callable[[Any], str]], rows: Sequence[Any]) -> list[str]:
    """Aligned columns: the first to the left, the others to the right."""
    shown = rows[:MOST_LINES]
    aligned: list[list[str]] = []
    for title, cell in columns.items():
        cells = [title, *map(cell, shown)]
        align = str.rjust if aligned else str.ljust
        aligned.append([align(text, max(map(len, cells))) for text in cells])
    lines = ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]
    more = len(rows) - len(shown)
    return [*lines, f"... and {more} more"] if more else lines
