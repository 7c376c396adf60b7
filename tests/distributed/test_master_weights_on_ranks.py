"""`master_weights_` on several ranks, against master weights by hand on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ampfast


def model_on(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)
    if name == "ddp":
        return DistributedDataParallel(model)
    if name == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def trained(name: str, dtype: torch.dtype, fused: bool, by_hand: bool) -> Any:
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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "stages"])
def test_as_by_hand(name: str, dtype: torch.dtype, fused: bool) -> None:
    def alike(ours: list[Tensor], theirs: list[Tensor]) -> bool:
        return all(map(torch.equal, ours, theirs))

    results = [ranks.run(trained, name, dtype, fused, by_hand) for by_hand in (False, True)]
    for (first, ours, masters, scale), (_, theirs, expected, _) in zip(*results, strict=True):
        assert scale == 4.0
        assert alike(ours, theirs) and alike(masters, expected)
        assert alike(ours, [master.to(dtype) for master in masters])
        assert not any(map(torch.equal, ours, first))
    assert alike(results[0][0][1], results[0][1][1]) or name == "stages"
