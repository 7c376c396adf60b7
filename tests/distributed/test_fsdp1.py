"""FSDP1: its ranks skip alike; norms are its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import OPTIMIZERS, Heads, batches_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

import ampfast

SHARDED: dict[str, Any] = {"ours": ampfast.ShardedGradScaler, "torch": TorchShardedGradScaler}


def wrapped(model: Any, **options: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def one_overflow(scaler_name: str, kind: str, way: str, bad: tuple[int, ...]) -> Any:
    """Scale, and whether this rank stepped, after an infinity in some ranks' shards."""
    rank = dist.get_rank()
    model = wrapped(Heads())
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = SHARDED[scaler_name]("cpu", init_scale=64.0)
    batches = batches_of([rank], {})
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(batches(step, 0).loss(model)).backward()
        [flat] = model.parameters()
        if step == 1 and rank in bad:
            flat.grad[3] = math.inf
        before = flat.detach().clone()
        if way == "unscale":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), bool((flat == before).all()), bool(flat.isfinite().all())


@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("way", ["step", "unscale"])
@pytest.mark.parametrize("kind", ["adamw", "fused_adamw", "fused_sgd"])
def test_every_rank_skips(kind: str, way: str, bad: tuple[int, ...], torch_fails: Any) -> None:
    right = [(32.0, True, True)] * 2
    assert ranks.run(one_overflow, "ours", kind, way, bad) == right
    theirs = ranks.attempt(one_overflow, "torch", kind, way, bad)
    fails = [outcome.value for outcome in theirs] != right
    if kind == "adamw":
        assert not fails
    else:
        torch_fails(f"ShardedGradScaler with a fused optimizer, {way}", fails)


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


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"])
def test_the_norm_of_every_strategy(strategy: str) -> None:
    for ours, theirs in ranks.run(norms_of, strategy, ranks=4):
        assert ours == pytest.approx(theirs, rel=1e-6)
