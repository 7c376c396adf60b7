"""Per-parameter tracking of overflows, and the report on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ampfast.backends import aten, scalars
from ampfast.backends.core import MARK_WORDS
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.diagnose.find_nonfinite import ModuleFault
from ampfast.diagnose.grad_norms import NormHistory
from ampfast.diagnose.text_table import table

# Where all parameters overflowed.
_EVERYWHERE = (
    "These are all trainable parameters of their optimizers: the loss or a forward activation was "
    "not finite, or the loss times the scale was not.{} See "
    '"NaN" in docs/troubleshooting.md.'
)

# Parameters by group.
Groups = Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class ParameterOverflows:
    """Overflows of one parameter's gradient: steps in which a value that is used was inf or NaN.

    Attributes:
        name: Name from `name_parameters`, else "group 0, parameter 3".
        optimizer: Index of the optimizer among the tracked ones.
        optimizer_type: Class name of the optimizer.
        group: Index of the parameter group.
        index: Index of the parameter in its group.
        kind: Kind of the last overflow: "nan" if the gradient held a NaN, else "inf".
        step: Step of the last overflow, as the number of updates completed before it.
        infinities: Number of steps with infinities and no NaN.
        nans: Number of steps with a NaN.
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
    """Parameters whose gradients overflowed, and with that the reason for skipped steps.

    Attributes:
        step: Last step with an overflow, as the number of updates completed before it; None if
            there was none.
        parameters: The parameters that overflowed in that step.
        totals: All parameters that ever overflowed.
        is_everywhere: Whether these are all trainable parameters, two or more, of the optimizers
            that overflowed in that step: their common cause is the loss or an activation.
        module: With `track="modules"`, the first module whose values were not finite as it ran
            with gradients in that step.
    """

    step: int | None
    parameters: tuple[ParameterOverflows, ...]
    totals: tuple[ParameterOverflows, ...]
    is_everywhere: bool = False
    module: ModuleFault | None = None

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
        found = (each.module for each in reports if each.step == joint.step)
        module = next((each for each in found if each is not None), None)
        return replace(joint, is_everywhere=everywhere, module=module)

    def __str__(self) -> str:
        first = "" if self.module is None else f"{self.module}\n"
        if self.step is None:
            return f"{first}No infinite or NaN gradients so far."
        count = len(self.parameters)
        what = "1 parameter's gradient was" if count == 1 else f"{count} parameters' gradients were"
        lines = [
            f"{first}In step {self.step}, {what} not finite.",
            *table(_OVERFLOWS, self.parameters),
        ]
        if self.is_everywhere:
            names_it = "" if self.module else " track='modules' names the layer."
            lines.insert(1, _EVERYWHERE.format(names_it))
        earlier = [row for row in self.totals if row.step != self.step]
        if earlier:
            earlier.sort(key=lambda row: -row.infinities - row.nans)
            lines += ["", "In earlier steps only:", *table(_OVERFLOWS, earlier)]
        return "\n".join(lines)


def rows_on_host(tables: Sequence[Tensor]) -> Iterator[list[Any]]:
    """The rows of tables on any devices, one after another, with one host sync."""
    device = next((each.device for each in tables if not each.is_cpu), None)
    here = [each if device is None else scalars.moved(each, device) for each in tables]
    return iter(torch.cat(here).tolist() if here else [])


def overflows_of(
    place: tuple[str, int, str, int, int], rows: list[list[int]]
) -> list[ParameterOverflows]:
    """The overflows of a parameter, by its row on each device, if there were any."""
    last, last_nan, *_ = map(max, zip(*rows, strict=True))
    _, _, times, nans, _ = map(sum, zip(*rows, strict=True))
    kind: Any = "nan" if last_nan == last else "inf"
    return [ParameterOverflows(*place, kind, last - 1, times - nans, nans)] if last else []


class Names:
    """Names of parameters, for reports, by the module that has the parameter.

    There are no weak references to the parameters, which torch then could not convert:
    `torch.utils.swap_tensors` refuses.
    """

    def __init__(self) -> None:
        self._prefixes: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()

    def give(self, model: torch.nn.Module) -> None:
        """Names the parameters of a model."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"name_parameters takes a torch.nn.Module, got {type(model).__name__}")
        # A shared parameter has several names: the first of the last model counts.
        for name, module in reversed(list(model.named_modules())):
            self._prefixes.pop(module, None)
            self._prefixes[module] = f"{name}." if name else ""

    def known(self) -> dict[Tensor, str]:
        """Returns names by parameter."""
        return {
            param: prefix + key
            for module, prefix in self._prefixes.items()
            for key, param in module._parameters.items()
            if param is not None
        }


class Rows:
    """The tables of an optimizer's parameters, a row for each, while it lives; the core reads them.

    Attributes:
        groups: The parameters. They are held as long as the optimizer has them: an address may be
            that of a new parameter, and torch cannot convert parameters that have weak references.
        counters: Overflow counters by device, as `marks` of a `Pass`.
        norms: Their norms, or None.
    """

    def __init__(self, groups: Groups, optimizer_type: str) -> None:
        self.groups = tuple(map(tuple, groups))
        self.params = list(chain.from_iterable(self.groups))
        self.counters: dict[torch.device, Tensor] = {}
        self.norms: NormHistory | None = None
        self._optimizer_type = optimizer_type

    def places(self, number: int, names: dict[Tensor, str]) -> list[tuple[str, int, str, int, int]]:
        """The first columns of each parameter's row in reports; the optimizer has a number."""
        return [
            (names.get(param, f"group {g}, parameter {i}"), number, self._optimizer_type, g, i)
            for g, group in enumerate(self.groups)
            for i, param in enumerate(group)
        ]

    def counters_on(self, device: torch.device) -> Tensor:
        """The overflow counters of a device."""
        if device not in self.counters:
            refuse_capture("the creation of tracking tables")
            shape = len(self.params), MARK_WORDS
            counters = scalars.allocate(torch.zeros, shape, dtype=torch.int64, device=device)
            aten.squares_in(counters).fill_(-0.0)
            self.counters[device] = counters
        return self.counters[device]


def require_known(track: str | None) -> None:
    """Raises ValueError unless `track` is a value of the scaler's keyword."""
    if track not in (None, "overflow", "modules", "norms"):
        raise ValueError(
            "track must be 'overflow' (for overflow_report), 'modules' (to name the module, too), "
            f"'norms' (for grad_norms besides) or None, got {track!r}"
        )


# Columns of the table.
_OVERFLOWS: dict[str, Callable[[ParameterOverflows], str]] = {
    "parameter": lambda p: p.name,
    "optimizer": lambda p: f"{p.optimizer}: {p.optimizer_type}",
    "kind": lambda p: p.kind,
    "steps with inf": lambda p: str(p.infinities),
    "with NaN": lambda p: str(p.nans),
}
