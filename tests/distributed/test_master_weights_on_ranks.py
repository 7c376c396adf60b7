"""`master_weights_` on several ranks, against master weights by hand on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ampfast


def small_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)


def backward(model: nn.Module, scaler: Any, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    values = torch.randn(5, 8, generator=generator).to(dtype)
    if seed == 2 and dist.get_rank() == 1:
        values[0, 0] = torch.inf
    scaler.scale(model(values).float().square().mean()).backward()


def whole(params: list[Tensor]) -> list[Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]


def trained(
    wrap: Callable[[nn.Module], nn.Module], make: Any, dtype: torch.dtype, **options: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor], float]:
    """Parameters of both sides, our master weights, and our scale."""
    ours = wrap(small_model(dtype))
    optimizer = ampfast.master_weights_(make(list(ours.parameters())))
    scaler = ampfast.GradScaler("cpu", init_scale=8.0, **options)
    for seed in range(5):
        optimizer.zero_grad()
        backward(ours, scaler, seed, dtype)
        scaler.step(optimizer)
        scaler.update()
    theirs = wrap(small_model(dtype))
    params = list(theirs.parameters())
    masters = [param.detach().float().requires_grad_() for param in params]
    hand, by_hand = make(masters), ampfast.GradScaler("cpu", init_scale=8.0, **options)
    for seed in range(5):
        theirs.zero_grad()
        backward(theirs, by_hand, seed, dtype)
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float()
        by_hand.step(hand)
        if not by_hand.step_skipped(hand):
            with torch.no_grad():
                for param, master in zip(params, masters, strict=True):
                    param.copy_(master)
        by_hand.update()
    ours_now = [param.detach() for param in ours.parameters()]
    weights = [optimizer.master_weights[param] for param in ours.parameters()]
    return (
        [p.clone() for p in whole(ours_now)],
        [p.clone() for p in whole([p.detach() for p in params])],
        [w.clone() for w in whole(weights)],
        scaler.get_scale(),
    )


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def on_rank(name: str, dtype: torch.dtype, fused: bool) -> tuple[Any, ...]:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01, fused=fused)

    if name == "stages":
        return trained(lambda model: model, make, dtype, process_group=dist.group.WORLD)
    return trained(DistributedDataParallel if name == "ddp" else sharded, make, dtype)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "stages"])
def test_as_by_hand(name: str, dtype: torch.dtype, fused: bool) -> None:
    results = ranks.run(on_rank, name, dtype, fused)
    for ours, theirs, masters, scale in results:
        assert scale == 4.0
        start = small_model(dtype).parameters()
        for a, b, master, first in zip(ours, theirs, masters, start, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, master.to(dtype))
            assert not torch.equal(a, first)
    alike = [torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True)]
    assert all(alike) or name == "stages"
