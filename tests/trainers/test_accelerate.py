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
from runs import CASES, STEPS, Case, Part, assert_same_run, batches, in_halves, optimizer_for
from support.comparison import TorchScaler
from torch import nn

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


@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clip"])
@pytest.mark.parametrize("name", ["adam", "fused_adamw"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_spikes(precision: str, name: str, clip: float | None) -> None:
    """The recipe of docs/trainers.md: a clip of Accelerate's comes before the step in bf16."""
    limit = ampfast.Sigmas(6, window=8)
    if precision == "fp16":
        scaler: Any = ampfast.GradScaler("cpu", init_scale=4.0, skip_above=limit)
        accelerator = accelerator_with(scaler)
    else:
        accelerator = accelerator_with(None)
        accelerator.scaler = scaler = ampfast.StepGuard("cpu", skip_above=limit)
        accelerator.clip_grad_norm_ = lambda params, limit, order=2.0: scaler.clip_grad_norm_(
            optimizer.optimizer, limit, order
        )
    plain = nn.Linear(8, 3)
    model, optimizer = accelerator.prepare(plain, optimizer_for(plain, name))
    reasons = []
    for step, (data, target) in enumerate(batches()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        accelerator.backward(loss * (500 if step == 12 else 1))
        before = plain.weight.detach().clone()
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        reasons.append(scaler.skip_reason(optimizer.optimizer))
        assert torch.equal(before, plain.weight) is (reasons[-1] is not None)
    assert reasons == [None] * 12 + ["spike"] + [None] * (STEPS - 13)
