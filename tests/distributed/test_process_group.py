"""Process group whose ranks own different parameters: one decision, one norm, one scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import (
    OPTIMIZERS,
    OVERFLOWS,
    PAIRS,
    SCALERS,
    SETTINGS,
    STEPS,
    WAYS,
    Heads,
    Trace,
    assert_eventful,
    assert_same_traces,
    batches_of,
    train,
)
from torch.distributed.device_mesh import init_device_mesh

import ampfast
from ampfast import GradScaler

# Heads by rank; all ranks have the last one if it is `shared`.
STAGES = {2: ((0, 2), (1, 3)), 4: ((0,), (1,), (2,), (3,))}
SHARED = {2: ((0, 3), (1, 2, 3)), 4: ((0, 3), (1, 3), (2, 3), (3,))}


def planted(model: Heads, owners: dict[int, int], rank: int | None) -> Callable[[int], None]:
    """Makes a gradient of the ranks in `OVERFLOWS` infinite; of all ranks, or of one."""

    def plant(step: int) -> None:
        for owner, head in owners.items():
            if owner in OVERFLOWS.get(step, ()) and rank in (None, owner):
                grad = model.heads[head].weight.grad
                grad[0, step % grad.shape[1]] = math.inf

    return plant


def gone(model: Heads, head: int) -> Callable[[int], None]:
    """Drops the gradients of a head in two of three steps."""

    def forget(step: int) -> None:
        if step % 3:
            for parameter in model.heads[head].parameters():
                parameter.grad = None

    return forget


def both(*calls: Callable[[int], None]) -> Callable[[int], None]:
    return lambda step: [call(step) for call in calls] and None


def alone(kind: str, way: str, world: int, steps: int, missing: int | None = None) -> Trace:
    """Training in one process that owns all heads."""
    model = Heads()
    prepare = planted(model, {rank: owned[0] for rank, owned in enumerate(STAGES[world])}, None)
    # torch's fused SGD reads uninitialised memory after a first step that overflows, and its norms
    # are rounded differently.
    ours = kind == "fused_sgd" or way in ("clip", "defer")
    return train(
        model,
        OPTIMIZERS[kind](model.parameters()),
        SCALERS["ours" if ours else "torch"](**SETTINGS),
        batches_of(range(2)),
        WAYS[way],
        steps=steps,
        prepare=prepare if missing is None else both(prepare, gone(model, missing)),
    )


@functools.cache
def expected(kind: str, way: str, world: int, steps: int, missing: int | None = None) -> Trace:
    [trace] = ranks.run(alone, kind, way, world, steps, missing, ranks=1)
    assert_eventful(trace)
    return trace


def places(heads: Sequence[int]) -> list[int]:
    """Indices of the heads' weights and biases among all parameters."""
    return [2 * head + i for head in heads for i in range(2)]


def staged(
    kind: str, way: str, steps: int, shared: bool, mesh: bool, missing: int | None = None
) -> Trace:
    """Training on a rank that owns some heads."""
    world, rank = dist.get_world_size(), dist.get_rank()
    owned = (SHARED if shared else STAGES)[world][rank]
    model = Heads()
    params = [list(model.parameters())[i] for i in places(owned)]
    if shared:
        ampfast.mark_replicated(model.heads[3].parameters())
    group = init_device_mesh("cpu", (world,)) if mesh else dist.group.WORLD
    prepare = planted(model, {r: o[0] for r, o in enumerate(STAGES[world])}, rank)
    return train(
        model,
        OPTIMIZERS[kind](params),
        GradScaler(**SETTINGS, process_group=group),
        batches_of(range(2)),
        WAYS[way],
        steps=steps,
        params=lambda: params,
        prepare=prepare if missing is None else both(prepare, gone(model, missing)),
    )


def check(
    kind: str,
    way: str,
    world: int = 2,
    steps: int = STEPS,
    shared: bool = False,
    mesh: bool = False,
    missing: int | None = None,
) -> None:
    expects = expected(kind, way, world, steps, missing)
    traces = ranks.run(staged, kind, way, steps, shared, mesh, missing, ranks=world)
    for trace, owned in zip(traces, (SHARED if shared else STAGES)[world], strict=True):
        assert_same_traces(trace, expects.part(places(owned)))


@pytest.mark.parametrize(("kind", "way"), PAIRS)
def test_stages_as_one_process(kind: str, way: str) -> None:
    check(kind, way)


@pytest.mark.parametrize(
    ("kind", "way", "world"),
    [
        ("fused_adamw", "step", 2),
        pytest.param("momentum", "clip", 4, marks=pytest.mark.sweep),
        pytest.param("fused_adam", "defer", 4, marks=pytest.mark.sweep),
    ],
)
def test_two_hundred_steps(kind: str, way: str, world: int) -> None:
    check(kind, way, world, steps=200)


@pytest.mark.parametrize("way", ["step", "clip", "defer"])
def test_a_mesh_of_one_dimension(way: str) -> None:
    check("fused_adamw", way, world=4, mesh=True)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("way", ["clip", "defer"])
def test_marked_parameters_count_once(way: str, world: int) -> None:
    check("fused_adamw", way, world, shared=True)


@pytest.mark.parametrize("way", ["step", "unscale", "together", "clip"])
@pytest.mark.parametrize("kind", ["momentum", "fused_adam"])
def test_a_rank_without_gradients_takes_part(kind: str, way: str) -> None:
    # Rank 1 owns head 1 only.
    check(kind, way, world=4, missing=1)


def decided(group: str, kind: str, bads: list[list[int]]) -> list[float]:
    """Flags and norms on each rank, by path, with overflows on some ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if group == "pairs":
        pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
        process_group: Any = pairs[rank // 2]
    else:
        process_group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        if group != "whole":
            process_group = process_group[group]
    return [found_by_all_paths(process_group, kind, rank in bad) for bad in bads]


def found_by_all_paths(process_group: Any, kind: str, is_bad: bool) -> float:
    found = []
    for path in ("step", "unscale_", "clip_grad_norm_", "_check_inf_per_device"):
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = OPTIMIZERS[kind](params)
        scaler = GradScaler("cpu", init_scale=4.0, process_group=process_group)
        scaler.scale(torch.ones(()))
        for param in params:
            param.grad = torch.full((3,), 4.0)
        if is_bad:
            params[1].grad[2] = math.nan
        getattr(scaler, path)(optimizer, *([1.0] if path == "clip_grad_norm_" else []))
        flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert list(flags) == [torch.device("cpu")]
        flag = flags[torch.device("cpu")]
        assert flag.shape == () and flag.dtype is torch.float32
        found.append(flag.item())
        if path != "_check_inf_per_device":
            if path != "step":
                scaler.step(optimizer)
            assert scaler.step_skipped(optimizer) is bool(flag.item())
            assert scaler.found_inf(optimizer).item() == flag.item()
            assert (params[0][0].item() == 1.0) is bool(flag.item())
            scaler.update()
            assert scaler.get_scale() == (2.0 if flag.item() else 4.0)
    assert len(set(found)) == 1, found
    return found[0]


@pytest.mark.parametrize("kind", ["sgd", "fused_sgd"])
@pytest.mark.parametrize(
    ("group", "members"),
    [
        ("pairs", [[0, 1], [2, 3]]),
        ("whole", [[0, 1, 2, 3]]),
        ("a", [[0, 2], [1, 3]]),
        ("b", [[0, 1], [2, 3]]),
    ],
)
def test_every_path_decides_for_the_ranks_of_the_group(
    group: str, members: list[list[int]], kind: str
) -> None:
    bads = [[], [0], [3], [1, 2], [0, 1, 2, 3]]
    found = ranks.run(decided, group, kind, bads, ranks=4)
    for i, bad in enumerate(bads):
        for together in members:
            expects = float(bool(set(together) & set(bad)))
            assert [found[rank][i] for rank in together] == [expects] * len(together), bad


def divided_by(own: float, large: int | None) -> tuple[bool, float]:
    """Whether a step with the user's own `grad_scale` was skipped, and the next scale."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS["fused_sgd"]([param])
    scaler = GradScaler("cpu", init_scale=1.0, process_group=dist.group.WORLD)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((3,), 1e30 if dist.get_rank() == large else 1.0)
    scaler.unscale_(optimizer)
    optimizer.grad_scale = torch.tensor(own)
    scaler.step(optimizer)
    scaler.update()
    skipped = scaler.step_skipped(optimizer)
    assert (param == 1.0).all().item() is skipped
    return skipped, scaler.get_scale()


def test_only_the_quotient_by_the_users_scale_overflows() -> None:
    """One rank's quotient overflows after the ranks agreed on finite gradients."""
    assert ranks.run(divided_by, 1e-20, None) == [(False, 1.0)] * 2
    for large in (0, 1):
        assert ranks.run(divided_by, 1e-20, large) == [(True, 0.5)] * 2


def norms(order: float) -> list[float]:
    """Joint norm of two optimizers, one of them with a replicated parameter."""
    rank = dist.get_rank()
    own = torch.nn.Parameter(torch.zeros(2 + rank))
    same = torch.nn.Parameter(torch.zeros(5))
    ampfast.mark_replicated([same])
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in (own, same)]
    scaler = GradScaler("cpu", init_scale=4.0, process_group=dist.group.WORLD)
    scaler.scale(torch.ones(()))
    own.grad = 4.0 * torch.arange(1.0, 3.0 + rank) * (-1) ** rank
    same.grad = torch.full((5,), 12.0)
    seen = [scaler.grad_norm(optimizer, order).item() for optimizer in (*optimizers, optimizers)]
    seen.append(scaler.clip_grad_norm_(optimizers, 1.0, order).item())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [own.grad, same.grad])
    clipped = [grad for grad, _ in gathered] + [same.grad]
    clipped_norm = torch.linalg.vector_norm(torch.cat(clipped).double(), order).item()
    return [*seen, clipped_norm]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_norms(world: int, order: float) -> None:
    owned = torch.cat([torch.arange(1.0, 3.0 + rank) for rank in range(world)])
    same = torch.full((5,), 3.0)
    exact = [
        torch.linalg.vector_norm(values.double(), order).item()
        for values in (owned, same, torch.cat([owned, same]))
    ]
    for seen in ranks.run(norms, order, ranks=world):
        assert seen == pytest.approx([*exact, exact[2], 1.0], rel=1e-6)


# By the name of an argument, calls that take a group.
TAKING: dict[str, Callable[[Any], object]] = {
    "process_group": lambda group: GradScaler("cpu", process_group=group),
    "group": lambda group: ampfast.mark_replicated([torch.ones(2)], group=group),
}


def misused(what: str, name: str) -> str:
    if what == "outside":
        group: Any = dist.new_group([1])
        if dist.get_rank() == 1:
            return ""
    elif what == "mesh outside":
        from torch.distributed.device_mesh import DeviceMesh

        group = DeviceMesh("cpu", [1])
        if dist.get_rank() == 1:
            return ""
    elif what == "device":
        group = init_device_mesh("meta", (2,))
    else:
        group = [0, 1]
    try:
        TAKING[name](group)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("outside", "ValueError: {} does not contain this rank"),
        ("mesh outside", "ValueError: {} does not contain this rank"),
        ("device", "ValueError: {} is a mesh of 'meta', not of 'cpu'"),
        ("list", "TypeError: {} must be a torch.distributed.ProcessGroup"),
    ],
)
@pytest.mark.parametrize("name", TAKING)
def test_invalid_groups(what: str, says: str, name: str) -> None:
    for said in ranks.run(misused, what, name):
        assert said.startswith(says.format(name)) or (said == "" and "outside" in what)
