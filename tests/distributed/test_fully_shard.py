"""FSDP2, whose gradients are DTensors: uneven and empty shards, two dimensions, offload."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from exact_training import (
    OPTIMIZERS,
    OVERFLOWS,
    ROWS,
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
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from ampfast import GradScaler

# torch has no fused SGD for DTensors. The other ways are in the tests of DDP.
PAIRS = [
    *((kind, "step") for kind in ("sgd", "momentum", "adamw", "fused_adam", "fused_adamw")),
    *(("sgd", way) for way in ("unscale", "together", "accumulate", "clip")),
    *(("fused_adamw", way) for way in ("unscale", "together", "clip", "defer")),
]


@functools.cache
def expected(kind: str, way: str, world: int, steps: int, rows: Sequence[int] = ROWS) -> Trace:
    [trace] = ranks.run(alone, kind, way, range(world), steps, rows, ranks=1)
    assert_eventful(trace)
    return trace


@contextlib.contextmanager
def synced_at_last(model: Any, last: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(last)
    yield


def mesh_of(name: str) -> DeviceMesh:
    world = dist.get_world_size()
    if name == "replicas":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world,))


def plant(params: Sequence[Any], step: int) -> None:
    """Makes one element of what some ranks hold infinite, of their first gradient that has any."""
    if dist.get_rank() in OVERFLOWS.get(step, ()):
        parts = [param.grad.to_local() for param in params]
        part = next((part for part in parts if part.numel()), None)
        if part is not None:
            part.view(-1)[step % part.numel()] = math.inf


def sharded(
    kind: str, way: str, steps: int, mesh: str, rows: Sequence[int], in_place: bool, unit: str
) -> Trace:
    """Overflows come through the inputs, so that most ranks have some, or are in one shard only."""
    model: Any = Heads(rows)
    options: dict[str, Any] = {"mesh": mesh_of(mesh)}
    if unit == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if unit != "all":
        for head in model.heads:
            fully_shard(head, **options)
    fully_shard(model, **options)
    return train(
        model,
        OPTIMIZERS[kind](model.parameters()),
        GradScaler(**SETTINGS),
        batches_of([dist.get_rank()], {} if in_place else OVERFLOWS),
        WAYS[way],
        steps=steps,
        every=5,
        prepare=functools.partial(plant, list(model.parameters())) if in_place else None,
        every_part=functools.partial(synced_at_last, model),
    )


def check(
    kind: str,
    way: str,
    world: int = 2,
    *,
    steps: int = STEPS,
    mesh: str = "shards",
    rows: Sequence[int] = ROWS,
    in_place: bool = True,
    unit: str = "each",
) -> None:
    traces = ranks.run(sharded, kind, way, steps, mesh, rows, in_place, unit, ranks=world)
    for trace in traces:
        assert_same_traces(trace, expected(kind, way, world, steps, rows))


@pytest.mark.parametrize(("kind", "way"), PAIRS)
def test_as_one_process(kind: str, way: str) -> None:
    check(kind, way)


@pytest.mark.parametrize("mesh", ["shards", "replicas"])
def test_overflows_of_the_inputs(mesh: str) -> None:
    check("adamw", "step", 4, mesh=mesh, in_place=False)


def test_two_hundred_steps() -> None:
    check("fused_adamw", "step", steps=200)


@pytest.mark.parametrize("way", ["step", "clip", "defer"])
def test_uneven_shards(way: str) -> None:
    # Of some parameters two or three ranks have nothing.
    check("fused_adamw", way, 4)


@pytest.mark.parametrize("way", ["step", "clip"])
def test_ranks_that_have_nothing(way: str) -> None:
    check("fused_adamw", way, 4, rows=(2, 1))


@pytest.mark.parametrize("way", ["accumulate", "clip", "defer"])
def test_replicas_of_shards(way: str) -> None:
    check("fused_adamw", way, 4, mesh="replicas", in_place=False)


@pytest.mark.parametrize("kind", ["momentum", "fused_adam"])
def test_all_parameters_in_one_unit(kind: str) -> None:
    check(kind, "clip", unit="all")


@pytest.mark.parametrize("way", ["step", "clip"])
def test_offloaded_to_the_cpu(way: str) -> None:
    check("adamw", way, unit="offloaded")
