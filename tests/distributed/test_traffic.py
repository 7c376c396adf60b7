"""What is sent to other ranks in a step: nothing without need, else four bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import OPTIMIZERS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from traffic import sent

from ampfast import GradScaler

FLAG = ("gloo:all_reduce", 4)
WAYS = ("step", "unscale", "together", "clip", "defer", "clip inf", "both norms")
Sent = list[tuple[str, int]]


def iterate(scaler: Any, optimizer: Any, way: str) -> None:
    if way == "unscale":
        scaler.unscale_(optimizer)
    elif way == "both norms":
        scaler.grad_norm(optimizer)
    elif way != "step" and way != "together":
        order = math.inf if way == "clip inf" else 2.0
        scaler.clip_grad_norm_(optimizer, 1.0, order, in_place=way != "defer")
    if way == "together":
        scaler.step_and_update(optimizer)
    else:
        scaler.step(optimizer)
        scaler.update()


def gradients(layout: str) -> list[torch.Tensor]:
    plain = [torch.ones(3), torch.ones(2)]
    if layout == "plain":
        return plain
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    replicated, sharded = Replicate(), Shard(0)
    made = {
        "replicated": [(line, [replicated]), (square, [replicated, replicated])],
        "sharded": [(line, [sharded]), (line, [replicated])],
        "one dimension": [(square, [replicated, sharded]), (square, [replicated, replicated])],
        "both dimensions": [(square, [replicated, sharded]), (square, [sharded, replicated])],
        "line and square": [(square, [replicated, sharded]), (line, [sharded])],
    }[layout]
    return [DTensor.from_local(torch.ones(3), mesh, placed) for mesh, placed in made]


def traffic(group: str, layout: str, kind: str, bad: bool) -> dict[str, Sent]:
    """What a warm iteration sends, by the way that it goes."""
    grads = gradients(layout)
    process_group: Any = {
        "none": None,
        "world": dist.group.WORLD,
        "mesh": init_device_mesh("cpu", (2, 2)),
    }[group]
    seen = {}
    for way in WAYS:
        if way == "defer" and "fused" not in kind:
            continue
        params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        optimizer = OPTIMIZERS[kind](params)
        scaler = GradScaler("cpu", process_group=process_group)
        scaler.scale(torch.ones(()))
        for _ in range(2):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            if bad and dist.get_rank() == 0:
                local = params[0].grad
                (local.to_local() if isinstance(local, DTensor) else local)[0] = math.inf
            seen[way] = sent(lambda s=scaler, o=optimizer, w=way: iterate(s, o, w))
    return seen


def expected(kind: str) -> dict[str, Sent]:
    """One reduction that carries the flag; with a norm it carries both."""
    both = ("gloo:all_reduce", 16)
    said = {"step": [FLAG], "unscale": [FLAG], "together": [FLAG], "both norms": [both, FLAG]}
    return {**said, "clip": [both], "clip inf": [both], **({"defer": [both]} if kind else {})}


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "infinite"])
@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
@pytest.mark.parametrize(("group", "layout"), [("none", "plain"), ("none", "replicated")])
def test_nothing_is_sent_without_need(group: str, layout: str, kind: str, bad: bool) -> None:
    for seen in ranks.run(traffic, group, layout, kind, bad, ranks=4):
        assert not any(seen.values()), seen


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "infinite"])
@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
@pytest.mark.parametrize(
    ("group", "layout"),
    [
        ("world", "plain"),
        ("mesh", "plain"),
        ("none", "sharded"),
        ("none", "one dimension"),
        ("none", "both dimensions"),
        ("none", "line and square"),
        ("world", "sharded"),
    ],
)
def test_four_bytes_are_sent(group: str, layout: str, kind: str, bad: bool) -> None:
    for seen in ranks.run(traffic, group, layout, kind, bad, ranks=4):
        assert seen == expected("fused" if "fused" in kind else "")


def of_two_optimizers() -> Sent:
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=1.0) for param in params]
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.ones(3)

    def iterate() -> None:
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scaler.get_scale()
        assert not any(scaler.step_skipped(optimizer) for optimizer in optimizers)

    return sent(iterate)


def test_each_optimizer_sends_its_own() -> None:
    assert ranks.run(of_two_optimizers) == [[FLAG, FLAG]] * 2


def counts_itself() -> Sent:
    def call() -> None:
        dist.all_reduce(torch.ones(()))
        dist.all_reduce(torch.ones(2, dtype=torch.float64), async_op=True).wait()
        dist.broadcast(torch.ones(3), 0)

    return sent(call)


def test_the_count_sees_what_is_sent() -> None:
    both = [FLAG, ("gloo:all_reduce", 16), ("gloo:broadcast", 12)]
    assert ranks.run(counts_itself) == [both] * 2
