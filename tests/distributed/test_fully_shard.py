"""FSDP2: DTensor gradients with uneven and empty shards, two mesh dimensions, offload."""

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
    PAIRS,
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

ShardedCase = tuple[str, str, str, tuple[int, ...], bool, str]


def case(
    kind: str,
    way: str,
    mesh: str = "shards",
    *,
    rows: tuple[int, ...] = ROWS,
    in_place: bool = True,
    unit: str = "each",
) -> ShardedCase:
    return kind, way, mesh, rows, in_place, unit


# torch has no fused SGD for DTensors.
TWO_RANKS = [
    *(case(kind, way) for kind, way in PAIRS if kind != "fused_sgd"),
    case("momentum", "clip", unit="all"),
    case("fused_adam", "clip", unit="all"),
    case("adamw", "step", unit="offloaded"),
    case("adamw", "clip", unit="offloaded"),
]
FOUR_RANKS = [
    # Some parameters have no element on two or three ranks, two ranks none of any.
    *(case("fused_adamw", way) for way in ("step", "clip", "defer")),
    *(case("fused_adamw", way, rows=(2, 1)) for way in ("step", "clip")),
    case("adamw", "step", in_place=False),
    *(
        case(kind, way, "replicas", in_place=False)
        for kind, way in (("adamw", "step"), ("fused_adamw", "clip"), ("fused_adamw", "defer"))
    ),
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
    """Makes one element of some ranks' first gradient with local elements infinite."""
    if dist.get_rank() in OVERFLOWS.get(step, ()):
        parts = [param.grad.to_local() for param in params]
        part = next((part for part in parts if part.numel()), None)
        if part is not None:
            part.view(-1)[step % part.numel()] = math.inf


def sharded(
    steps: int, kind: str, way: str, mesh: str, rows: Sequence[int], in_place: bool, unit: str
) -> Trace:
    """Trains with overflows from the inputs, on most ranks, or in a single shard."""
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


def all_sharded(cases: list[ShardedCase]) -> list[Trace]:
    return [sharded(STEPS, *each) for each in cases]


@functools.cache
def all_traces(world: int) -> list[list[Trace]]:
    # In one job, since a rank needs a second for its first DTensors.
    return ranks.run(all_sharded, TWO_RANKS if world == 2 else FOUR_RANKS, ranks=world)


@pytest.mark.parametrize("index", range(len(TWO_RANKS)), ids=lambda i: str(TWO_RANKS[i]))
def test_two_ranks_as_one_process(index: int) -> None:
    kind, way, _, rows, *_ = TWO_RANKS[index]
    for traces in all_traces(2):
        assert_same_traces(traces[index], expected(kind, way, 2, STEPS, rows))


@pytest.mark.sweep
@pytest.mark.parametrize("index", range(len(FOUR_RANKS)), ids=lambda i: str(FOUR_RANKS[i]))
def test_four_ranks_as_one_process(index: int) -> None:
    kind, way, _, rows, *_ = FOUR_RANKS[index]
    for traces in all_traces(4):
        assert_same_traces(traces[index], expected(kind, way, 4, STEPS, rows))


@pytest.mark.sweep
def test_two_hundred_steps() -> None:
    for trace in ranks.run(sharded, 200, *case("fused_adamw", "step")):
        assert_same_traces(trace, expected("fused_adamw", "step", 2, 200))
