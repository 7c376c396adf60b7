"""A scale that grows only while values vanish in float16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.reference_launcher import ReferenceLauncher
from torch import nn

import ampfast
from ampfast import UnderflowTarget


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.0)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.0, fused=True)


class Loop:
    """Ten nonzero values, of which as many vanish as are asked for, at scales below 2^10."""

    def __init__(self, make: Any = plain, share: float = 0.15, **options: Any) -> None:
        self.param = nn.Parameter(torch.zeros(12))
        self.optimizer = make([self.param])
        settings = {"init_scale": 8.0, "growth_interval": 2, "track": "health", **options}
        self.scaler = ampfast.GradScaler("cpu", policy=UnderflowTarget(share), **settings)

    def backward(self, vanishing: int) -> None:
        self.scaler.scale(torch.zeros(()))
        values = torch.ones(12)
        values[:vanishing] = 2.0**-34
        values[10:] = 0.0
        self.param.grad = values * self.scaler.get_scale()

    def step(self, vanishing: int, way: str = "step") -> float:
        self.backward(vanishing)
        if way == "unscale":
            self.scaler.unscale_(self.optimizer)
        elif way == "clip":
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        if way == "together":
            self.scaler.step_and_update(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize("way", ["step", "unscale", "clip", "together"])
@pytest.mark.parametrize("make", [plain, fused])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_growth_waits_for_values_that_vanish(backend: str, make: Any, way: str) -> None:
    loop = Loop(make, backend=backend)
    assert [loop.step(1, way) for _ in range(4)] == [8.0] * 4
    # It is due, and comes at once.
    assert [loop.step(2, way) for _ in range(3)] == [16.0, 16.0, 32.0]
    assert [loop.step(1, way) for _ in range(3)] == [32.0] * 3
    loop.backward(9)
    loop.param.grad[11] = math.inf
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.scaler.get_scale() == 16.0


def test_the_largest_share_of_several_optimizers_counts() -> None:
    loop, other = Loop(), Loop(fused)
    other.scaler = loop.scaler
    for _ in range(2):
        for each, vanishing in ((loop, 5), (other, 0)):
            each.backward(vanishing)
            loop.scaler.step(each.optimizer)
        loop.scaler.update()
    assert loop.scaler.get_scale() == 16.0


class Overriding(ampfast.GradScaler):
    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        return super()._unscale_grads_(*args, **kwargs)


@pytest.mark.parametrize("way", ["step", "unscale"])
@pytest.mark.parametrize("make", [plain, fused])
def test_where_the_share_is_not_known_the_rule_is_torchs(make: Any, way: str) -> None:
    loop = Loop(make)
    settings = {"init_scale": 8.0, "growth_interval": 2, "track": "health"}
    loop.scaler = Overriding("cpu", policy=UnderflowTarget(), **settings)
    assert [loop.step(0, way) for _ in range(4)] == [8.0, 16.0, 16.0, 32.0]


def test_device_kernels(launcher: ReferenceLauncher) -> None:
    loop = Loop(fused)
    assert [loop.step(1) for _ in range(2)] == [8.0, 8.0]
    assert loop.step(2) == 16.0


def test_checkpoints() -> None:
    loop = Loop()
    loop.step(1)
    same, other = Loop(), Loop(share=0.5)
    same.scaler.load_state_dict(loop.scaler.state_dict())
    assert same.step(2) == 16.0
    for refusing in (other.scaler, ampfast.GradScaler("cpu", policy=ampfast.LogMax())):
        with pytest.raises(ValueError, match=r"another policy \(policy .*UnderflowTarget"):
            refusing.load_state_dict(loop.scaler.state_dict())


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: UnderflowTarget(0), ValueError, "share must be above 0 and below 1, got 0"),
        (lambda: UnderflowTarget(1.0), ValueError, "share must be above 0 and below 1, got 1.0"),
        (lambda: UnderflowTarget(math.nan), ValueError, "above 0 and below 1, got nan"),
        (lambda: UnderflowTarget("1"), TypeError, "share must be a Python number, got str"),
        (lambda: Loop(track=None), ValueError, "needs track='health', got track=None"),
        (lambda: Loop(track="overflow"), ValueError, "needs track='health', got track='overflow'"),
        (lambda: Loop(dynamic=False), ValueError, "dynamic=False never changes"),
    ],
)
def test_bad_input(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
