"""Overflow reports agreed on by all ranks."""

from __future__ import annotations

import math

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from traffic import sent

from ampfast import GradScaler

Told = tuple[str, str, int, int, int]


def reports_of(way: str, layout: str) -> list[list[Told]]:
    """Overflow report and collectives of each of three steps."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    if layout == "shards":
        params = [torch.nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])) for p in params]
    optimizer = torch.optim.Adam(params, lr=1.0, fused=way in ("fused", "defer"))
    group = None if layout == "shards" else dist.group.WORLD
    scaler = GradScaler("cpu", init_scale=1.0, process_group=group, track="overflow")
    scaler.name_parameters(zip("abc", params, strict=True))
    scaler.scale(torch.ones(()))
    seen = []
    # By step: values that ranks plant in parameters.
    for bad in (
        {0: ("a", math.inf)},
        {},
        {0: ("a", math.nan), 1: ("c", math.inf)},
        {0: ("a", 1e30)},
    ):
        for param in params:
            param.grad = torch.ones_like(param)
        name, value = bad.get(rank, ("a", 1.0))
        grad = params["abc".index(name)].grad
        (grad if group is not None else grad.to_local())[-1] = value
        if way == "twice":
            scaler.unscale_(optimizer)
        elif way == "clip":
            scaler.clip_grad_norm_(optimizer, 1.0)
        elif way == "defer":
            scaler.clip_grad_norm_(optimizer, 1.0, in_place=False)
        elif way == "odd norm":
            scaler.clip_grad_norm_(optimizer, 1.0, 3.0)
        scaler.step(optimizer)
        scaler.update()
        rows = scaler.overflow_report().totals
        seen.append([(r.name, r.kind, r.step, r.infinities, r.nans) for r in rows])
    return seen


@pytest.mark.parametrize("layout", ["plain", "shards"])
@pytest.mark.parametrize("way", ["step", "fused", "twice", "clip", "defer", "odd norm"])
def test_every_rank_knows_every_overflow(way: str, layout: str) -> None:
    first = [("a", "inf", 0, 1, 0)]
    both = [("a", "nan", 2, 1, 1), ("c", "inf", 2, 1, 0)]
    for seen in ranks.run(reports_of, way, layout):
        assert seen == [first, first, both, both]


def unequal() -> tuple[list[str], list[str], bool, list[tuple[str, int]]]:
    rank = dist.get_rank()
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(1 + rank)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler("cpu", process_group=dist.group.WORLD, track="overflow")
    scaler.name_parameters((f"stage {rank}, {i}", param) for i, param in enumerate(params))
    scaler.scale(torch.ones(()))
    for step in range(2):
        if step and not rank:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        for param in params:
            param.grad = torch.full_like(param, math.inf if rank else 1.0)
        traffic = sent(lambda: scaler.step(optimizer))
        scaler.update()
    reports = scaler.overflow_report(), scaler.overflow_report(local=True)
    joint, own = ([row.name for row in report.parameters] for report in reports)
    return joint, own, scaler.step_skipped(optimizer), traffic


def test_ranks_with_other_parameters() -> None:
    bad = ["stage 1, 0", "stage 1, 1"]
    for rank, (joint, own, skipped, traffic) in enumerate(ranks.run(unequal)):
        assert joint == bad
        assert own == (bad if rank else [])
        assert skipped
        assert traffic == [("gloo:all_reduce", 4)]
