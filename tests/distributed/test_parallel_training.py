"""Training under each kind of parallelism: bit for bit as in one process with all batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import (
    OPTIMIZERS,
    OVERFLOWS,
    PAIRS,
    ROWS,
    SCALERS,
    SETTINGS,
    WAYS,
    Heads,
    Trace,
    batches_of,
    plant,
    train,
)
from support.comparison import assert_same
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ampfast


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        kind: Name in `OPTIMIZERS`.
        way: Name in `WAYS`.
        options: Arguments of the wrapper, or of the functions below.
        rows: Sizes of the heads.
    """

    kind: str
    way: str = "step"
    options: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = ROWS


Setup = dict[str, Any]
# Heads by rank, whose optimizer has these alone; all ranks have the last one if it is shared.
STAGES = {2: ((0, 2), (1, 3)), 4: ((0,), (1,), (2,), (3,))}
SHARED = {2: ((0, 3), (1, 2, 3)), 4: ((0, 3), (1, 3), (2, 3), (3,))}
# The last head stays a plain tensor among DTensors.
PLAN = {
    "heads.0": ColwiseParallel(output_layouts=Replicate()),
    "heads.1": RowwiseParallel(input_layouts=Replicate()),
    "heads.2": RowwiseParallel(input_layouts=Replicate()),
}


def synced_at_last(model: Any, last: bool) -> AbstractContextManager[Any]:
    """Communicates in the last backward pass alone."""
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        return nullcontext() if last else model.no_sync()
    return nullcontext(model.set_requires_gradient_sync(last))


def plant_by_step(params: Sequence[Any], step: int) -> None:
    if dist.get_rank() in OVERFLOWS.get(step, ()):
        plant(params, step)


def forget(model: Heads, head: int, step: int) -> None:
    """Drops the gradients of a head in one of three steps."""
    for param in model.heads[head].parameters() if step % 3 == 1 else ():
        param.grad = None


def under_ddp(case: Case) -> Setup:
    model = DistributedDataParallel(Heads())
    return {"model": model, "every_part": functools.partial(synced_at_last, model)}


def under_zero(case: Case) -> Setup:
    setup = under_ddp(case)
    optimizer = ZeroRedundancyOptimizer(
        setup["model"].parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )
    return {**setup, "optimizer": optimizer}


def under_fsdp1(case: Case) -> Setup:
    model: Any = FullyShardedDataParallel(
        Heads(), device_id=torch.device("cpu"), use_orig_params=case.options["orig"]
    )
    options = StateDictOptions(full_state_dict=True)
    return {
        "model": model,
        "make": ampfast.ShardedGradScaler,
        "batches": batches_of([dist.get_rank()], {}),
        "prepare": functools.partial(plant_by_step, list(model.parameters())),
        "params": lambda: get_model_state_dict(model, options=options).values(),
        "every_part": functools.partial(synced_at_last, model),
    }


def under_fsdp2(case: Case) -> Setup:
    """Overflows from the inputs, on most ranks, or in a single shard."""
    shape: Any = (dist.get_world_size(),)
    names: Any = ("shard",)
    if case.options.get("replicas"):
        shape, names = (2, shape[0] // 2), ("replicate", "shard")
    model: Any = Heads(case.rows)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for module in (*model.heads, model):
        fully_shard(module, mesh=mesh)
    in_place = not case.options.get("replicas")
    return {
        "model": model,
        "batches": batches_of([dist.get_rank()], {} if in_place else OVERFLOWS),
        "prepare": functools.partial(plant_by_step, list(model.parameters())) if in_place else None,
        "every_part": functools.partial(synced_at_last, model),
    }


def tensor_parallel(case: Case) -> Setup:
    """Alone, or under `fully_shard`: then the ranks of a line share a batch."""
    if not case.options.get("square"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model: Any = parallelize_module(Heads(), mesh, PLAN)
        return {"model": model, "batches": batches_of(range(2)), "divisor": 2}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Heads(), mesh["tp"], PLAN)
    for head in model.heads[:3]:
        fully_shard(head, mesh=mesh["dp"])
    if not case.options.get("leave out"):
        fully_shard(model, mesh=mesh["dp"])
        return {"model": model, "batches": batches_of([mesh.get_local_rank("dp")])}
    # No rank averages a plain tensor: both lines get the same batch.
    return {"model": model, "batches": batches_of(range(2)), "divisor": 2}


def owned(case: Case, world: int, rank: int) -> list[int]:
    """Indices of a stage's parameters among all."""
    heads = (SHARED if case.options.get("shared") else STAGES)[world][rank]
    return [2 * head + i for head in heads for i in range(2)]


def staged(case: Case) -> Setup:
    """Ranks own different parameters; each overflows alone."""
    model, world = Heads(), dist.get_world_size()
    params = [list(model.parameters())[i] for i in owned(case, world, dist.get_rank())]
    if case.options.get("shared"):
        ampfast.mark_replicated(model.heads[3].parameters())
    group: Any = dist.group.WORLD
    if "mesh" in case.options:
        group = init_device_mesh("cpu", case.options["mesh"])

    def prepare(step: int) -> None:
        plant_by_step(params, step)
        if "missing" in case.options:
            forget(model, case.options["missing"], step)

    return {
        "model": model,
        "optimizer": OPTIMIZERS[case.kind](params),
        "make": functools.partial(ampfast.GradScaler, process_group=group),
        "batches": batches_of(range(2), {}),
        "divisor": 2,
        "params": lambda: params,
        "prepare": prepare,
    }


SETUPS: dict[str, Callable[[Case], Setup]] = {
    "ddp": under_ddp,
    "zero": under_zero,
    "fsdp1": under_fsdp1,
    "fsdp2": under_fsdp2,
    "tensor": tensor_parallel,
    "stages": staged,
}


def trained(setup: str, cases: list[Case]) -> list[Trace]:
    """Traces of this rank, in one job, since a rank needs a second for its first DTensors."""
    traces = []
    for case in cases:
        more = {"batches": batches_of([dist.get_rank()]), **SETUPS[setup](case)}
        model = more.pop("model")
        optimizer = more.pop("optimizer", None) or OPTIMIZERS[case.kind](model.parameters())
        scaler = more.pop("make", ampfast.GradScaler)(**SETTINGS)
        batches = more.pop("batches")
        traces.append(train(model, optimizer, scaler, batches, case.way, **more))
    return traces


@functools.cache
def alone(
    kind: str, way: str, rows: tuple[int, ...], missing: int | None, feeds: Sequence[int]
) -> Trace:
    """Trace of one process with the batches of all these ranks."""
    # torch's fused SGD reads uninitialised memory after a first step that overflows, and its norms
    # are rounded differently.
    ours = kind == "fused_sgd" or way in ("clip", "defer")
    model = Heads(rows)
    trace = train(
        model,
        OPTIMIZERS[kind](model.parameters()),
        SCALERS["ours" if ours else "torch"](**SETTINGS),
        batches_of(feeds),
        way,
        divisor=len(feeds),
        prepare=None if missing is None else functools.partial(forget, model, missing),
    )
    scales = [SETTINGS["init_scale"], *(scale for scale, _, _ in trace.steps)]
    assert {(a > b) - (a < b) for a, b in itertools.pairwise(scales)} >= {-1, 1}
    assert all(p.isfinite().all() for p in trace.parameters)
    return trace


PAIRWISE = [Case(*pair) for pair in PAIRS]
RUNS: list[tuple[str, int, list[Case]]] = [
    ("ddp", 2, [*PAIRWISE, Case("adamw", "accumulate")]),
    ("zero", 2, [Case("adamw", way) for way in ("step", "accumulate", "clip", "together")]),
    # Without fused Adam, which rounds the tail elements of a shard differently.
    *(
        ("fsdp1", 2, [Case(kind, way, {"orig": orig}) for way in ways])
        for orig in (False, True)
        for kind, ways in (("adamw", WAYS[:-1]), ("fused_sgd", WAYS))
    ),
    # With original parameters some ranks hold no element of most.
    ("fsdp1", 4, [Case("adamw", "clip", {"orig": True})]),
    # torch has no fused SGD for DTensors.
    ("fsdp2", 2, [case for case in PAIRWISE if case.kind != "fused_sgd"]),
    # Some parameters have no element on two or three ranks, two ranks none of any.
    ("fsdp2", 4, [Case("fused_adamw", way) for way in ("step", "clip", "defer")]),
    ("fsdp2", 4, [Case("fused_adamw", way, rows=(2, 1)) for way in ("step", "clip")]),
    (
        "fsdp2",
        4,
        [
            Case(kind, way, {"replicas": True})
            for kind, way in (("adamw", "step"), ("fused_adamw", "clip"), ("fused_adamw", "defer"))
        ],
    ),
    # torch's fused optimizers refuse lists that mix DTensors and plain tensors.
    *(
        ("tensor", world, [Case("adamw"), Case("momentum", "unscale"), Case("adamw", "clip")])
        for world in (2, 4)
    ),
    *(
        (
            "tensor",
            4,
            [
                Case(kind, way, {"square": True, "leave out": leave_out})
                for kind, way in (("adamw", "step"), ("momentum", "clip"), ("sgd", "accumulate"))
            ],
        )
        for leave_out in (False, True)
    ),
    ("stages", 2, PAIRWISE),
    ("stages", 4, [Case("fused_adamw", way, {"mesh": (4,)}) for way in ("step", "clip", "defer")]),
    *(
        ("stages", world, [Case("fused_adamw", way, {"shared": True}) for way in ("clip", "defer")])
        for world in (2, 4)
    ),
    # Rank 1 owns head 1 only.
    (
        "stages",
        4,
        [
            Case(kind, way, {"missing": 1})
            for kind in ("momentum", "fused_adam")
            for way in ("step", "unscale", "together", "clip")
        ],
    ),
]


@pytest.mark.parametrize(
    ("setup", "world", "cases"),
    RUNS,
    ids=[f"{setup}-{world}-{cases[-1].options}" for setup, world, cases in RUNS],
)
def test_as_one_process(setup: str, world: int, cases: list[Case]) -> None:
    feeds = range(2 if setup in ("tensor", "stages") else world)
    for rank, traces in enumerate(ranks.run(trained, setup, cases, ranks=world)):
        for case, trace in zip(cases, traces, strict=True):
            missing = case.options.get("missing")
            wanted = alone(case.kind, case.way, case.rows, missing, feeds)
            if setup == "stages":
                own = [wanted.parameters[i] for i in owned(case, world, rank)]
                wanted = Trace(wanted.steps, wanted.norms, own)
            assert_same(vars(trace), vars(wanted), str(case))
