"""Norms of mixtures of experts: some parameters are held by a group of ranks, others by all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from support.gradients import parameter_like
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ampfast
from ampfast import GradScaler

WORLD = 4
DENSE = torch.arange(1.0, 9.0)
# Of the first expert and of the second.
EXPERTS = [torch.tensor([3.0, -1.0]), torch.tensor([-20.0, 2.5])]
# The groups of ranks that hold the same expert.
PAIRS = {"columns": ([0, 2], [1, 3]), "rows": ([0, 1], [2, 3]), "diagonals": ([0, 3], [1, 2])}


def dense(layout: str) -> torch.nn.Parameter:
    """Parameter with the gradient `DENSE`, held by all ranks."""
    if layout == "line":
        mesh = init_device_mesh("cpu", (WORLD,))
        return parameter_like(distribute_tensor(DENSE, mesh, [Shard(0)]))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    if layout == "square":
        return parameter_like(distribute_tensor(DENSE, mesh, [Shard(0), Shard(0)]))
    if layout == "replicas":  # along the rows
        return parameter_like(distribute_tensor(DENSE, mesh, [Shard(0), Replicate()]))
    plain = parameter_like(DENSE.clone())
    ampfast.mark_replicated([plain])
    return plain


def expert(kind: str, pairs: tuple[list[int], list[int]]) -> torch.nn.Parameter:
    """Parameter of this rank's expert, marked."""
    number = int(dist.get_rank() in pairs[1])
    grad: torch.Tensor = EXPERTS[number].clone()
    if kind == "plain":
        groups = [dist.new_group(each) for each in pairs]
        mark: Any = groups[number]
    elif kind in ("slice", "partial"):
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        mark = root["row" if pairs == PAIRS["columns"] else "column"]
        if kind == "slice":
            grad = distribute_tensor(grad, mark, [Shard(0)])
        else:
            grad = DTensor.from_local(grad / 2, mark, [Partial()])
    else:
        meshes = [DeviceMesh("cpu", each) for each in pairs]
        mark = meshes[number]
        grad = distribute_tensor(grad, mark, [Replicate() if kind == "replicated" else Shard(0)])
    param = parameter_like(grad)
    ampfast.mark_replicated([param], group=mark)
    return param


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norms(layout: str, kind: str, pairs: str, group: str, order: float) -> list[float]:
    """Norm of each optimizer and of both, and the norm after they were clipped to 1."""
    params = [dense(layout), expert(kind, PAIRS[pairs])]
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in params]
    given: Any = {"none": None, "world": dist.group.WORLD}.get(group)
    if group == "mesh":
        given = init_device_mesh("cpu", (2, 2))
    elif group == "half":  # of the ranks, with both experts
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        given = halves[dist.get_rank() // 2]
    scaler = GradScaler("cpu", init_scale=1.0, process_group=given)
    scaler.scale(torch.ones(()))
    seen = [scaler.grad_norm(torch.optim.SGD(params, lr=1.0), order).item()]
    seen += [scaler.grad_norm(each, order).item() for each in optimizers if given is not None]
    one = torch.optim.SGD(params, lr=1.0)
    seen.append(scaler.clip_grad_norm_(one, 1.0, order).item())
    scaler.step(one)
    scaler.update()
    # Every rank has the same decision, and what is left of its expert.
    left: list[Any] = [None] * WORLD
    dist.all_gather_object(left, full(params[1].grad))
    first, second = PAIRS[pairs]
    parts = [full(params[0].grad), left[first[0]], left[second[0]]]
    assert all(torch.equal(left[a], left[b]) for a, b in PAIRS[pairs])
    return [*seen, torch.linalg.vector_norm(torch.cat(parts).double(), order).item()]


def exact(order: float) -> list[float]:
    return [
        torch.linalg.vector_norm(torch.cat(parts).double(), order).item()
        for parts in ([DENSE, *EXPERTS], [DENSE], EXPERTS)
    ]


@pytest.mark.parametrize("order", [2.0, 3.0, math.inf])
@pytest.mark.parametrize(
    ("layout", "kind", "pairs", "group"),
    [
        ("line", "plain", "columns", "none"),
        ("line", "plain", "columns", "world"),
        ("line", "plain", "rows", "mesh"),
        ("line", "plain", "diagonals", "none"),
        ("square", "plain", "diagonals", "none"),
        ("square", "plain", "columns", "world"),
        ("replicas", "plain", "rows", "world"),
        ("plain", "plain", "rows", "world"),
        ("plain", "plain", "diagonals", "mesh"),
        ("plain", "plain", "columns", "half"),
        ("line", "slice", "columns", "none"),
        ("line", "slice", "rows", "world"),
        ("line", "sharded", "diagonals", "none"),
        ("line", "sharded", "columns", "mesh"),
        ("square", "slice", "columns", "world"),
        ("line", "replicated", "columns", "none"),
        ("line", "partial", "rows", "none"),
        ("plain", "sharded", "rows", "world"),
        ("plain", "replicated", "columns", "world"),
    ],
)
def test_an_expert_counts_once(
    layout: str, kind: str, pairs: str, group: str, order: float
) -> None:
    whole, of_dense, of_experts = exact(order)
    apart = [] if group == "none" else [of_dense, of_experts]
    for seen in ranks.run(norms, layout, kind, pairs, group, order, ranks=WORLD):
        assert seen == pytest.approx([whole, *apart, whole, 1.0], rel=1e-6)


def shared(marked: bool) -> float:
    """Norm of a sharded gradient, and one on a slice of its mesh, equal along the rows."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    params = [
        dense("square"),
        parameter_like(distribute_tensor(EXPERTS[0], root["row"], [Shard(0)])),
    ]
    if marked:
        ampfast.mark_replicated(params)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    return scaler.grad_norm(torch.optim.SGD(params, lr=1.0)).item()


@pytest.mark.parametrize("marked", [False, True])
def test_a_mark_without_a_group_says_nothing_of_dtensors(marked: bool) -> None:
    whole = torch.linalg.vector_norm(torch.cat([DENSE, EXPERTS[0]])).item()
    assert ranks.run(shared, marked, ranks=WORLD) == [pytest.approx(whole)] * WORLD


def recipe() -> list[float]:
    """Norms of the program on the page, on one of its ranks."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    section = page.split("## Mixtures of experts")[1].split("```python")[1].split("```")[0]
    begin, end = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None
    try:
        names: dict[str, Any] = {}
        exec(section, names)
    finally:
        dist.init_process_group, dist.destroy_process_group = begin, end
    return [norm.item() for norm in names["norms"]]


def in_one_process() -> list[float]:
    """Norms of the same training without ranks, in float32."""
    experts = []
    for number in range(2):
        torch.manual_seed(1 + number)
        experts.append(torch.nn.Linear(64, 64))
    torch.manual_seed(0)
    dense = torch.nn.Linear(64, 64)
    params = [p for module in (dense, *experts) for p in module.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    generators = [torch.Generator().manual_seed(rank) for rank in range(WORLD)]
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        for generator in generators:
            hidden = dense(torch.randn(32, 64, generator=generator))
            parts = zip(experts, hidden.chunk(2), strict=True)
            loss = torch.cat([expert(part) for expert, part in parts]).square().mean()
            (loss / WORLD).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0).item())
        optimizer.step()
    return norms


def test_the_recipe_for_mixtures_of_experts() -> None:
    expected = in_one_process()
    for seen in ranks.run(recipe, ranks=WORLD):
        assert seen == pytest.approx(expected, rel=1e-5)


def misused() -> str:
    param = parameter_like(
        distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    )
    group = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    try:
        ampfast.mark_replicated([param], group=group)
    except ValueError as error:
        return str(error)
    return "nothing raised"


def test_a_dtensor_on_another_mesh_is_refused() -> None:
    for said in ranks.run(misused):
        assert said.startswith("the group of a DTensor must have the ranks of its DeviceMesh")
