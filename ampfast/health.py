"""Report on the range of an optimizer's gradients against that of float16."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampfast.backends.scalars import moved, widest
from ampfast.tables import table
from ampfast.tracking import Names

_SMALLEST_SUBNORMAL = 2.0**-24
_SMALLEST_NORMAL = 2.0**-14
_LARGEST = 65504.0

# Elements that are read at a time, a bound on temporaries.
_PART = 2**22


@dataclass(frozen=True)
class ParameterHealth:
    """Range of one parameter's gradient, times the scale, against the range of float16.

    Attributes:
        name: Name from `name_parameters`, else "group 0, parameter 3".
        group: Index of the parameter group.
        index: Index of the parameter in its group.
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

    name: str
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
        """Largest magnitude of the unscaled gradient."""
        return self.scaled_maximum / self.scale if self.scale else math.nan

    @property
    def zero_share(self) -> float:
        """Fraction of zeros."""
        return self.zeros / self.elements

    @property
    def vanishing_share(self) -> float:
        """Fraction that float16 flushes to zero, except for rounding."""
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
    """Ranges of an optimizer's gradients.

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
            return "No gradients."
        return "\n".join(table(_COLUMNS, self.worst_first()))


def health_of(optimizer: Any, names: Names, scale: float, factor: float) -> GradientHealth:
    """Returns the health of an optimizer's gradients, which are only read; one host sync.

    Args:
        optimizer: Any object with `param_groups`.
        names: Names of parameters.
        scale: Loss scale.
        factor: The gradients times this are scaled.

    Raises:
        ValueError: If there are names, but of none of its parameters.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    known = names.of([param for group in groups for param in group])
    rows: list[Tensor] = []
    found = []
    for number, group in enumerate(groups):
        for index, param in enumerate(group):
            values = _values_of(param.grad)
            if values is not None and values.numel():
                parts = [_range_of(part, factor) for part in values.reshape(-1).split(_PART)]
                name = known.get(param, f"group {number}, parameter {index}")
                found.append(((name, number, index), values.numel(), len(parts)))
                rows += parts
    read = torch.stack([moved(row, rows[0].device) for row in rows]).tolist() if rows else []
    parameters = []
    for place, elements, count in found:
        of_parts, read = read[:count], read[count:]
        *columns, maxima, minima = zip(*of_parts, strict=True)
        nonzero, vanishing, subnormal, overflowing, nans = (int(sum(each)) for each in columns)
        high, low = math.nan if nans else max(maxima), min(minima)
        if nonzero == nans:
            low = math.nan if nans else 0.0
        counts = elements, elements - nonzero, vanishing, subnormal, overflowing
        parameters.append(ParameterHealth(*place, *counts, high, low, scale))
    return GradientHealth(tuple(parameters))


@torch.no_grad()
def _values_of(grad: Tensor | None) -> Tensor | None:
    """Values of a gradient on this rank: summed of a sparse one, none of unknown subclasses."""
    if grad is None:
        return None
    if hasattr(grad, "to_local"):
        grad = grad.to_local()  # of a DTensor
    if type(grad) is not Tensor:
        return None
    grad = grad.detach()
    if grad.layout is not torch.strided:
        grad = grad.coalesce().values() if grad.is_sparse else grad.values()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


@torch.no_grad()
def _range_of(values: Tensor, factor: float) -> Tensor:
    """Counts, as in `health_of`, and the largest and the smallest nonzero magnitude."""
    sizes = values.to(widest(values.device)).abs() * factor
    nonzero, is_nan = sizes != 0, sizes.isnan()
    counts = [
        nonzero.sum(),
        (nonzero & (sizes < _SMALLEST_SUBNORMAL)).sum(),
        (nonzero & (sizes < _SMALLEST_NORMAL)).sum(),
        (~(sizes <= _LARGEST)).sum(),
        is_nan.sum(),
    ]
    smallest = torch.where(nonzero & ~is_nan, sizes, math.inf).amin()
    return torch.stack([*(each.to(sizes.dtype) for each in counts), sizes.amax(), smallest])


def _percent(fraction: float) -> str:
    return "<0.01%" if 0 < fraction < 0.0001 else f"{fraction:.2%}" if fraction else "-"


_COLUMNS: dict[str, Callable[[ParameterHealth], str]] = {
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
