"""torch's own ops as a backend: how many a step takes, and the state that they update."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.comparison import FLOATS
from support.steps import Training, take_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampfast import GradScaler, Percentile, Sigmas, StepGuard, ZScore, functional
from ampfast.backends import aten, scalars

SIZES = (10, 62, 160)
MOST_MORE = 9


class Count(TorchDispatchMode):
    """Counts ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["cpu", "elsewhere"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU, or it in place of a device that the host neither reads nor computes for."""
    if request.param == "elsewhere":
        monkeypatch.setattr(aten, "_is_on_host", lambda tensor: False)
    return str(request.param)


def ops_of(scaler: Any, size: int, kind: str, way: str = "step") -> list[str]:
    """Ops of a step and an update, without the optimizer's own step."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(size)]
    optimizer: Any = torch.optim.SGD(params)
    if kind == "fused":
        optimizer = torch.optim.Adam(params, fused=True)

    def use() -> None:
        scaler.scale(torch.ones(()))
        for param in params:
            param.grad = torch.full((4,), 3.0)
        count.names.clear()
        take_step(scaler, optimizer, way=way)

    with Count() as count:
        use()
        optimizer.step = lambda: None
        use()
    return count.names


@pytest.mark.parametrize("way", ["step", "together"])
@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("size", SIZES)
def test_few_more_ops_than_torch(place: str, size: int, kind: str, way: str) -> None:
    ours = ops_of(GradScaler("cpu", backend="aten"), size, kind, way)
    theirs = ops_of(torch.amp.GradScaler("cpu"), size, kind)
    assert len(ours) <= len(theirs) + MOST_MORE, ours


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("options", [{}, {"track": "overflow"}])
def test_no_op_for_each_parameter(place: str, options: dict[str, Any], kind: str) -> None:
    way = "step" if options else "clip"
    few, some, many = (
        ops_of(GradScaler("cpu", backend="aten", **options), size, kind, way) for size in SIZES
    )
    assert few == some == many


@pytest.mark.parametrize("bad", FLOATS)
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_products_that_overflow_are_noticed(place: str, kind: str, bad: torch.dtype) -> None:
    scaler = GradScaler("cpu", backend="aten", init_scale=0.5, allow_fp16=True)
    params = [torch.nn.Parameter(torch.ones(3, 4, dtype=dtype)) for dtype in (*FLOATS, bad)]
    empty = torch.nn.Parameter(torch.ones(0))
    scaler.scale(torch.ones(()))
    for value in (1.0, torch.finfo(bad).max / 1.5):
        optimizer = torch.optim.Adam([*params, empty], fused=True)
        if kind == "plain":
            optimizer = torch.optim.SGD([*params, empty])  # type: ignore[assignment]
        for param in params:
            param.grad = torch.ones_like(param).t().contiguous().t()
        empty.grad = torch.ones(0)
        params[-1].grad = torch.ones(3, 8, dtype=bad)[:, ::2]
        params[-1].grad[2, 1] = value
        scaler.step(optimizer)
        # Fused optimizers divide in float32, or in float64.
        wide = kind == "fused" and bad is torch.float16
        assert scaler.step_skipped(optimizer) is (value > 1 and not wide)
        scaler.update(0.5)


class RefuseFloat64(TorchDispatchMode):
    """A device without float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, found)):
            dtype = each.dtype if isinstance(each, Tensor) else each
            if dtype is torch.float64 or dtype is torch.complex128:
                raise TypeError(f"{func} has a float64 tensor, which the device lacks")
        return found


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch, place: str) -> Iterator[None]:
    monkeypatch.setattr(scalars, "has_float64", lambda device: False)
    with RefuseFloat64():
        yield


SCALERS: dict[str, Callable[[], GradScaler]] = {
    "default": lambda: GradScaler("cpu", backend="aten"),
    "track": lambda: GradScaler("cpu", backend="aten", track="overflow"),
    "norms": lambda: GradScaler("cpu", backend="aten", track="norms"),
    "limits": lambda: GradScaler(
        "cpu", backend="aten", min_scale=1.0, max_scale=2.0**20, hysteresis=2
    ),
    "skip_above": lambda: GradScaler("cpu", backend="aten", skip_above=Sigmas(2.0, 2)),
    "guard": lambda: StepGuard("cpu", backend="aten"),
}


LIMITS = 1.0, Percentile(50, 4), ZScore(2.0, warmup=2)


@pytest.mark.slow
@pytest.mark.parametrize("make", SCALERS.values(), ids=SCALERS)
@pytest.mark.parametrize(
    ("clips", "limit"),
    [(None, 1.0), *itertools.product([2.0, math.inf, 3.0], LIMITS)],
    ids=lambda value: str(value),
)
def test_a_device_without_float64(
    without_float64: None, make: Callable[[], GradScaler], clips: float | None, limit: Any
) -> None:
    scaler = make()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.name_parameters(model)
    for step in range(5):
        optimizer.zero_grad()
        value = math.inf if step == 3 else 1.0 + step
        scaler.scale(model(torch.full((4, 3), value)).sum()).backward()
        scaler.grad_norm(optimizer)
        if clips is not None:
            scaler.clip_grad_norm_(optimizer, limit, clips)
        elif step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert scaler.step_skipped(optimizer) is (step == 3) or scaler.skip_above is not None
        scaler.found_inf(optimizer)
        scaler.skip_reason(optimizer)
        scaler.update()
    assert scaler.stats().steps == 5
    assert len(scaler.history().step) == 5
    if scaler._track:
        report = scaler.overflow_report()
        assert report.step == 3 and all(o.infinities + o.nans == 1 for o in report.totals)
    if scaler._track == "norms":
        assert all(each.largest > 0 for each in scaler.grad_norms().parameters)
    make().load_state_dict(scaler.state_dict())
    assert copy.deepcopy(scaler).get_scale() == scaler.get_scale()


def test_norms_whose_squares_overflow_leave_no_nan(without_float64: None) -> None:
    scaler, param = GradScaler("cpu", backend="aten"), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1e-30)
    for norm in (1.0, 1e25, 1e30, 2.0, 3e25):
        scaler.scale(torch.ones(()))
        param.grad = scaler.get_scale() * torch.full((1,), norm)
        scaler.clip_grad_norm_(optimizer, ZScore(warmup=3), math.inf)
        scaler.step(optimizer)
        scaler.update()
    GradScaler("cpu").load_state_dict(scaler.state_dict())


def test_a_tracker_beyond_the_interval_grows(place: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", "aten")
    scale, tracker = torch.tensor(8.0), torch.tensor(50, dtype=torch.int32)
    functional.update_scale_(scale, tracker, torch.zeros(()), 2.0, 0.5, 10)
    assert (scale, tracker) == (16.0, 0)
    for way, interval in itertools.product(("loaded", "written", "replaced"), (1, 10)):
        scaler = GradScaler("cpu", backend="aten", init_scale=8.0, growth_interval=interval)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
        for step in range(2):
            scaler.scale(torch.ones(()))
            optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
            scaler.step(optimizer)
            if step == 1 and way == "loaded":
                scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 50})
            elif step == 1 and way == "written":
                scaler._growth_tracker.fill_(50)
            elif step == 1:
                scaler._growth_tracker = torch.tensor(50, dtype=torch.int32)
            scaler.update()
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (
            32.0 if interval == 1 else 16.0,
            0,
        )


def test_a_norm_one_percent_above_equal_ones_is_a_deviation_above(place: str) -> None:
    scaler = GradScaler("cpu", backend="aten", skip_above=Sigmas(2.0, 4))
    training = Training(scaler).step(8.0, 8.0, 8.0, 8.0, 8.1)
    assert scaler.stats().spikes == 0
    assert training.step(8.3).scaler.stats().spikes == 1


@pytest.mark.parametrize("has", [False, True])
def test_an_intel_gpu_says_whether_it_has_float64(has: bool, monkeypatch: Any) -> None:
    found = SimpleNamespace(has_fp64=has)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: found)
    scalars.has_float64.cache_clear()
    assert scalars.has_float64(torch.device("xpu", 0)) is has
    scalars.has_float64.cache_clear()
    assert not scalars.has_float64(torch.device("mps"))
