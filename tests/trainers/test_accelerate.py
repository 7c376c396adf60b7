"""Accelerate: the scaler is an attribute of the Accelerator, read by `prepare`.

It uses none on the CPU; these tests set its `native_amp` to take the path of a GPU.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CASES, STEPS, Case, Part, assert_same_run, in_halves
from support.comparison import TorchScaler

import ampfast

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils", reason="needs accelerate")
modeling = pytest.importorskip("accelerate.utils.modeling", reason="needs accelerate")


def accelerator_with(scaler: TorchScaler | None, **settings: Any) -> Any:
    precision = "fp16" if scaler else "bf16"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, **settings)
    if scaler:
        accelerator.native_amp = True
        accelerator.scaler = scaler
    return accelerator


def train(part: Part, late: bool = False) -> None:
    """Trains, with a `LateScheduler` if `late`."""
    accelerator = accelerator_with(part.make_scaler() if part.case.scaled else None)
    plain = part.make_optimizer()
    if late:
        schedule = torch.optim.lr_scheduler.ExponentialLR(plain, gamma=0.99)
        schedule = ampfast.LateScheduler(schedule, part.scaler, plain)
        accelerator.register_for_checkpointing(schedule)
    model, optimizer = accelerator.prepare(part.model, plain)
    if part.resumes:
        accelerator.load_state(str(part.folder))
    for data, target in part.batches:
        rate = plain.param_groups[0]["lr"]
        optimizer.zero_grad()
        accelerator.backward(part.loss(model(data), target))
        if part.case.clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), part.case.clip)
        optimizer.step()
        part.more.append((rate, accelerator.optimizer_step_was_skipped))
        if late:
            schedule.step()
    accelerator.save_state(str(part.folder))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs(case: Case, tmp_path: Path) -> None:
    assert_same_run(train, case, tmp_path)


@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clip"])
@pytest.mark.parametrize("name", ["adam", "fused_adamw"])
def test_a_late_schedule(
    name: str, clip: float | None, tmp_path: Path, step_reads: list[int]
) -> None:
    """It is the exact one of an iteration earlier, also where its second half is resumed."""
    run = in_halves(partial(train, late=True), Case(torch.float32, name, clip), tmp_path)
    expected = [0.02] * 2
    for scale, following in pairwise(run.scales[:-1]):
        expected.append(expected[-1] * (0.99 if following >= scale else 1.0))
    assert [rate for rate, _ in run.state["more"]] == expected
    assert len(set(expected)) < STEPS - 1
    if name == "fused_adamw":  # the first one may try the fused kernel
        assert step_reads[1:] == [0] * (STEPS - 1)


@pytest.mark.usefixtures("cuda_on_cpu", "patched")
def test_the_scalers_that_it_makes_are_patched() -> None:
    for made in (modeling.get_grad_scaler(), fsdp_utils.get_fsdp2_grad_scaler(device="cuda")):
        assert isinstance(made, ampfast.GradScaler)
    sharded = modeling.get_grad_scaler(accelerate.DistributedType.FSDP)
    assert isinstance(sharded, ampfast.ShardedGradScaler)
