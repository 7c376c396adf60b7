"""Traffic between ranks in a step: none where none is needed, else four bytes."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import OPTIMIZERS, plant
from support.steps import take_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.profiler import ProfilerActivity, profile

from ampfast import GradScaler, Sigmas

FLAG = ("gloo:all_reduce", 4)
# Two float64: norm term and flag.
BOTH = ("gloo:all_reduce", 16)
WAYS = {
    "step": [FLAG],
    "unscale": [FLAG],
    "together": [FLAG],
    "clip": [BOTH],
    "clip inf": [BOTH],
    "defer": [BOTH],
    "norm": [BOTH, FLAG],
}
CASES = [
    (way, kind, bad)
    for way in WAYS
    for kind in ("sgd", "fused_adam")
    for bad in (False, True)
    if way != "defer" or kind == "fused_adam"
]
Sent = list[tuple[str, int]]


_BYTES = {"float": 4, "double": 8, "c10::Half": 2, "int": 4, "long int": 8, "unsigned char": 1}


def sent(call: Callable[[], object]) -> list[tuple[str, int]]:
    """Runs `call`; returns its collectives in order, with the bytes sent by a rank."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = [e for e in events if e.get("ph") == "X" and e["name"].startswith("gloo:")]
    return [_collective(event) for event in sorted(events, key=lambda event: event["ts"])]


def _collective(event: dict) -> tuple[str, int]:
    said = event["args"]
    pairs = zip(said.get("Input Dims", []), said.get("Input type", []), strict=True)
    return event["name"], sum(math.prod(shape) * _BYTES[kind] for shape, kind in pairs)


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


def traffic(group: str, layout: str) -> dict[tuple[str, str, bool], Sent]:
    """Collectives of a warm iteration, by way, optimizer and an infinity on rank 0."""
    grads = gradients(layout)
    process_group: Any = {
        "none": None,
        "world": dist.group.WORLD,
        "mesh": init_device_mesh("cpu", (2, 2)),
    }[group]
    seen = {}
    for way, kind, bad in CASES:
        params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        optimizer = OPTIMIZERS[kind](params)
        scaler = GradScaler("cpu", process_group=process_group)
        scaler.scale(torch.ones(()))
        for is_warm in (False, True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            if bad and dist.get_rank() == 0:
                plant(params)
            if is_warm:
                seen[way, kind, bad] = sent(
                    lambda s=scaler, o=optimizer, w=way: take_step(s, o, way=w)
                )
            else:
                take_step(scaler, optimizer, way=way)
    return seen


# By the scaler's group and the layout, whether a collective carries all; else nothing is sent.
SENDS = {
    **{("none", layout): False for layout in ("plain", "replicated")},
    **{(group, "plain"): True for group in ("world", "mesh")},
    **{("none", layout): True for layout in ("sharded", "one dimension", "both dimensions")},
    ("none", "line and square"): True,
    ("world", "sharded"): True,
}


@pytest.mark.parametrize(("group", "layout"), SENDS)
def test_nothing_is_sent_without_need_and_then_one_collective(group: str, layout: str) -> None:
    told = WAYS if SENDS[group, layout] else {}
    for seen in ranks.run(traffic, group, layout, ranks=4):
        assert seen == {(way, *rest): told.get(way, []) for way, *rest in CASES}


def of_feature(way: str, more: dict[str, Any]) -> Sent:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = OPTIMIZERS["fused_adam"]([param])
    scaler = GradScaler("cpu", process_group=dist.group.WORLD, **more)
    param.grad = scaler.scale(torch.ones(1))
    return sent(partial(take_step, scaler, optimizer, way=way))


def test_features_send_no_more() -> None:
    cases, expected = [], []
    for way in ("step", "unscale", "clip", "together"):
        flag = BOTH if way == "clip" else FLAG
        features = (({"track": "overflow"}, flag), ({"skip_above": 20.0}, BOTH))
        for more, sends in (*features, ({"skip_above": Sigmas(6.0)}, BOTH)):
            cases.append((way, more))
            expected.append(([sends], [sends]))
    assert ranks.run_each(of_feature, cases) == expected
