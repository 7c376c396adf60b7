"""Norms of each parameter's gradient over the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ampfast.backends import scalars
from ampfast.diagnose.text_table import table

# Number of steps over which norms are kept.
STEPS = 128


@dataclass(frozen=True)
class ParameterNorms:
    """2-norms of one parameter's unscaled gradient before clipping, in the last 128 steps.

    Attributes:
        name: Name from `name_parameters`, else "group 0, parameter 3".
        optimizer: Index of the optimizer among the tracked ones.
        optimizer_type: Class name of the optimizer.
        group: Index of the parameter group.
        index: Index of the parameter in its group.
        last: Norm of the last step; 0 without a gradient, inf or NaN after an overflow.
        mean: Mean of the finite norms of steps with a gradient, NaN if there is none.
        largest: Largest of these norms, NaN if there is none.
    """

    name: str
    optimizer: int
    optimizer_type: str
    group: int
    index: int
    last: float
    mean: float
    largest: float


@dataclass(frozen=True)
class NormReport:
    """Norms of all parameters' gradients, of which the largest are printed first.

    Attributes:
        parameters: One entry for each parameter, in the order of the optimizers.
    """

    parameters: tuple[ParameterNorms, ...]

    def __str__(self) -> str:
        if not self.parameters:
            return "No norms so far."
        # NaN sorts before all others.
        rows = sorted(self.parameters, key=lambda p: (p.last == p.last, -p.last))
        columns = {
            "parameter": lambda p: p.name,
            "last norm": lambda p: f"{p.last:.4g}",
            "mean": lambda p: f"{p.mean:.4g}",
            "largest": lambda p: f"{p.largest:.4g}",
        }
        return "\n".join(table(columns, rows))


class NormHistory:
    """Norms of an optimizer's parameters in the last steps, on a device.

    Attributes:
        values: float32 of shape (STEPS, P), a ring; -0 without a gradient.
        count: int64 of shape (1,), the number of steps.
    """

    def __init__(self, parameters: int, device: torch.device) -> None:
        shape = STEPS, parameters
        self.values = scalars.allocate(torch.zeros, shape, dtype=torch.float32, device=device)
        self.count = scalars.allocate(torch.zeros, 1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def append(self, squares: Sequence[Tensor]) -> None:
        """Appends the norms of a step, whose squares are the sum of `squares`; no host sync."""
        here = [scalars.moved(each, self.values.device) for each in squares]
        total = reduce(add, here)  # of -0 alone it is -0
        self.values.index_copy_(0, self.count % STEPS, total.sqrt().float().unsqueeze(0))
        self.count.add_(1)

    def summary(self) -> Tensor:
        """Returns float32 of shape (P, 3): the last norm, mean and largest of finite ones."""
        rows = torch.arange(STEPS, device=self.values.device).unsqueeze(1)
        known = self.values.isfinite() & ~self.values.signbit() & (rows < self.count)
        mean = torch.where(known, self.values, 0.0).sum(0) / known.sum(0)
        largest = torch.where(known, self.values, -1.0).amax(0)
        largest = torch.where(known.any(0), largest, torch.nan)
        last = self.values.index_select(0, (self.count - 1) % STEPS).squeeze(0)
        return torch.stack([last.abs(), mean, largest], dim=1)
