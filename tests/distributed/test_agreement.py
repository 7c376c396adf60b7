"""Agreement of ranks in single steps that no table of lists covers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import whole
from support.comparison import started
from support.gradients import parameter_like, parameter_with
from support.steps import take_step
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import SGD

import ampfast
from ampfast import GradScaler, functional


def over_lines(lines: list[str], orders: list[list[int]]) -> list[Any]:
    """Whether this rank skips, for each of its lines in its own order, by the bad rank."""
    rank, seen = dist.get_rank(), []
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    on = [
        square[line] if line in "ab" else DeviceMesh("cpu", [int(r) for r in line])
        for line in lines
    ]
    for bad in range(4):
        local = torch.full((2,), math.inf if rank == bad else 1.0)
        shards = [DTensor.from_local(local.clone(), on[i], [Shard(0)]) for i in orders[rank]]
        optimizer = SGD([parameter_like(each) for each in shards], lr=1.0, foreach=False)
        scaler = started(GradScaler)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.step_skipped(optimizer), scaler.get_scale()))
    return seen


def test_the_order_of_parameters_may_differ() -> None:
    """On the lines of a square and on those of a ring."""
    cases = [
        (["a", "b"], [[0, 1], [1, 0], [1, 0], [0, 1]]),
        (["01", "12", "023"], [[2, 0], [0, 1], [1, 2], [2]]),
    ]
    for values in ranks.run_each(over_lines, cases, ranks=4):
        assert values == ([(True, 4.0)] * 4,) * 4


def overflowing_sum(way: str, scale: float) -> tuple[bool, list[str]]:
    """A step with finite summands whose unscaled sum may not be, and the report's parameters."""
    mesh = init_device_mesh("cpu", (4,))
    params = [torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh)) for _ in range(2)]
    for param, value in zip(params, (1.0, 3e38), strict=True):
        param.grad = DTensor.from_local(torch.tensor([value, 1.0]), mesh, [Partial()])
    flag = torch.zeros(())
    functional.check_([param.grad for param in params], flag)
    assert flag.item() == 1.0
    optimizer = SGD(params, lr=2.0**-10)
    scaler = started(GradScaler, scale, track="norms" if way == "norms" else "overflow")
    if way == "clip":
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert whole(params[1]).isfinite().all()
    skipped = scaler.step_skipped(optimizer)
    assert scaler.skip_reason(optimizer) == ("nonfinite" if skipped else None)
    scaler.update()
    return skipped, [each.name for each in scaler.overflow_report().parameters]


def test_sums_that_overflow() -> None:
    cases = [("step", 1.0), ("step", 2.0), ("step", 8.0), ("clip", 1.0), ("norms", 1.0)]
    for case, values in zip(cases, ranks.run_each(overflowing_sum, cases, ranks=4), strict=True):
        skips = case[1] < 4
        assert values == ((skips, ["group 0, parameter 1"] * skips),) * 4, case


class Halves(Shard):
    """User-defined placement."""


def of_unknown_placement(way: str) -> tuple[float, list[bool]]:
    """Gradient and skips of two steps with an unknown placement among others."""
    mesh = init_device_mesh("cpu", (2,))
    rank, skipped = dist.get_rank(), []
    scaler = started(GradScaler, 4.0)
    for bad in (False, True):
        local = torch.full((1,), math.inf if bad and rank else 4.0 + 4.0 * rank)
        odd = parameter_like(DTensor.from_local(local, mesh, [Halves(0)]))
        replica = distribute_tensor(torch.full((2,), 8.0), mesh, [Replicate()])
        params = [parameter_with(torch.full((2,), 4.0)), parameter_like(replica), odd]
        optimizer = SGD(params, lr=1.0)
        if way == "clip":
            norm = scaler.clip_grad_norm_(optimizer, 1e9).item()
            assert norm == (math.inf if bad else pytest.approx(math.sqrt(15)))
        else:
            scaler.unscale_(optimizer)
        if not bad:
            unscaled = odd.grad.to_local().item()
        skipped.append(scaler.step_skipped(optimizer))
        scaler.update()
    return unscaled, skipped


def test_an_unknown_placement_is_taken_for_shards() -> None:
    for way in ("unscale", "clip"):
        for rank, seen in enumerate(ranks.run(of_unknown_placement, way)):
            assert seen == (1.0 + rank, [False, True])


def aside(kind: str) -> list[float]:
    """Norms of gradients for torch's ops, of which this rank counts a part."""
    mesh, ones = init_device_mesh("cpu", (2,)), torch.ones(4)
    grads = [distribute_tensor(ones, mesh, [each]) for each in (Replicate(), Shard(0))]
    if kind == "sparse":
        grads.append(ones.to_sparse())
    scaler = started(GradScaler, 1.0, backend="aten" if kind == "aten" else None)
    optimizer = SGD([parameter_like(each) for each in grads], lr=1.0, foreach=False)
    return [scaler.grad_norm(optimizer, order).item() for order in (1.0, 2.0)]


def test_each_gradient_for_torchs_ops_counts_once() -> None:
    for kind, count in (("aten", 8.0), ("sparse", 12.0)):
        assert ranks.run(aside, kind) == [pytest.approx([count, math.sqrt(count)])] * 2


def nothing(kind: str, way: str) -> str:
    """Message of a step without any gradient."""
    ones = torch.ones(4)
    if kind == "shards":
        ones = distribute_tensor(ones, init_device_mesh("cpu", (2,)), [Shard(0)])
    scaler = started(GradScaler, process_group=dist.group.WORLD if kind == "group" else None)
    optimizer = SGD([torch.nn.Parameter(ones)], lr=1.0)
    try:
        take_step(scaler, optimizer, way=way)
    except AssertionError as error:
        return str(error)
    return "stepped"


def test_no_rank_has_a_gradient() -> None:
    said = "No inf checks were recorded for this optimizer."
    cases = list(itertools.product(("shards", "group"), ("step", "unscale", "clip")))
    assert ranks.run_each(nothing, cases) == [(said, said)] * len(cases)


def norms_of(strategy: str) -> tuple[float, float]:
    """Norm of a model's gradients, by ampfast and by FSDP."""
    torch.manual_seed(0)
    shape = (2, 2) if strategy == "HYBRID_SHARD" else (4,)
    model = FullyShardedDataParallel(
        torch.nn.Linear(4, 4),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh(
            "cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]
        ),
        use_orig_params=True,
    )
    if strategy == "NO_SHARD":
        ampfast.mark_replicated(model.parameters())
    scaler = ampfast.ShardedGradScaler("cpu", process_group=model.process_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    return scaler.grad_norm(optimizer).item(), model.clip_grad_norm_(1e9).item()


def test_the_norm_of_every_strategy() -> None:
    strategies = [("FULL_SHARD",), ("SHARD_GRAD_OP",), ("HYBRID_SHARD",), ("NO_SHARD",)]
    for values in ranks.run_each(norms_of, strategies, ranks=4):
        for ours, theirs in values:
            assert ours == pytest.approx(theirs, rel=1e-6)
