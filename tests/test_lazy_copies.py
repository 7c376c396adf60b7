"""Gradients that are lazy copies, sharing memory until written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.scalers import TorchScaler

from ampfast import GradScaler


class Calls(GradScaler):
    """Override that calls the original."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(*args)


class Divides:
    """Optimizer that only divides by `grad_scale`."""

    _step_supports_amp_scaling = True

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.param_groups = [{"params": [param]}]

    def step(self) -> None:
        pass


def lazy() -> tuple[torch.Tensor, torch.nn.Parameter]:
    """Tensor, and parameter whose gradient is a lazy copy of it."""
    original, param = torch.full((3,), 8.0), torch.nn.Parameter(torch.zeros(3))
    param.grad = torch._lazy_clone(original)
    assert torch._C._is_cow_tensor(param.grad)
    return original, param


def started(kind: type) -> Any:
    scaler = kind("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    return scaler


@pytest.mark.parametrize("kind", [TorchScaler, GradScaler, Calls])
def test_unscaling_leaves_the_original(kind: type) -> None:
    original, param = lazy()
    started(kind).unscale_(torch.optim.SGD([param]))
    assert param.grad.tolist() == [2.0] * 3
    assert original.tolist() == [8.0] * 3


@pytest.mark.parametrize("method", ["step", "_check_inf_per_device", "grad_norm"])
def test_looking_copies_nothing(method: str) -> None:
    """Asking for writable memory would copy."""
    _, param = lazy()
    getattr(started(GradScaler), method)(Divides(param))
    assert torch._C._is_cow_tensor(param.grad)


def test_unscaling_by_the_general_way_leaves_the_original() -> None:
    original, param = lazy()
    scaler = GradScaler("cpu", init_scale=4.0, track="overflow")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([param]))
    assert (param.grad.tolist(), original.tolist()) == ([2.0] * 3, [8.0] * 3)
