"""A rank that dies or hangs during a step: the others raise with parameters unchanged; so told."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from exact_training import OPTIMIZERS, SETTINGS, Heads, batches_of, local
from support.comparison import assert_same
from support.steps import take_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ampfast import GradScaler

HEALTHY_STEPS = 2
# Timeout of the last step: ranks that wait for other waiting ranks see no connection end.
PATIENCE = timedelta(seconds=2)


def trained(setting: str, kind: str, way: str, end: str) -> str | None:
    """Trains until rank 1 is gone; returns the error, and asserts that it changed nothing."""
    rank = dist.get_rank()
    model: Any = Heads()
    group: Any = None
    if setting == "ddp":
        model = DistributedDataParallel(model)
    elif setting == "fully_shard":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        group = dist.group.WORLD
    params = list(model.parameters())
    optimizer = OPTIMIZERS[kind](params)
    scaler = GradScaler(**SETTINGS, process_group=group)
    batches = batches_of([rank], {})
    for step in range(HEALTHY_STEPS + 1):
        last = step == HEALTHY_STEPS
        optimizer.zero_grad()
        loss = scaler.scale(batches(step, 0).loss(model))
        if last and rank == 1 and end == "in backward":
            loss.register_hook(lambda grad: os._exit(9))
        before = [local(p).clone() for p in params], scaler._scale.clone()
        if last:
            _set_pg_timeout(PATIENCE)
        try:
            loss.backward()
            if last and rank == 1 and end == "after backward":
                os._exit(9)
            if last and rank == 1 and end == "hangs":
                time.sleep(2 * PATIENCE.total_seconds())
                return None
            take_step(scaler, optimizer, way=way)
        except RuntimeError as error:
            assert last, error
            assert_same(([local(p) for p in params], scaler._scale), before)
            assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
            return str(error)
    return None


@pytest.mark.parametrize(
    ("setting", "kind", "way", "end", "world"),
    [
        ("ddp", "fused_adamw", "step", "in backward", 2),
        ("group", "adamw", "step", "in backward", 2),
        ("group", "adamw", "step", "after backward", 2),
        # Two of these are not neighbours of the dying rank.
        ("group", "adamw", "step", "after backward", 4),
        ("group", "fused_adamw", "step", "after backward", 2),
        ("group", "fused_sgd", "unscale", "after backward", 2),
        ("group", "adamw", "clip", "after backward", 2),
        ("group", "fused_adamw", "defer", "after backward", 2),
        ("group", "fused_adamw", "together", "after backward", 2),
        ("group", "fused_adamw", "defer", "hangs", 2),
        ("fully_shard", "adamw", "step", "in backward", 2),
        ("fully_shard", "fused_adamw", "clip", "after backward", 2),
    ],
)
def test_the_others_raise_and_change_nothing(
    setting: str, kind: str, way: str, end: str, world: int
) -> None:
    outcomes = ranks.attempt(trained, setting, kind, way, end, ranks=world)
    gone = outcomes.pop(1)
    assert gone.error == (None if end == "hangs" else "exit code 9")
    for outcome in outcomes:
        assert outcome.error is None, outcome
        assert outcome.value is not None, "nothing raised"


# The runner of these ranks


def fails() -> None:
    if dist.get_rank() == 1:
        raise LookupError("nothing here")


def test_a_rank_that_fails_tells_how() -> None:
    with pytest.raises(ranks.RanksFailedError, match="rank 1: LookupError: nothing here"):
        ranks.run(fails)
