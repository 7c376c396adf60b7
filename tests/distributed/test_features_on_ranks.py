"""Spikes, reports, ends and master weights on ranks: all do alike."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import local, whole
from support.steps import take_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ampfast
from ampfast import GradScaler, Sigmas

WAYS = ("step", "unscale", "clip", "together")
LAYOUTS = ("parts", "shards")


def parameter(layout: str, size: int = 1) -> nn.Parameter:
    """Parameter of the same local size on both ranks, plain or sharded, or the whole on one."""
    if layout != "shards":
        return nn.Parameter(torch.zeros(2 * size if layout == "whole" else size))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Parameter(distribute_tensor(torch.zeros(2 * size), mesh, [Shard(0)]))


def scaler_for(layout: str, **more: Any) -> GradScaler:
    group = {"process_group": dist.group.WORLD} if layout == "parts" else {}
    return GradScaler("cpu", init_scale=8.0, growth_interval=2, **group, **more)


def fill(scaler: Any, param: nn.Parameter, values: tuple[float | None, ...]) -> None:
    """Gives this rank its unscaled gradient, or none; that of all to a process without ranks."""
    scaler.scale(torch.zeros(()))
    if not dist.is_initialized():
        param.grad = scaler.get_scale() * torch.tensor([value or 0.0 for value in values])
        return
    value = values[dist.get_rank()]
    param.grad = None if value is None else scaler.get_scale() * value * torch.ones_like(param)


# Spikes are those of the joint norm

# Norms of two ranks' parts: only their joint norm is beyond the limit of 20.
PARTS = [(3.0, 4.0), (3.3, 4.0), (15.0, 15.0), (math.inf, 1.0), (3.0, 4.1)]
# Each rank has no gradient in every second step.
HOLES = [(None, 3.0), (4.0, None), (None, 30.0), (3.5, None), (None, 4.0), (30.0, None)]
# By feature: settings of the scaler, gradients of the ranks by step, and reasons of skips.
FEATURES: dict[str, tuple[dict[str, Any], list[Any], set[str | None]]] = {
    "limit": ({"skip_above": 20.0}, PARTS, {None, "nonfinite", "spike"}),
    "sigmas": ({"skip_above": Sigmas(9.0, 2)}, PARTS, {None, "nonfinite", "spike"}),
    "limit, holes": ({"skip_above": 20.0}, HOLES, {None, "spike"}),
    "sigmas, holes": ({"skip_above": Sigmas(9.0, 2)}, HOLES, {None, "spike"}),
}


def followed(name: str, layout: str) -> tuple[list[Any], list[Any]]:
    """Scales and reasons of skips by way and step; final states."""
    settings, steps, _ = FEATURES[name]
    seen, states = [], []
    for way, fused in itertools.product(WAYS, (False, True)):
        if way == "unscale" and steps is HOLES:
            continue
        scaler, param = scaler_for(layout, **settings), parameter(layout)
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused)
        for step, values in enumerate(steps):
            fill(scaler, param, values)
            take_step(scaler, optimizer, way=way)
            seen.append((way, step, scaler.get_scale(), scaler.skip_reason(optimizer)))
        states.append((scaler.stats(), scaler.state_dict()))
    return seen, states


# All ranks have a shard of a gradient.
CASES = [(name, layout) for name in FEATURES for layout in LAYOUTS[: 1 if "holes" in name else 2]]


def test_ranks_do_as_one_process() -> None:
    for (name, _), (first, second) in zip(CASES, ranks.run_each(followed, CASES), strict=True):
        alone, _ = followed(name, "whole")
        assert {reason for *_, reason in alone} == FEATURES[name][2]
        assert first == second and first[0] == alone, name


# Overflow reports


def reports_of(layout: str) -> list[list[Any]]:
    """Totals of the overflow report after each of four steps, by way."""
    rank, results = dist.get_rank(), []
    for way, fused in (
        *((w, False) for w in WAYS),
        ("step", True),
        ("defer", True),
        ("clip 3", True),
    ):
        params = [parameter(layout, 2) for _ in range(3)]
        optimizer = torch.optim.Adam(params, lr=1.0, fused=fused)
        scaler = scaler_for(layout, track="overflow")
        model = nn.ParameterDict(zip("abc", params, strict=True))
        scaler.name_parameters(model)
        results.append([])
        # By step: values that ranks plant in parameters.
        for bad in (
            {0: ("a", math.inf)},
            {},
            {0: ("a", math.nan), 1: ("c", math.inf)},
            {0: ("a", 1e30)},
        ):
            for param in params:
                fill(scaler, param, (1.0, 1.0))
            name, value = bad.get(rank, ("a", 1.0))
            local(params["abc".index(name)].grad)[-1] = value
            take_step(scaler, optimizer, way=way)
            rows = scaler.overflow_report().totals
            results[-1].append([(r.name, r.kind, r.step, r.infinities, r.nans) for r in rows])
    return results


def test_every_rank_knows_every_overflow() -> None:
    first = [("a", "inf", 0, 1, 0)]
    both = [("a", "nan", 2, 1, 1), ("c", "inf", 2, 1, 0)]
    for values in ranks.run_each(reports_of, [(layout,) for layout in LAYOUTS]):
        for results in values:
            assert results == [[first, first, both, both]] * len(results)


def unequal() -> tuple[list[str], list[str], bool]:
    rank = dist.get_rank()
    params = [parameter("parts") for _ in range(1 + rank)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = scaler_for("parts", track="overflow")
    model = nn.ModuleDict({f"stage {rank}": nn.ParameterList(params)})
    scaler.name_parameters(model)
    for step in range(2):
        if step and not rank:
            optimizer.add_param_group({"params": [parameter("parts")]})
        for param in params:
            fill(scaler, param, (1.0, math.inf))
        take_step(scaler, optimizer)
    reports = scaler.overflow_report(), scaler.overflow_report(local=True)
    joint, own = ([row.name for row in report.parameters] for report in reports)
    return joint, own, scaler.step_skipped(optimizer)


def test_reports_of_ranks_with_other_parameters() -> None:
    bad = ["stage 1.0", "stage 1.1"]
    assert ranks.run(unequal) == [(bad, [], True), (bad, bad, True)]


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.inf if dist.get_rank() == 1 else 1.0)


def bad_module(wrapper: str) -> list[str | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Broken(), nn.Linear(4, 4))
    scaler = scaler_for("parts", track="modules")
    scaler.name_parameters(model)
    wrapped: nn.Module = model
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for layer in (model[0], model[3], model):
            fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(wrapped(torch.rand(3, 4)).sum()).backward()
        take_step(scaler, optimizer)
    reports = scaler.overflow_report(local=True), scaler.overflow_report()
    return [None if each.module is None else each.module.module for each in reports]


def test_the_module_of_the_rank_that_found_one() -> None:
    found = ranks.run_each(bad_module, [("ddp",), ("fsdp2",)])
    assert found == [([None, "2"], ["2", "2"])] * 2


def ends_at() -> tuple[int, str]:
    scaler, param = scaler_for("parts", max_skips=3, track="overflow"), parameter("parts")
    optimizer = torch.optim.SGD([param], lr=0.1)
    for step in range(9):
        fill(scaler, param, (1.0, math.nan if step >= 2 else 1.0))
        try:
            take_step(scaler, optimizer)
        except FloatingPointError as error:
            return step, str(error)
    return -1, ""


def test_all_ranks_end_after_the_same_skips() -> None:
    (step, told), (other_step, other_told) = ranks.run(ends_at)
    assert (step, other_step) == (4, 4)
    assert told.endswith("so far. This is the report of one rank: see those of the others.")
    assert "group 0, parameter 0" in other_told and "one rank" not in other_told


# Master weights, against those by hand on the same ranks


def model_on(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)
    if name == "ddp":
        return DistributedDataParallel(model)
    if name == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def mastered(name: str, dtype: torch.dtype, fused: bool, by_hand: bool) -> Any:
    """Parameters before and after, master weights and scale of this rank."""
    model = model_on(name, dtype)
    params = list(model.parameters())
    first = [whole(param) for param in params]
    masters = [param.detach().float().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(masters if by_hand else params, lr=0.01, fused=fused)
    if not by_hand:
        ampfast.master_weights_(optimizer)
    group = dist.group.WORLD if name == "stages" else None
    scaler = ampfast.GradScaler("cpu", init_scale=8.0, process_group=group)
    for step in range(5):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        values = torch.randn(5, 8, generator=generator).to(dtype)
        if step == 2 and dist.get_rank() == 1:
            values[0, 0] = torch.inf
        scaler.scale(model(values).float().square().mean()).backward()
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float()
        scaler.step(optimizer)
        if by_hand and not scaler.step_skipped(optimizer):
            with torch.no_grad():
                for param, master in zip(params, masters, strict=True):
                    param.copy_(master)
        scaler.update()
    if not by_hand:
        masters = [optimizer.master_weights[param] for param in params]
    return first, [whole(p) for p in params], [whole(m) for m in masters], scaler.get_scale()


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "stages"])
def test_master_weights_are_those_by_hand(name: str) -> None:
    def alike(ours: list[Tensor], theirs: list[Tensor]) -> bool:
        return all(map(torch.equal, ours, theirs))

    halves = (torch.float16, torch.bfloat16)
    cases = list(itertools.product((name,), halves, (False, True), (False, True)))
    found = ranks.run_each(mastered, cases)
    for (_, dtype, *_), *results in zip(cases[::2], found[::2], found[1::2], strict=True):
        for (first, ours, masters, scale), (_, theirs, expected, _) in zip(*results, strict=True):
            assert scale == 4.0
            assert alike(ours, theirs) and alike(masters, expected)
            assert alike(ours, [master.to(dtype) for master in masters])
            assert not any(map(torch.equal, ours, first))
        assert alike(results[0][0][1], results[0][1][1]) or name == "stages"
