"""Lists of DTensor gradients of every placement: one decision and one norm on all ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import SCALERS, whole
from support.clipping_reference import coefficient_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ampfast import GradScaler

SCALE = 4.0
MAX_NORM = 2.0
# R: replicated, S0: sharded along rows, P: partial. 4 ranks on a line, or 2 by 2 with the lines `a`
# and `b`; "plain" is a tensor on every rank.
LISTS: dict[str, list[str]] = {
    "sharded": ["S0", "S0", "S0"],
    "columns": ["S1", "S0"],
    "replicated": ["R", "R"],
    "replicated first": ["R", "S0", "R"],
    "sharded first": ["S0", "R"],
    "summands": ["P", "R"],
    "summands and shards": ["S0", "P", "S1"],
    "with plain": ["S0", "plain", "S1"],
    "plain first": ["plain", "S0", "plain"],
    "replicas of shards": ["R,S0", "R,S1"],
    "shards of replicas": ["S0,R", "S1,R"],
    "shards both ways": ["S0,S1", "S1,S0"],
    "shards of shards": ["S0,S0", "S1,S1"],
    "mixed": ["R,S0", "S0,R", "R,R"],
    "mixed with plain": ["R,R", "R,S0", "plain", "S0,R"],
    "mixed with summands": ["P,S0", "R,S1", "P,P"],
    "line and square": ["S0", "R,S0"],
    "two lines": ["a:S0", "b:S0"],
    "two lines and plain": ["plain", "b:R", "a:S1"],
    "one line of two": ["b:S0", "b:R", "plain"],
}
SHAPES = [(5, 7), (1, 3), (9, 2), (4, 4)]
PLACEMENTS: dict[str, Placement] = {
    "R": Replicate(),
    "S0": Shard(0),
    "S1": Shard(1),
    "P": Partial(),
}


def meshes() -> dict[str, DeviceMesh]:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return {
        "line": init_device_mesh("cpu", (4,)),
        "square": square,
        "a": square["a"],
        "b": square["b"],
    }


def placed(value: torch.Tensor, how: str, on: dict[str, DeviceMesh]) -> torch.Tensor:
    """Distributes a tensor that every rank has."""
    if how == "plain":
        return value.clone()
    name, _, spec = how.rpartition(":")
    placements = [PLACEMENTS[each] for each in spec.split(",")]
    mesh = on[name or ("line" if len(placements) == 1 else "square")]
    # Summands are integers, some of them negative.
    shards = [Replicate() if p.is_partial() else p for p in placements]
    tensor = DTensor.from_local(value.clone(), mesh, [Replicate()] * mesh.ndim).redistribute(
        placements=shards
    )
    local = tensor.to_local().clone()
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            size, mine = mesh.size(dim), mesh.get_local_rank(dim)
            part = local * (size + 2 if mine == 0 else -1 - 2 / (size - 1))
            # One infinite summand is enough.
            bad = local if mine == 0 else torch.zeros_like(local)
            local = torch.where(local.isfinite(), part, bad)
    return DTensor.from_local(
        local, mesh, placements, shape=value.shape, stride=value.stride(), run_check=False
    )


def full_gradients(names: list[str]) -> list[torch.Tensor]:
    """Multiples of 12, which divide exactly into summands."""
    generator = torch.Generator().manual_seed(9)
    shapes = SHAPES[: len(names)]
    return [12.0 * torch.randint(-5, 6, shape, generator=generator).float() for shape in shapes]


class Fused(torch.optim.SGD):
    """Optimizer that counts as fused for any list."""

    _step_supports_amp_scaling = True

    def step(self) -> None:
        if self.found_inf.item() == 0.0:
            factor = 1.0 if self.grad_scale is None else 1.0 / self.grad_scale
            for param in self.param_groups[0]["params"]:
                param.data.sub_(param.grad * factor)


def iterated(
    scaler: Any, names: list[str], bad: Any, path: str, on: dict[str, DeviceMesh]
) -> dict[str, Any]:
    """Flags, scale, norms and parameters after one iteration."""
    full = full_gradients(names)
    if bad is not None:
        which, where, value = bad
        full[which].view(-1)[where] = value
    params = [
        torch.nn.Parameter(placed(torch.zeros_like(f), n.replace("P", "R"), on))
        for f, n in zip(full, names, strict=True)
    ]
    for param, value, name in zip(params, full, names, strict=True):
        param.grad = placed(value, name, on)
    optimizer = (Fused if "fused" in path else torch.optim.SGD)(params, lr=1.0)
    scaler.scale(torch.ones(()))
    norms = []
    if "clip" in path:
        norms = [
            scaler.grad_norm(optimizer),
            scaler.clip_grad_norm_(optimizer, MAX_NORM, in_place="fused" not in path),
        ]
    elif path == "unscale":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    found = [flag.item() for flag in flags]
    scaler.update()
    return {
        "flags": found,
        "scale": scaler.get_scale(),
        "norms": norms,
        "values": [whole(param) for param in params],
    }


def decided(scaler_name: str, lists: tuple[str, ...], paths: tuple[str, ...]) -> dict[str, Any]:
    """Results of this rank by list, path and place of an infinity."""
    on = meshes()
    seen: dict[str, Any] = {name: [] for name in lists}
    for name in lists:
        for path in paths:
            for bad in places(LISTS[name]):
                scaler = SCALERS[scaler_name]("cpu", init_scale=SCALE)
                try:
                    seen[name].append(iterated(scaler, LISTS[name], bad, path, on))
                except Exception as error:
                    seen[name].append(f"{type(error).__name__}: {error}")
    return seen


def expected(names: list[str], bad: Any, path: str) -> dict[str, Any]:
    full = full_gradients(names)
    squares = sum((f.double() / SCALE).square().sum() for f in full)
    norm = squares.sqrt().float()
    coefficient = coefficient_of(norm, MAX_NORM) if "clip" in path else torch.ones(())
    values = [f / SCALE * coefficient.float() for f in full]
    if bad is not None:
        norm = torch.tensor(math.nan if math.isnan(bad[2]) else math.inf)
        values = [torch.zeros_like(f) for f in full]
    return {
        "flags": [float(bad is not None)],
        "scale": SCALE / 2 if bad is not None else SCALE,
        "norms": [norm, norm] if "clip" in path else [],
        "values": [-value + 0.0 for value in values],
    }


def places(names: list[str]) -> list[Any]:
    """No infinity, and one at the first and the last element of every gradient."""
    bads: list[Any] = [None]
    for which in range(len(names)):
        count = math.prod(SHAPES[which])
        bads += [(which, 0, math.inf), (which, count - 1, math.nan)]
    return bads


def matches(seen: Any, wanted: dict[str, Any]) -> bool:
    """Whether results are equal, but for rounding of the coefficient and of sums."""
    if isinstance(seen, str) or any(seen[name] != wanted[name] for name in ("flags", "scale")):
        return False
    return all(
        torch.allclose(ours, exact, rtol=3e-7, atol=tolerance, equal_nan=True)
        for name, tolerance in (("norms", 0.0), ("values", 1e-6))
        for ours, exact in zip(seen[name], wanted[name], strict=True)
    )


def cases(name: str, paths: tuple[str, ...]) -> list[Any]:
    """Cases for `decided` and their expected results."""
    return [
        ((path, bad), expected(LISTS[name], bad, path))
        for path in paths
        for bad in places(LISTS[name])
    ]


PATHS = ("step", "unscale", "clip", "fused", "fused clip")
TORCHS_PATHS = ("step", "fused")
# Lists whose first gradient does not represent the others.
TORCHS_LISTS = {
    "replicated first": "mixed placements",
    "mixed": "mixed placements",
    "mixed with summands": "mixed placements",
    "two lines": "several meshes",
    "two lines and plain": "several meshes",
    "with plain": "plain tensors among them",
    "plain first": "plain tensors among them",
    "mixed with plain": "plain tensors among them",
}


@functools.cache
def all_lists() -> list[Any]:
    # In one job, since a rank needs a second for its first DTensors.
    return ranks.run(decided, "ours", tuple(LISTS), PATHS, ranks=4)


@functools.cache
def torchs_lists() -> list[Any]:
    return ranks.run(decided, "torch", tuple(TORCHS_LISTS), TORCHS_PATHS, ranks=4)


@pytest.mark.sweep
@pytest.mark.parametrize("name", LISTS)
def test_every_rank_decides_the_same(name: str) -> None:
    for rank, seen in enumerate(all_lists()):
        for each, (case, wanted) in zip(seen[name], cases(name, PATHS), strict=True):
            assert matches(each, wanted), (rank, case, each, wanted)


@pytest.mark.parametrize("name", TORCHS_LISTS)
def test_what_torch_makes_of_it(name: str, torch_fails: Any) -> None:
    right = all(
        matches(each, wanted)
        for seen in torchs_lists()
        for each, (_, wanted) in zip(seen[name], cases(name, TORCHS_PATHS), strict=True)
    )
    torch_fails(f"DTensor gradients, {TORCHS_LISTS[name]}", not right)


def overflowing_sum(scale: float) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    param = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    summand = torch.tensor([3e38, 1.0])
    param.grad = DTensor.from_local(summand, mesh, [Partial()])
    optimizer = torch.optim.SGD([param], lr=2.0**-10)
    scaler = GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    return scaler.step_skipped(optimizer), whole(param).isfinite().all().item()


@pytest.mark.parametrize(("scale", "skipped"), [(1.0, True), (2.0, True), (8.0, False)])
def test_finite_summands_whose_sum_is_not(scale: float, skipped: bool) -> None:
    assert ranks.run(overflowing_sum, scale, ranks=4) == [(skipped, True)] * 4


def decided_over(lines: list[str], orders: list[list[int]], bad: int) -> tuple[bool, float]:
    """Whether this rank skips, for each of its lines in its own order."""
    rank = dist.get_rank()
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    params = []
    on = [
        square[line] if line in "ab" else DeviceMesh("cpu", [int(r) for r in line])
        for line in lines
    ]
    for mesh in (on[i] for i in orders[rank]):
        params.append(torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)])))
        grad = torch.full((2,), math.inf if rank == bad else 1.0)
        params[-1].grad = DTensor.from_local(grad, mesh, [Shard(0)])
    optimizer = torch.optim.SGD(params, lr=1.0, foreach=False)
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return scaler.step_skipped(optimizer), scaler.get_scale()


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize(
    ("lines", "orders"),
    [
        (["a", "b"], [[0, 1], [1, 0], [1, 0], [0, 1]]),
        (["01", "12", "023"], [[2, 0], [0, 1], [1, 2], [2]]),
    ],
    ids=["of a square", "of a ring"],
)
def test_the_order_of_parameters_may_differ(
    lines: list[str], orders: list[list[int]], bad: int
) -> None:
    assert ranks.run(decided_over, lines, orders, bad, ranks=4) == [(True, SCALE / 2)] * 4
