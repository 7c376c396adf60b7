"""Scaler with a group of one rank, with simulated flags of another rank."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gradients import parameter_like, parameter_with
from support.reference_launcher import ReferenceLauncher
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import ampfast
from ampfast import GradScaler, distributed

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not dist.is_available() or not dist.is_gloo_available(),
    reason="needs gloo",
)

KINDS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Values sent to other ranks; `["bad"]` as the first makes them find an overflow."""
    sent: list[list[float]] = []

    def all_reduce(_: distributed.Group, tensor: torch.Tensor, op: Any) -> None:
        sent.append(tensor.reshape(-1).tolist())
        if sent[0] == ["bad"]:
            tensor.fill_(1.0)

    monkeypatch.setattr(distributed.Group, "all_reduce_", all_reduce)
    return sent


def started(kind: type[GradScaler] = GradScaler, **arguments: Any) -> GradScaler:
    scaler = kind("cpu", init_scale=8.0, growth_interval=1, **arguments)
    scaler.scale(torch.ones(()))
    return scaler


def optimizer_of(kind: str, count: int = 2) -> torch.optim.Optimizer:
    return KINDS[kind]([parameter_with(torch.ones(count))])


def distributed_optimizer(kind: str, values: torch.Tensor) -> torch.optim.Optimizer:
    """Of a parameter whose gradient is a DTensor."""
    mesh = init_device_mesh("cpu", (1,))
    return KINDS[kind]([parameter_like(distribute_tensor(values, mesh, [Shard(0)]))])


def test_the_group_is_the_given_one(world: dist.ProcessGroup) -> None:
    scaler = started(process_group=world)
    assert scaler.process_group is world
    scaler.process_group = None
    assert scaler.process_group is None
    scaler.process_group = world
    with pytest.raises(TypeError, match="process_group must be"):
        scaler.process_group = "world"
    assert scaler.process_group is world
    assert copy.copy(scaler).process_group is world
    assert "_ranks" not in started(process_group=None).__getstate__()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("says", ["good", "bad"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_on_another_rank_decides(
    kind: str, says: str, unscales: bool, together: bool, world: Any, heard: list[Any]
) -> None:
    scaler, optimizer = started(process_group=world), optimizer_of(kind)
    heard.append([says])
    if unscales:
        scaler.unscale_(optimizer)
        assert heard[1:] == [[0.0]]
    if together:
        scaler.step_and_update(optimizer)
    else:
        scaler.step(optimizer)
        scaler.update()
    assert heard[1:] == [[0.0]]
    assert scaler.step_skipped(optimizer) is (says == "bad")
    assert scaler.get_scale() == (4.0 if says == "bad" else 16.0)
    assert scaler.stats().steps == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_does_not_ride_before_the_ranks_agree(
    kind: str, world: dist.ProcessGroup, heard: list[Any], launcher: ReferenceLauncher
) -> None:
    scaler, optimizer = started(process_group=world), optimizer_of(kind)
    heard.append(["bad"])
    scaler.step_and_update(optimizer)
    assert launcher.launches == ["check" if kind == "fused" else "unscale", "update"]
    assert scaler.step_skipped(optimizer) and scaler.get_scale() == 4.0


class Own(GradScaler):
    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, _: bool) -> Any:
        return {found_inf.device: found_inf}


@pytest.mark.parametrize(
    ("make", "kind", "sends"),
    [(Own, "plain", 0.0), *((GradScaler, kind, -1.0) for kind in KINDS)],
)
def test_a_rank_without_gradients_takes_the_others_flag(
    make: type[GradScaler], kind: str, sends: float, world: Any, heard: list[Any]
) -> None:
    """Or with an override that unscales them itself."""
    scaler, optimizer = started(make, process_group=world), optimizer_of(kind)
    if make is GradScaler:
        optimizer.zero_grad()
    heard.append(["bad"])
    scaler.unscale_(optimizer)
    assert heard[1:] == [[sends]]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_skipped(optimizer) and scaler.get_scale() == 4.0


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_group_distributed_gradients_alone_are_agreed_on(
    kind: str, heard: list[Any]
) -> None:
    scaler = started()
    scaler.step_and_update(optimizer_of(kind))
    assert heard == [] and scaler.get_scale() == 16.0
    for says, scale in (("good", 16.0), ("bad", 4.0)):
        scaler = started()
        heard[:] = [[says]]
        scaler.step_and_update(distributed_optimizer(kind, torch.ones(2)))
        assert heard[1:] == [[0.0]]
        assert scaler.get_scale() == scale


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_agrees_with_itself_without_a_collective(kind: str, world: Any) -> None:
    scaler, optimizer = started(process_group=world), optimizer_of(kind, 4)
    with torch.profiler.profile() as profile:
        assert scaler.grad_norm(optimizer).item() == 2.0 / 8
        scaler.step_and_update(optimizer)
    assert not [event.name for event in profile.events() if "all_reduce" in event.name]
    assert scaler.get_scale() == 16.0


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


def test_a_replicated_parameter_can_be_converted() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    distributed.mark_replicated(model.parameters())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    params = [other.weight, model.weight, other.bias, model.bias]
    assert distributed.marks_of([params[:2], params[2:]]) == {1: (), 3: ()}
    alive = weakref.ref(model.weight)
    del params, model
    distributed.mark_replicated([])  # the next call drops what nothing else holds
    assert alive() is None
