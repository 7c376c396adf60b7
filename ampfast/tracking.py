"""What a scaler notes of each parameter while it reads the gradients, and the reports on it."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ampfast.backends import aten
from ampfast.backends.cpu import HEALTH_WORDS, MARK_WORDS, Track
from ampfast.capture import refuse_capture
from ampfast.gradient_reports import (
    GradientHealth,
    OverflowReport,
    ParameterHealth,
    ParameterOverflows,
)
from ampfast.last_checks import ByOptimizer

__all__ = ["Tracking", "Tracks", "named", "require_known"]

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
