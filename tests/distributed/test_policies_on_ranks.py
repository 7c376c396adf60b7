"""Policies on ranks: all follow what was observed on any, in the collective of the flag."""

from __future__ import annotations

import math

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from traffic import sent

import ampfast

PEAKS = [(1.0, 4.0), (2.0**9, 1.0), (2.0**-4, 2.0**-9), (math.inf, 1.0), (1.0, 0.0), (0.5, 2.0)]
WAYS = ["step", "unscale", "clip", "together"]


def parameter(layout: str) -> nn.Parameter:
    if layout == "parts":
        return nn.Parameter(torch.zeros(1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))


def scaler_of(layout: str) -> ampfast.GradScaler:
    group = {"process_group": dist.group.WORLD} if layout == "parts" else {}
    return ampfast.GradScaler(
        "cpu", init_scale=8.0, growth_interval=2, policy=ampfast.LogMax(), **group
    )


def iterate(scaler: ampfast.GradScaler, optimizer: torch.optim.Optimizer, way: str) -> None:
    if way == "unscale":
        scaler.unscale_(optimizer)
    elif way == "clip":
        scaler.clip_grad_norm_(optimizer, 1.0)
    if way == "together":
        scaler.step_and_update(optimizer)
    else:
        scaler.step(optimizer)
        scaler.update()


def scales(layout: str, fused: bool, way: str) -> list[float]:
    scaler, param = scaler_of(layout), parameter(layout)
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused)
    result = []
    for peaks in PEAKS:
        scaler.scale(torch.zeros(()))
        param.grad = scaler.get_scale() * peaks[dist.get_rank()] * torch.ones_like(param)
        iterate(scaler, optimizer, way)
        result.append(scaler.get_scale())
    return result


def alone() -> list[float]:
    scaler = ampfast.GradScaler("cpu", init_scale=8.0, growth_interval=2, policy=ampfast.LogMax())
    param = nn.Parameter(torch.zeros(2))
    result = []
    for peaks in PEAKS:
        scaler.scale(torch.zeros(()))
        param.grad = scaler.get_scale() * torch.tensor(peaks)
        iterate(scaler, torch.optim.SGD([param], lr=0.1), "step")
        result.append(scaler.get_scale())
    return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["parts", "dtensor"])
def test_ranks_follow_the_largest_of_all(layout: str, fused: bool, way: str) -> None:
    assert ranks.run(scales, layout, fused, way) == [alone()] * 2


def traffic_of(way: str) -> list[tuple[str, int]]:
    scaler, param = scaler_of("parts"), parameter("parts")
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    scaler.scale(torch.zeros(()))
    return sent(lambda: iterate(scaler, optimizer, way))


@pytest.mark.parametrize("way", WAYS)
def test_traffic(way: str) -> None:
    both = ("gloo:all_reduce", 16)
    # The norm's collective adds up, so that the peak needs one of its own.
    assert ranks.run(traffic_of, way) == [[both] * (2 if way == "clip" else 1)] * 2
