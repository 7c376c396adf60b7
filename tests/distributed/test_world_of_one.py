"""Scaler with a group: what another rank says, and collectives that fail."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparison import started as started_by
from support.gradients import parameter_like, parameter_with
from support.groups import Pair
from support.launchers import ReferenceLauncher
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ampfast
from ampfast import GradScaler

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not dist.is_available() or not dist.is_gloo_available(),
    reason="needs gloo",
)

KINDS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "plain": lambda params: torch.optim.SGD(params, lr=1.0),
    "fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
}
started = partial(started_by, growth_interval=1)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """The other rank of torch's groups."""
    pair = Pair()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    told = lambda _, tensors, options: pair.allreduce(tensors, options)  # noqa: E731
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", told)
    yield pair
    dist.destroy_process_group()


def optimizer_of(kind: str, count: int = 2) -> torch.optim.Optimizer:
    return KINDS[kind]([parameter_with(torch.ones(count))])


def test_the_group_is_the_given_one(world: dist.ProcessGroup) -> None:
    scaler = started(process_group=world)
    assert scaler.process_group is world
    with pytest.raises(TypeError, match="process_group must be"):
        scaler.process_group = "world"
    assert scaler.process_group is world
    assert copy.copy(scaler).process_group is world
    assert "_ranks" not in started(process_group=None).__getstate__()


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_does_not_ride_before_the_ranks_agree(
    kind: str, launcher: ReferenceLauncher
) -> None:
    pair, optimizer = Pair(), optimizer_of(kind)
    scaler, pair.finds = started(process_group=pair), True
    scaler.step_and_update(optimizer)
    assert launcher.launches == ["check" if kind == "fused" else "unscale", "update"]
    assert scaler.step_skipped(optimizer) and scaler.get_scale() == 4.0


class Own(GradScaler):
    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, _: bool) -> Any:
        return {found_inf.device: found_inf}


def test_an_override_that_unscales_takes_the_others_flag() -> None:
    pair, optimizer = Pair(), optimizer_of("plain")
    scaler, pair.finds = started(Own, process_group=pair), True
    scaler.step(optimizer)
    scaler.update()
    assert pair.sent == [[0.0]]
    assert scaler.step_skipped(optimizer) and scaler.get_scale() == 4.0


@pytest.mark.parametrize("kernels", ["cpu", "launcher"])
@pytest.mark.parametrize("make", [GradScaler, Own])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_group_distributed_gradients_alone_are_agreed_on(
    kind: str, make: type[GradScaler], kernels: str, pair: Pair, request: pytest.FixtureRequest
) -> None:
    if kernels == "launcher":
        request.getfixturevalue("launcher")
    mesh = init_device_mesh("cpu", (2,))
    scaler = started(make)
    scaler.step_and_update(optimizer_of(kind))
    assert pair.sent == [] and scaler.get_scale() == 16.0
    for finds, scale in ((False, 16.0), (True, 4.0)):
        scaler, pair.sent, pair.finds = started(make), [], finds
        gradient = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        params = [parameter_like(gradient)]  # torch has no fused SGD for them
        scaler.step_and_update(torch.optim.Adam(params, fused=kind == "fused"))
        assert pair.sent == [[0.0]]
        assert scaler.get_scale() == scale


def test_the_quotient_by_the_users_scale_is_agreed_on() -> None:
    """After the ranks agreed on finite gradients."""
    pair, optimizer = Pair(), optimizer_of("fused")
    scaler = started(process_group=pair)
    scaler.unscale_(optimizer)
    optimizer.grad_scale = torch.tensor(1e-20)
    pair.sent, pair.finds = [], True
    scaler.step(optimizer)
    scaler.update()
    assert pair.sent == [[0.0]]
    assert scaler.step_skipped(optimizer) and scaler.get_scale() == 4.0


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("world")
def test_a_tracked_model_of_dtensors_can_be_converted(dtype: torch.dtype, is_left: bool) -> None:
    """torch swaps DTensors for others, which it refuses if something refers to them weakly."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    inputs = torch.ones(5, 3, dtype=dtype)
    optimizer = ampfast.master_weights_(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = started(track="overflow")
    scaler.name_parameters(model)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(inputs).float().square().sum()).backward()
        model[1].bias.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    if not is_left:
        optimizer.zero_grad()
    model.to(torch.float16)
    (row,) = scaler.overflow_report().parameters
    assert (row.name, row.infinities) == ("1.bias", 2)


# Collectives that fail: gradients are divided once, and `step` agrees again

SCALE, GRADIENT = 4.0, 16.0
STEPPED = 1.0 - GRADIENT
LIMITED = partial(GradScaler, skip_above=1e6)
Call = Callable[[GradScaler, Any], Any]


def clip(order: float, in_place: bool = True, limit: float = 1e3) -> Call:
    options: Any = {"in_place": in_place}
    return lambda scaler, given: scaler.clip_grad_norm_(given, limit, order, **options)


# Calls that write before the ranks agree.
DIVIDING: dict[str, tuple[str, Call]] = {
    "unscale_": ("plain", GradScaler.unscale_),
    "unscale_, fused": ("fused", GradScaler.unscale_),
    "step": ("plain", GradScaler.step),
    "step_and_update": ("plain", GradScaler.step_and_update),
}
READING: dict[str, tuple[str, Call]] = {
    "clip 3": ("plain", clip(3.0)),
    **{f"clip {order}": ("plain", clip(order)) for order in (2.0, math.inf)},
    "clip a list": ("plain", lambda scaler, optimizer: clip(3.0)(scaler, [optimizer])),
    **{f"clip {order}, fused": ("fused", clip(order)) for order in (2.0, 3.0, math.inf)},
    **{f"defer {order}": ("fused", clip(order, in_place=False)) for order in (2.0, 3.0, math.inf)},
    "grad_norm": ("plain", GradScaler.grad_norm),
    "step, fused": ("fused", GradScaler.step),
    "step_and_update, fused": ("fused", GradScaler.step_and_update),
}


class Overriding(GradScaler):
    """Subclass whose hook calls the original."""

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        return super()._unscale_grads_(*args, **kwargs)


def fail(scaler: GradScaler, call: Callable[..., Any], *arguments: Any) -> None:
    """Calls while the next collective fails."""
    group: Any = scaler.process_group
    group.failing = (group.calls + 1,)
    with pytest.raises(ConnectionError, match="connection closed by peer"):
        call(*arguments)
    assert group.calls == group.failing[0]


def failed(call: Call, kind: str, make: Any = GradScaler) -> tuple[Any, Any, Any]:
    """Scaler, optimizer and parameter after a call whose collective failed."""
    param = parameter_with(torch.full((3,), SCALE * GRADIENT))
    scaler: Any = make("cpu", init_scale=SCALE, process_group=Pair())
    scaler.scale(torch.ones(()))
    optimizer = KINDS[kind]([param])
    fail(scaler, call, scaler, optimizer)
    return scaler, optimizer, param


def assert_equal(tensor: torch.Tensor, value: float) -> None:
    assert tensor.tolist() == [value] * 3


@pytest.mark.parametrize("make", [GradScaler, Overriding])
@pytest.mark.parametrize("path", DIVIDING)
def test_gradients_are_divided_once_and_the_step_agrees_again(path: str, make: Any) -> None:
    kind, call = DIVIDING[path]
    scaler, optimizer, param = failed(call, kind, make)
    for again in (GradScaler.unscale_, clip(2.0), clip(3.0)):
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            again(scaler, optimizer)
        assert_equal(param.grad, GRADIENT)
    fail(scaler, scaler.step, optimizer)
    assert_equal(param, 1.0)
    assert not any(hasattr(optimizer, name) for name in ("grad_scale", "found_inf"))
    scaler.step(optimizer)
    scaler.update()
    assert_equal(param, STEPPED)
    assert_equal(param.grad, GRADIENT)
    assert scaler.stats().skipped == 0


@pytest.mark.parametrize("path", [path for path in (*DIVIDING, *READING) if path != "grad_norm"])
def test_the_update_agrees_again(path: str) -> None:
    kind, call = {**DIVIDING, **READING}[path]
    scaler, _, param = failed(call, kind)
    fail(scaler, scaler.update)
    assert scaler.stats().steps == 0
    scaler.update()
    assert (scaler.stats().steps, scaler.stats().skipped) == (1, 0)
    assert_equal(param, 1.0)
    # The other ranks, whose collective was the same, wait for it.
    scaler, _, _ = failed(call, kind)
    pair: Any = scaler.process_group
    pair.finds = True
    scaler.update(32.0)
    assert len(pair.sent) == 1
    assert (scaler.stats().skipped, scaler.get_scale()) == (1, 32.0)


MEASURING = LIMITED, partial(GradScaler, track="norms")


@pytest.mark.parametrize(
    ("path", "make"),
    [(path, GradScaler) for path in READING]
    + [(path, make) for path in (*READING, *DIVIDING) for make in MEASURING],
)
def test_a_call_that_wrote_nothing_may_be_repeated(path: str, make: Any) -> None:
    """So may one that measures, since the ranks agree before it writes."""
    kind, call = {**DIVIDING, **READING}[path]
    scaler, optimizer, param = failed(call, kind, make)
    assert_equal(param.grad, SCALE * GRADIENT)
    assert_equal(param, 1.0)
    call(scaler, optimizer)
    if "step" not in path:
        scaler.step(optimizer)
    assert_equal(param, STEPPED)
