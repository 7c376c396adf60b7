"""DistributedDataParallel: equal gradients on all ranks, so no agreement and no group."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    STEPS,
    WAYS,
    Heads,
    Trace,
    alone,
    assert_eventful,
    assert_same_traces,
    batches_of,
    no_sync_but_last,
    train,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ampfast import GradScaler


@functools.cache
def expected(kind: str, way: str, world: int, steps: int) -> Trace:
    [trace] = ranks.run(alone, kind, way, range(world), steps, ranks=1)
    assert_eventful(trace)
    return trace


def under_ddp(kind: str, way: str, steps: int, options: dict[str, Any]) -> Trace:
    model = DistributedDataParallel(Heads(), **options)
    return train(
        model,
        OPTIMIZERS[kind](model.parameters()),
        GradScaler(**SETTINGS),
        batches_of([dist.get_rank()]),
        WAYS[way],
        steps=steps,
        every_part=functools.partial(no_sync_but_last, model),
    )


@pytest.mark.parametrize(("kind", "way"), PAIRS)
def test_as_one_process(kind: str, way: str) -> None:
    for trace in ranks.run(under_ddp, kind, way, STEPS, {}):
        assert_same_traces(trace, expected(kind, way, 2, STEPS))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("kind", "way"), [("adamw", "accumulate"), ("fused_adam", "defer")])
def test_two_hundred_steps(kind: str, way: str, world: int) -> None:
    for trace in ranks.run(under_ddp, kind, way, 200, {}, ranks=world):
        assert_same_traces(trace, expected(kind, way, world, 200))


@pytest.mark.parametrize("way", ["accumulate", "clip", "together"])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": False},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_options_of_ddp(options: dict[str, Any], way: str) -> None:
    if "static_graph" in options and way == "accumulate":
        pytest.skip("DistributedDataParallel with static_graph cannot start with no_sync")
    for trace in ranks.run(under_ddp, "fused_adamw", way, STEPS, options):
        assert_same_traces(trace, expected("fused_adamw", way, 2, STEPS))


def in_two_groups(steps: int) -> Trace:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2
    return under_ddp("fused_adamw", "clip", steps, {"process_group": pairs[pair]})


def test_groups_do_not_disturb_each_other() -> None:
    traces = ranks.run(in_two_groups, STEPS, ranks=4)
    for pair in ([0, 1], [2, 3]):
        [trace] = ranks.run(alone, "fused_adamw", "clip", pair, STEPS, ranks=1)
        for rank in pair:
            assert_same_traces(traces[rank], trace)
    assert traces[0].steps != traces[2].steps


def under_zero(way: str, steps: int) -> Trace:
    model = DistributedDataParallel(Heads())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )
    return train(
        model,
        optimizer,
        GradScaler(**SETTINGS),
        batches_of([dist.get_rank()]),
        WAYS[way],
        steps=steps,
        every_part=functools.partial(no_sync_but_last, model),
    )


@pytest.mark.parametrize("way", ["step", "accumulate", "clip", "together"])
def test_zero_redundancy_optimizer(way: str) -> None:
    for trace in ranks.run(under_zero, way, STEPS):
        assert_same_traces(trace, expected("adamw", way, 2, STEPS))


Hooked = Callable[[DistributedDataParallel], None]


def compress(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def power(model: DistributedDataParallel) -> None:
    # Without error feedback, which would keep an infinity for ever.
    state = powerSGD_hook.PowerSGDState(
        None, start_powerSGD_iter=4, min_compression_rate=0.5, use_error_feedback=False
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Unused(Heads):
    """Heads, one of which has no gradient in a step, depending on the rank."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        unused = (self.calls // 3 + dist.get_rank() * (self.calls % 2)) % len(self.heads)
        outputs = [
            head(inputs) if i != unused else inputs.new_zeros(len(inputs), ROWS[i])
            for i, head in enumerate(self.heads)
        ]
        return torch.cat(outputs, dim=1)


def hooked(hook: str, scaler: str, kind: str, scale: float, steps: int) -> Trace:
    hooks: dict[str, Hooked] = {"fp16": compress, "power": power}
    model = DistributedDataParallel(Heads() if hook else Unused(), find_unused_parameters=not hook)
    if hook:
        hooks[hook](model)
    return train(
        model,
        OPTIMIZERS[kind](model.parameters()),
        SCALERS[scaler](**{**SETTINGS, "init_scale": scale}),
        batches_of([dist.get_rank()], {} if hook == "fp16" else OVERFLOWS),
        steps=steps,
    )


@pytest.mark.parametrize("kind", ["momentum", "fused_adam"])
@pytest.mark.parametrize(
    ("hook", "scale"),
    # float16 on the wire makes the gradients overflow once the scale has grown.
    [("fp16", 2.0**12), ("power", 2.0**6), ("", 2.0**6)],
    ids=["fp16_compress_hook", "powerSGD_hook", "unused_parameters"],
)
def test_as_with_torchs_scaler(hook: str, scale: float, kind: str) -> None:
    theirs = ranks.run(hooked, hook, "torch", kind, scale, STEPS)[0]
    assert_eventful(theirs)
    for trace in ranks.run(hooked, hook, "ours", kind, scale, STEPS):
        assert_same_traces(trace, theirs)
