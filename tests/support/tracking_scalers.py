"""Scalers with tracking, and parameters for them."""

from __future__ import annotations

from typing import Any

import torch

from ampfast import GradScaler
from ampfast.tracking import OverflowReport
from support import scalers


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def started(track: str | None = "overflow", **arguments: Any) -> GradScaler:
    return scalers.started(GradScaler, 4.0, track=track, **arguments)


def parameters(*values: float | None, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Parameter of three elements for each value, which is in the middle of its gradient."""
    found = []
    for value in values:
        param = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        if value is not None:
            param.grad = torch.tensor([1.0, value, 2.0], dtype=dtype)
        found.append(param)
    return found


def set_values(params: list[Any], *values: float | None) -> None:
    for param, value in zip(params, values, strict=True):
        param.grad = None if value is None else torch.tensor([1.0, value, 2.0], dtype=param.dtype)


def summary(report: OverflowReport) -> list[tuple[str, str, int, int, int]]:
    return [(p.name, p.kind, p.step, p.infinities, p.nans) for p in report.totals]
