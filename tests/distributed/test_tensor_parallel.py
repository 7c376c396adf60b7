"""Tensor parallelism, alone and under FSDP2: column shards and partial sums."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import (
    OPTIMIZERS,
    SCALERS,
    SETTINGS,
    STEPS,
    WAYS,
    Heads,
    Trace,
    alone,
    assert_eventful,
    assert_same_traces,
    batches_of,
    train,
    whole,
)
from support.comparison import assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ampfast import GradScaler

# The last head stays a plain tensor among DTensors.
PLAN = {
    "heads.0": ColwiseParallel(output_layouts=Replicate()),
    "heads.1": RowwiseParallel(input_layouts=Replicate()),
    "heads.2": RowwiseParallel(input_layouts=Replicate()),
}


@functools.cache
def expected(kind: str, way: str, feeds: int, steps: int) -> Trace:
    [trace] = ranks.run(alone, kind, way, range(feeds), steps, ranks=1)
    assert_eventful(trace)
    return trace


def parallel(kind: str, way: str, steps: int) -> Trace:
    """Tensor parallelism over all ranks."""
    world = dist.get_world_size()
    model = parallelize_module(Heads(), init_device_mesh("cpu", (world,)), PLAN)
    return train(
        model,
        OPTIMIZERS[kind](model.parameters()),
        GradScaler(**SETTINGS),
        batches_of(range(2)),
        WAYS[way],
        steps=steps,
        every=5,
        divisor=2,
    )


def two_ways(kind: str, way: str, steps: int, leave_out: bool) -> Trace:
    """Two-dimensional: the ranks of a line share a batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize_module(Heads(), mesh["tp"], PLAN)
    for head in model.heads[:3]:
        fully_shard(head, mesh=mesh["dp"])
    if not leave_out:
        fully_shard(model, mesh=mesh["dp"])
    return train(
        model,
        OPTIMIZERS[kind](model.parameters()),
        GradScaler(**SETTINGS),
        # No rank averages a plain tensor: both lines get the same batch.
        batches_of(range(2) if leave_out else [mesh.get_local_rank("dp")]),
        WAYS[way],
        steps=steps,
        every=5,
        divisor=2 if leave_out else 1,
    )


# torch's fused optimizers refuse lists that mix DTensors and plain tensors.
LINES = [("adamw", "step"), ("momentum", "unscale"), ("adamw", "clip"), ("sgd", "accumulate")]
SQUARES = [
    (kind, way, leave_out)
    for kind, way in (("adamw", "step"), ("momentum", "clip"), ("sgd", "accumulate"))
    for leave_out in (False, True)
]


def on_lines() -> list[Trace]:
    return [parallel(kind, way, STEPS) for kind, way in LINES]


def on_squares() -> list[Trace]:
    return [two_ways(kind, way, STEPS, leave_out) for kind, way, leave_out in SQUARES]


@functools.cache
def all_traces(job: Callable[[], list[Trace]], world: int) -> list[list[Trace]]:
    # In one job, since a rank needs a second for its first DTensors.
    return ranks.run(job, ranks=world)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("kind", "way"), LINES)
def test_as_one_process(kind: str, way: str, world: int) -> None:
    for traces in all_traces(on_lines, world):
        assert_same_traces(traces[LINES.index((kind, way))], expected(kind, way, 2, STEPS))


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "way", "leave_out"), SQUARES)
def test_under_fully_shard(kind: str, way: str, leave_out: bool) -> None:
    # The parameter left out is a plain tensor.
    index = SQUARES.index((kind, way, leave_out))
    for traces in all_traces(on_squares, 4):
        assert_same_traces(traces[index], expected(kind, way, 2, STEPS))


class Block(nn.Module):
    """Norm and two linear layers, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


def in_sequence(scaler_name: str, kind: str, planted: dict[int, tuple[int, ...]]) -> Any:
    """Sequence parallelism; gradients of the norm are not reduced."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    model = parallelize_module(Block(), init_device_mesh("cpu", (world,)), plan)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = SCALERS[scaler_name]("cpu", init_scale=64.0, growth_interval=3)
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        for step in range(10):
            optimizer.zero_grad()
            inputs = torch.randn(3, 4 * world, 8, generator=torch.Generator().manual_seed(step))
            loss = model(inputs.chunk(world, dim=1)[rank]).square().sum()
            scaler.scale(loss).backward()
            grad = model.norm.weight.grad
            assert grad.placements == (Partial(),)
            if rank in planted.get(step, ()):
                grad._local_tensor[step % 8] = math.inf
            norms = []
            if scaler_name == "ours":
                full = torch.cat([whole(p.grad).reshape(-1) for p in model.parameters()])
                exact = full.double().norm().item() / scaler.get_scale()
                norms = [exact, scaler.grad_norm(optimizer).item()]
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), norms))
    warned = [str(w.message) for w in caught if "ampfast" in str(w.message)]
    return seen, [whole(p) for p in model.parameters()], warned


@pytest.mark.parametrize("kind", ["momentum", "fused_adamw"])
def test_gradients_that_are_not_added_up(kind: str) -> None:
    planted = {1: (0,), 2: (1,), 6: (0, 1)}
    theirs = ranks.run(in_sequence, "torch", kind, planted)
    for (seen, parameters, warned), (their_scales, their_parameters, _) in zip(
        ranks.run(in_sequence, "ours", kind, planted), theirs, strict=True
    ):
        assert [scale for scale, _ in seen] == [scale for scale, _ in their_scales]
        assert_same(parameters, their_parameters)
        for _, (exact, norm) in seen:
            assert norm == pytest.approx(exact, rel=1e-6, nan_ok=True)
        assert not warned
