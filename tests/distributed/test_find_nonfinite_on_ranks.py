"""Modules of wrapped models: each rank watches what it computes."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ampfast


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.inf if dist.get_rank() == 1 else 1.0)


def found(wrapper: str) -> list[str | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Broken(), nn.Linear(4, 4))
    scaler = ampfast.GradScaler("cpu", process_group=dist.group.WORLD, track="modules")
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
        scaler.step(optimizer)
        scaler.update()
    reports = scaler.overflow_report(local=True), scaler.overflow_report()
    return [None if each.module is None else each.module.module for each in reports]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_the_module_of_the_rank_that_found_one(wrapper: str) -> None:
    assert ranks.run(found, wrapper) == [[None, "2"], ["2", "2"]]
