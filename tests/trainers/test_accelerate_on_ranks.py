"""Accelerate on two ranks: overflows on one of them, and its checkpoints of FSDP2."""

from __future__ import annotations

import itertools
import os
import re
from copy import deepcopy
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from runs import EXAMPLES, PLANTED, STEPS, Net, batches, optimizer_for, planted
from support.comparison import Scaler, TorchScaler, assert_same, difference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader, TensorDataset

import ampfast
from tests.distributed import ranks

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

PAGE = (EXAMPLES.parents[1] / "docs" / "contributing/trainers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?:^ {4}.*\n)+", PAGE, re.MULTILINE)
(RECIPE,) = (dedent(block) for block in BLOCKS if "scaler.pt" in block)


class Setting(NamedTuple):
    averages: bool  # of gradients over ranks; else each rank has its own
    splits: bool
    accumulation: int


def new_accelerator(**settings: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    os.environ["OMP_NUM_THREADS"] = "1"
    for prefix in ("", "LOCAL_"):
        os.environ[f"{prefix}RANK"] = str(dist.get_rank())
        os.environ[f"{prefix}WORLD_SIZE"] = str(dist.get_world_size())
    return accelerate.Accelerator(cpu=True, **settings)


def train(
    scaler_type: Scaler, name: str, setting: Setting, bad: bool, *, late: bool = False
) -> tuple[Any, ...]:
    """Kept steps, what Accelerate takes for skipped ones, the schedule's epochs and final states.

    Gradients of rank 1 overflow in the micro-batches of `PLANTED`, if `bad`. The schedule is a
    `LateScheduler`, if `late`.
    """
    accelerator = new_accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=setting.accumulation,
        dataloader_config=accelerate.DataLoaderConfiguration(split_batches=setting.splits),
    )
    accelerator.native_amp = True
    accelerator.scaler = scaler_type("cpu", init_scale=64.0)
    world = accelerator.num_processes
    torch.manual_seed(0)
    model = Net()
    optimizer = optimizer_for(model, name)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    if late:
        scheduler = ampfast.LateScheduler(scheduler, accelerator.scaler, optimizer)
    rows = TensorDataset(*(torch.cat(each * world) for each in zip(*batches(), strict=True)))
    loader = DataLoader(rows, len(rows) // STEPS // (1 if setting.splits else world))
    model = accelerator.prepare_model(model, evaluation_mode=not setting.averages)
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)

    kept, skipped, epochs = [], [], []
    for step, (data, target) in enumerate(loader):
        before = deepcopy(list(model.parameters()))
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(data), target)
            accelerator.backward(planted(loss, model, step) if bad and dist.get_rank() else loss)
            optimizer.step()
            if accelerator.sync_gradients:
                kept.append(difference(before, list(model.parameters())) is None)
                skipped.append(optimizer.step_was_skipped)
            if accelerator.sync_gradients or not late:
                scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            epochs.append(scheduler.scheduler.last_epoch)
    state = list(model.parameters()), optimizer.state_dict()
    return kept, skipped, epochs, scheduler.state_dict(), accelerator.scaler.state_dict(), state


def compared(setting: Setting) -> list[tuple[Any, ...]]:
    """Runs of a plain optimizer, a fused one, and that with `LateScheduler`, with overflows."""
    theirs = TorchScaler if setting.averages else ShardedGradScaler
    ours = ampfast.GradScaler if setting.averages else ampfast.ShardedGradScaler
    for name, bad in itertools.product(("adam", "fused_adam"), (True, False)):
        # Ranks of torch's sharded scaler disagree in the step of a fused optimizer.
        if setting.averages or name == "adam" or not bad:
            assert_same(train(ours, name, setting, bad), train(theirs, name, setting, bad))
    kinds = (("adam", False), ("fused_adam", False), ("fused_adam", True))
    return [train(ours, name, setting, bad=True, late=late) for name, late in kinds]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("splits", [False, True], ids=["", "split"])
@pytest.mark.parametrize("averages", [True, False], ids=["averaged", "own"])
def test_overflows_on_one_rank(averages: bool, splits: bool, accumulation: int) -> None:
    first, second = ranks.run(compared, Setting(averages, splits, accumulation))
    same = None if averages else -1  # own gradients make models of each rank's own
    for run, other in zip(first, second, strict=True):
        assert_same(run[:same], other[:same])
    ends = [*range(accumulation - 1, STEPS - 1, accumulation), STEPS - 1]
    hit = {next(end for end in ends if end >= step) for step in PLANTED}
    skips = [end in hit for end in ends]
    by_advances = 1 if splits else 2
    plain, fused, late = first
    assert plain[0] == fused[0] == late[0] == plain[1] == skips
    assert fused[1] == late[1] == [False] * len(skips)
    for run, advances in (
        (plain, [by_advances * (not skip) for skip in skips]),
        (fused, [by_advances] * len(skips)),
        (late, [0, *(int(not skip) for skip in skips[:-1])]),
    ):
        assert run[2] == list(itertools.accumulate(advances))


def loaded(scaler_type: Scaler, kind: str, folder: str, code: str, is_new: bool) -> Any:
    """What loading raised, or scale and growth tracker before saving and after loading."""
    accelerator = new_accelerator()
    # The path of FSDP2, which it refuses on a CPU.
    fsdp = accelerate.DistributedType.FSDP
    accelerate.state.PartialState._shared_state["distributed_type"] = fsdp
    accelerate.state.AcceleratorState()  # copies it
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=kind, cpu_offload=False
    )
    assert accelerator.is_fsdp2

    def build() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        accelerator.scaler = scaler_type("cpu", init_scale=1024.0, growth_interval=2)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wrapper = accelerate.optimizer.AcceleratedOptimizer
        optimizer = wrapper(adam, device_placement=False, scaler=accelerator.scaler)
        accelerator._models[:], accelerator._optimizers[:] = [model], [optimizer]

    def weights() -> list[torch.Tensor]:
        return [p.full_tensor().detach().clone() for p in accelerator._models[0].parameters()]

    def train_once() -> list[torch.Tensor]:
        (model,), (optimizer,) = accelerator._models, accelerator._optimizers
        optimizer.zero_grad()
        accelerator.scaler.scale(model(torch.ones(4, 8)).square().mean()).backward()
        optimizer.step()
        return weights()

    build()
    kept = train_once()
    accelerator.save_state(folder)
    saved = accelerator.scaler.state_dict()
    assert difference(train_once(), kept) is not None
    if is_new:
        build()
    dist.barrier()
    try:
        exec(code, {"accelerator": accelerator, "folder": folder, "torch": torch})
    except AssertionError as error:
        return f"AssertionError: {error}"
    assert accelerator.scaler is accelerator._optimizers[0].scaler
    assert_same(weights(), kept)
    now = accelerator.scaler.state_dict()
    return tuple((state["scale"], state["_growth_tracker"]) for state in (saved, now))


@pytest.mark.parametrize("scaler_type", [TorchScaler, ampfast.GradScaler], ids=["torch", "ours"])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "trained"])
def test_the_scaler_is_loaded_last(
    is_new: bool, kind: str, scaler_type: Scaler, tmp_path: Path
) -> None:
    said = "AssertionError: _growth_tracker initialized before _scale"
    broken: Any = ((1024.0, 1), (2048.0, 0)) if is_new else said
    plain, saved = "accelerator.load_state(folder)", ((1024.0, 1), (1024.0, 1))
    for code, expected in ((plain, broken), (RECIPE, saved)):
        folder = str(tmp_path / str(len(code)))
        assert ranks.run(loaded, scaler_type, kind, folder, code, is_new) == [expected] * 2
