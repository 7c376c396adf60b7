"""Accelerate on two ranks: an overflow on one of them holds step and schedule on both."""

from __future__ import annotations

import itertools
import os
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.comparison import assert_same, difference
from support.scalers import Scaler, TorchScaler
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader, TensorDataset
from trajectories import PLANTED, STEPS, HalfNet, batches, optimizer_for, planted

import ampfast
from tests.distributed import ranks

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")


class Setting(NamedTuple):
    """Gradients averaged over ranks or each rank's own, and Accelerate's settings."""

    averages: bool
    splits: bool
    accumulation: int


def accelerator_with(scaler: TorchScaler, setting: Setting) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    os.environ |= {
        **{f"{prefix}RANK": str(dist.get_rank()) for prefix in ("", "LOCAL_")},
        **{f"{prefix}WORLD_SIZE": str(dist.get_world_size()) for prefix in ("", "LOCAL_")},
        "OMP_NUM_THREADS": "1",
    }
    accelerator = accelerate.Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=setting.accumulation,
        dataloader_config=accelerate.DataLoaderConfiguration(split_batches=setting.splits),
    )
    accelerator.native_amp = True
    accelerator.scaler = scaler
    return accelerator


def train(
    scaler_type: Scaler, name: str, setting: Setting, bad: bool, *, late: bool = False
) -> tuple[Any, ...]:
    """Kept steps, what Accelerate takes for skipped ones, the schedule's epochs and final states.

    Gradients of rank 1 overflow in the micro-batches of `PLANTED`, if `bad`. The schedule is a
    `LateScheduler`, if `late`.
    """
    accelerator = accelerator_with(scaler_type("cpu", init_scale=64.0), setting)
    world = accelerator.num_processes
    torch.manual_seed(0)
    model = HalfNet()
    optimizer = optimizer_for(model, name)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    if late:
        scheduler = ampfast.LateScheduler(scheduler, accelerator.scaler, optimizer)
    rows = TensorDataset(*(torch.cat(each * world) for each in zip(*batches(), strict=True)))
    loader = DataLoader(rows, len(rows) // STEPS // (1 if setting.splits else world))
    model = accelerator.prepare_model(model, evaluation_mode=not setting.averages)
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)

    def state() -> Any:
        return list(model.parameters()), optimizer.state_dict()

    kept, skipped, epochs = [], [], []
    for step, (data, target) in enumerate(loader):
        before = deepcopy(state())
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(data), target)
            accelerator.backward(planted(loss, model, step) if bad and dist.get_rank() else loss)
            optimizer.step()
            after = state()
            if not before[1]["state"]:  # which a fused step makes, also where it is skipped
                before, after = before[0], after[0]
            if accelerator.sync_gradients:
                kept.append(difference(before, after) is None)
                skipped.append(optimizer.step_was_skipped)
            if accelerator.sync_gradients or not late:
                scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            epochs.append(scheduler.scheduler.last_epoch)
    return kept, skipped, epochs, scheduler.state_dict(), accelerator.scaler.state_dict(), state()


def on_rank(setting: Setting) -> list[tuple[Any, ...]]:
    """Runs with overflows, after comparisons with torch's scaler.

    Of a plain optimizer, of a fused one, and of that with `LateScheduler`.
    """
    theirs, ours = TorchScaler, ampfast.GradScaler
    if not setting.averages:
        theirs, ours = ShardedGradScaler, ampfast.ShardedGradScaler
    for name, bad in itertools.product(("adam", "fused_adam"), (True, False)):
        # Ranks of torch's sharded scaler disagree in the step of a fused optimizer.
        if setting.averages or name == "adam" or not bad:
            assert_same(train(ours, name, setting, bad), train(theirs, name, setting, bad))
    return [
        train(ours, "adam", setting, bad=True),
        train(ours, "fused_adam", setting, bad=True),
        train(ours, "fused_adam", setting, bad=True, late=True),
    ]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("splits", [False, True], ids=["", "split"])
@pytest.mark.parametrize("averages", [True, False], ids=["averaged", "own"])
def test_overflows_on_one_rank(averages: bool, splits: bool, accumulation: int) -> None:
    first, second = ranks.run(on_rank, Setting(averages, splits, accumulation))
    # Each rank's own gradients make models of its own.
    same = -1 if not averages else None
    for run, other in zip(first, second, strict=True):
        assert_same(run[:same], other[:same])
    ends = [*range(accumulation - 1, STEPS - 1, accumulation), STEPS - 1]
    hit = {next(end for end in ends if end >= step) for step in PLANTED}
    skips = [end in hit for end in ends]
    by_advances = 1 if splits else 2

    def epochs(advances: list[int]) -> list[int]:
        return list(itertools.accumulate(advances))

    plain, fused, late = first
    assert plain[0] == fused[0] == late[0] == plain[1] == skips
    assert fused[1] == late[1] == [False] * len(skips)
    assert plain[2] == epochs([by_advances * (not skip) for skip in skips])
    assert fused[2] == epochs([by_advances] * len(skips))
    assert late[2] == epochs([0, *(int(not skip) for skip in skips[:-1])])
