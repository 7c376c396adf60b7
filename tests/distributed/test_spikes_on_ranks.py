"""Spikes of a global norm: all ranks skip alike, with no more traffic."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from traffic import sent

import ampfast

# The norms of two ranks' parts: only their joint norm is beyond the limit of 20.
STEPS = [(3.0, 4.0), (3.3, 4.0), (15.0, 15.0), (math.inf, 1.0), (3.0, 4.1)]
REASONS = [None, None, "spike", "overflow", None]


def parameter(layout: str) -> nn.Parameter:
    if layout == "parts":
        return nn.Parameter(torch.zeros(1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))


def on_rank(layout: str, fused: bool, above: Any, way: str) -> tuple[Any, ...]:
    group = {"process_group": dist.group.WORLD} if layout == "parts" else {}
    scaler = ampfast.GradScaler("cpu", init_scale=8.0, **group)
    if way != "clip":
        scaler.skip_above = above
    param = parameter(layout)
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused)
    reasons = []
    for norms in STEPS:
        scaler.scale(torch.zeros(()))
        param.grad = scaler.get_scale() * norms[dist.get_rank()] * torch.ones_like(param)
        if way == "clip":
            scaler.clip_grad_norm_(optimizer, 1.0, skip_above=above)
        if way == "unscale":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.skip_reason(optimizer))
    return reasons, scaler.get_scale(), scaler.stats().spikes, scaler._spike_rules.accepted_norms()


@pytest.mark.parametrize("above", [20.0, ampfast.Sigmas(9.0, 2)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["parts", "dtensor"])
@pytest.mark.parametrize("way", ["clip", "unscale", "step"])
def test_ranks_skip_alike(way: str, layout: str, fused: bool, above: Any) -> None:
    first, second = ranks.run(on_rank, layout, fused, above, way)
    assert first == second
    reasons, scale, spikes, _ = first
    assert (reasons, scale, spikes) == (REASONS, 4.0, 1)


def through_a_change(saves: bool) -> Any:
    """Every rank's own norm is 0 in every second step, the joint one in the fifth."""
    guard = ampfast.StepGuard("cpu", process_group=dist.group.WORLD)
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    limit, reasons, told = ampfast.Sigmas(6.0, 2, patience=2), [], 0
    for turn, norm in enumerate((3.0, 3.3, 9.0, 9.0, 0.0, 9.0, 9.1, 3.0, 40.0)):
        guard.scale(torch.zeros(()))
        param.grad = torch.full_like(param, 0.0 if turn % 2 == dist.get_rank() else norm)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            guard.clip_grad_norm_(optimizer, 1.0, skip_above=limit)
        told += len(caught)
        guard.step(optimizer)
        guard.update()
        reasons.append(guard.skip_reason(optimizer))
        if saves:
            guard.load_state_dict(guard.state_dict())
    return reasons, told, guard._spike_rules.accepted_norms()


@pytest.mark.parametrize("saves", [False, True])
def test_ranks_take_a_lasting_change_as_usual(saves: bool) -> None:
    first, second = ranks.run(through_a_change, saves)
    assert first == second
    reasons = [None, None, "spike", "spike", None, None, None, None, "spike"]
    assert first[:2] == (reasons, 1)


def just_above(order: float, above: Any) -> tuple[list[str | None], list[list[float]]]:
    """The last norm is above the others by less than a float32 can tell."""
    dtype = [torch.float64, torch.float32][dist.get_rank()]
    guard = ampfast.StepGuard("cpu", process_group=dist.group.WORLD)
    param = nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer = torch.optim.SGD([param], lr=0.1)
    reasons = []
    for norm in (20.0, 20.0, 20.0 * (1 + 1e-9), 20.0 * (1 + 1e-6)):
        guard.scale(torch.zeros(()))
        param.grad = torch.full_like(param, norm if dtype == torch.float64 else 0.0)
        guard.clip_grad_norm_(optimizer, 1.0, order, skip_above=above)
        guard.step(optimizer)
        guard.update()
        reasons.append(guard.skip_reason(optimizer))
    return reasons, guard._spike_rules.accepted_norms()


@pytest.mark.parametrize("above", [20.0, ampfast.Sigmas(0.0, 2)], ids=str)
@pytest.mark.parametrize("order", [2.0, 3.0, math.inf])
def test_ranks_of_other_dtypes_skip_alike(order: float, above: Any) -> None:
    first, second = ranks.run(just_above, order, above)
    assert first == second
    assert first[0] == [None, None, None, "spike"]


def sometimes_without_gradients(above: Any, way: str) -> Any:
    scaler = ampfast.GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    if way == "step":
        scaler.skip_above = above
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    reasons = []
    for turn, norm in enumerate((3.0, 4.0, 30.0, 3.5, 4.0, 30.0)):
        scaler.scale(torch.zeros(()))
        param.grad = None if turn % 2 == dist.get_rank() else torch.full_like(param, 8.0 * norm)
        if way == "clip":
            scaler.clip_grad_norm_(optimizer, 1.0, skip_above=above)
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.skip_reason(optimizer))
    return reasons, scaler.get_scale(), scaler.stats().spikes, scaler._spike_rules.accepted_norms()


@pytest.mark.parametrize("above", [20.0, ampfast.Sigmas(9.0, 2)], ids=str)
@pytest.mark.parametrize("way", ["clip", "step"])
def test_ranks_without_gradients_skip_alike(way: str, above: Any) -> None:
    first, second = ranks.run(sometimes_without_gradients, above, way)
    assert first == second
    assert first[:3] == ([None, None, "spike", None, None, "spike"], 8.0, 2)


def traffic_of(above: Any, clips: bool) -> list[tuple[str, int]]:
    scaler = ampfast.GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    scaler.skip_above = above
    param = parameter("parts")
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    scaler.scale(torch.zeros(()))

    def iterate() -> None:
        if clips:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return sent(iterate)


@pytest.mark.parametrize("above", [None, 20.0, ampfast.Sigmas(6.0)], ids=str)
@pytest.mark.parametrize("clips", [True, False])
def test_the_norms_collective_is_the_only_one(clips: bool, above: Any) -> None:
    size = 16 if clips or above is not None else 4
    assert ranks.run(traffic_of, above, clips) == [[("gloo:all_reduce", size)]] * 2
