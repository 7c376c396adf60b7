"""Restarted worlds, pipeline stages with different layouts, and ranks without gradients."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from support.gradients import parameter_like
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import SGD

import ampfast
from ampfast import GradScaler, functional


def begun(**arguments: Any) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=1.0, **arguments)
    scaler.scale(torch.ones(()))
    return scaler


def stages(bad: int | None) -> tuple[float, bool]:
    """Pipeline of two stages on two ranks each: the first sharded, the second replicated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "part"))
    rank = dist.get_rank()
    whole = torch.tensor([1.0, 2.0, 2.0, 4.0])
    grad: torch.Tensor = whole.clone()
    if rank < 2:
        grad = distribute_tensor(whole, mesh["part"], [Shard(0)])
    elif bad in (2, 3):
        grad[0] = math.inf  # on both replicas
    if rank == bad and rank < 2:
        grad.to_local()[0] = math.inf
    optimizer = SGD([parameter_like(grad)], lr=1.0)
    same = parameter_like(torch.full((4,), 3.0))
    ampfast.mark_replicated([same])
    scaler = begun(process_group=mesh["stage"])
    norm = scaler.grad_norm([optimizer, SGD([same], lr=1.0)]).item()
    scaler.step(optimizer)
    return norm, scaler.step_skipped(optimizer)


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_stages_that_are_cut_differently(bad: int | None) -> None:
    norm = math.sqrt(2 * 25 + 4 * 9) if bad is None else math.inf
    assert ranks.run(stages, bad, ranks=4) == [(pytest.approx(norm), bad is not None)] * 4


def half(layout: str) -> list[float]:
    """Norms of a gradient on all ranks together with one on a mesh of the last two."""
    all_ranks, last = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [2, 3])
    first = distribute_tensor(torch.ones(4), all_ranks, [Shard(0)])
    placement = Shard(0) if layout == "sharded" else Replicate()
    local = torch.full((1 if layout == "sharded" else 2,), 3.0)
    params = [parameter_like(first)]
    if dist.get_rank() >= 2:
        params.append(parameter_like(DTensor.from_local(local, last, [placement])))
    optimizer, scaler = SGD(params, lr=1.0), begun()
    return [scaler.grad_norm(optimizer, order).item() for order in (2.0, 3.0, math.inf)]


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_mesh_of_a_part_of_the_ranks(layout: str) -> None:
    values = torch.tensor([1.0] * 4 + [3.0] * 2)
    norms = [torch.linalg.vector_norm(values, order).item() for order in (2.0, 3.0, math.inf)]
    assert ranks.run(half, layout, ranks=4) == [pytest.approx(norms)] * 4


def other_order() -> list[float]:
    """Norms of a replicated gradient on a mesh that orders ranks otherwise than the scaler's."""
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh = DeviceMesh("cpu", [0, 3, 2, 1])
    grad = DTensor.from_local(torch.full((4,), 2.0), mesh, [Replicate()])
    optimizer, scaler = SGD([parameter_like(grad)], lr=1.0), begun(process_group=group)
    return [scaler.grad_norm(optimizer, order).item() for order in (2.0, 3.0)]


def test_a_mesh_in_another_order_of_ranks_counts_once() -> None:
    norms = [torch.linalg.vector_norm(torch.full((4,), 2.0), order).item() for order in (2.0, 3.0)]
    assert ranks.run(other_order, ranks=4) == [pytest.approx(norms)] * 4


class Own(GradScaler):
    """Optimizer that reads local tensors itself."""

    def _unscale_grads_(self, optimizer: Any, *arguments: Any) -> dict[torch.device, torch.Tensor]:
        params = optimizer.param_groups[0]["params"]
        finite = all(param.grad.to_local().isfinite().all() for param in params)
        return {torch.device("cpu"): torch.tensor(0.0 if finite else 1.0)}


def hooked(fused: bool) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((1,), math.inf if dist.get_rank() else 1.0)
    optimizer = torch.optim.Adam(
        [parameter_like(DTensor.from_local(local, mesh, [Shard(0)]))], fused=fused
    )
    scaler = Own("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    return scaler.step_skipped(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_flags_of_a_hook_are_agreed_on(fused: bool) -> None:
    assert ranks.run(hooked, fused) == [True, True]


def summed() -> list[float]:
    """Flags of the functional calls for finite summands with an infinite sum."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for call in ("check", "unscale", "finite"):
        size = 1e38 if call == "finite" else 3e38
        grads = [DTensor.from_local(torch.full((2,), size), mesh, [Partial()])]
        flag = torch.zeros(())
        if call == "unscale":
            functional.unscale_(grads, flag, torch.tensor(1.0))
        else:
            functional.check_(grads, flag)
        found.append(flag.item())
    return found


def test_sums_of_partial_gradients_in_lists() -> None:
    assert ranks.run(summed) == [[1.0, 1.0, 0.0]] * 2


def lacking(fused: bool) -> bool:
    """Step without a gradient on rank 0, and with a bad one on rank 1."""
    mesh = init_device_mesh("cpu", (2,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    if dist.get_rank():
        param.grad = DTensor.from_local(torch.full((2,), math.inf), mesh, [Shard(0)])
    optimizer, scaler = torch.optim.Adam([param], fused=fused), begun()
    scaler.step(optimizer)
    return scaler.step_skipped(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_without_the_gradient_of_its_shard(fused: bool) -> None:
    assert ranks.run(lacking, fused) == [True, True]


def experts() -> float:
    """Norm of shards and of a plain gradient that differs between ranks."""
    mesh = init_device_mesh("cpu", (2,))
    shards = parameter_like(distribute_tensor(torch.full((4,), 2.0), mesh, [Shard(0)]))
    own = parameter_like(torch.full((1,), 3.0 + dist.get_rank()))
    scaler = begun(process_group=dist.group.WORLD)
    return scaler.grad_norm(SGD([shards, own], lr=1.0)).item()


def test_plain_gradients_are_parts_over_a_group() -> None:
    assert ranks.run(experts) == [pytest.approx(math.sqrt(4 * 4 + 9 + 16))] * 2


def nothing(kind: str, way: str) -> str:
    """Message of a step without any gradient."""
    mesh = init_device_mesh("cpu", (2,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    if kind == "group":
        param = torch.nn.Parameter(torch.ones(4))
    scaler = begun(process_group=dist.group.WORLD if kind == "group" else None)
    optimizer = SGD([param], lr=1.0)
    try:
        if way == "clip":
            scaler.clip_grad_norm_(optimizer, 1.0)
        elif way == "unscale":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    except AssertionError as error:
        return str(error)
    return "stepped"


@pytest.mark.parametrize("way", ["step", "unscale", "clip"])
@pytest.mark.parametrize("kind", ["shards", "group"])
def test_no_rank_has_a_gradient(kind: str, way: str) -> None:
    said = "No inf checks were recorded for this optimizer."
    assert ranks.run(nothing, kind, way) == [said, said]


def anew() -> list[bool]:
    """Steps in one world and then in another, with scalers made before or after."""
    rank, found = dist.get_rank(), []
    before = ampfast.ShardedGradScaler("cpu")
    before.scale(torch.ones(()))
    store = dist.distributed_c10d._get_default_store()
    for world in range(2):
        scalers = [before, ampfast.ShardedGradScaler("cpu")]
        for scaler in scalers:
            scaler.scale(torch.ones(()))
            optimizer = SGD([parameter_like(torch.full((2,), math.inf if rank else 1.0))], lr=1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.step_skipped(optimizer))
            # Some collectives still work after their world was destroyed.
            agreement = scaler._ranks.agreement([])
            found.append(agreement.groups[0].process_group is dist.group.WORLD)
        if world == 0:
            dist.barrier()
            dist.destroy_process_group()
            again = dist.PrefixStore("again", store)
            dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
    return found


def test_a_world_after_another() -> None:
    assert ranks.run(anew) == [[True] * 8] * 2


def test_a_world_older_than_the_import_of_torchs_class() -> None:
    code = """
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        import ampfast
        ampfast.ShardedGradScaler("cpu")
        dist.destroy_process_group()
        ampfast.ShardedGradScaler("cpu")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_disabled_sharded_scaler_needs_no_world() -> None:
    scaler = ampfast.ShardedGradScaler("cpu", enabled=False)
    optimizer = SGD([parameter_like(torch.tensor([3.0, 4.0]))], lr=1.0)
    assert scaler.grad_norm(optimizer).item() == 5.0
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 5.0
    scaler.step(optimizer)
    scaler.update()
