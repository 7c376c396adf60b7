"""Accelerate: the scaler is an attribute of the Accelerator, read by `prepare`.

It uses none on the CPU; these tests set its `native_amp` to take the path of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    CASES,
    SETTINGS,
    STEPS,
    Case,
    Net,
    Part,
    assert_same_run,
    batches,
    late_by_hand,
    optimizer_for,
)
from support.comparison import TorchScaler
from torch import nn

import ampfast

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils", reason="needs accelerate")
modeling = pytest.importorskip("accelerate.utils.modeling", reason="needs accelerate")


@pytest.fixture(autouse=True)
def _its_state_is_forgotten() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def accelerator_with(scaler: TorchScaler | None, **settings: Any) -> Any:
    precision = "fp16" if scaler else "bf16"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, **settings)
    if scaler:
        accelerator.native_amp = True
        accelerator.scaler = scaler
    return accelerator


def train(part: Part) -> None:
    accelerator = accelerator_with(part.make_scaler() if part.case.scaled else None)
    model, optimizer = accelerator.prepare(part.model, part.make_optimizer())
    if part.resumes:
        accelerator.load_state(str(part.folder))
    for data, target in part.batches:
        optimizer.zero_grad()
        accelerator.backward(part.loss(model(data), target))
        if part.case.clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), part.case.clip)
        optimizer.step()
        part.more.append(accelerator.optimizer_step_was_skipped)
    accelerator.save_state(str(part.folder))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs(case: Case, tmp_path: Path) -> None:
    assert_same_run(train, case, tmp_path)


@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clip"])
@pytest.mark.parametrize("name", ["adam", "fused_adamw"])
def test_a_late_schedule(
    name: str, clip: float | None, tmp_path: Path, step_reads: list[int]
) -> None:
    """A run whose second half new objects resume, with `LateScheduler`."""
    found = []
    for half in range(2):
        accelerator = accelerator_with(ampfast.GradScaler("cpu", **SETTINGS))
        model = Net()
        optimizer = optimizer_for(model, name)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        scheduler = ampfast.LateScheduler(scheduler, accelerator.scaler, optimizer)
        accelerator.register_for_checkpointing(scheduler)
        model, optimizer = accelerator.prepare(model, optimizer)
        if half:
            accelerator.load_state(str(tmp_path))
        for data, target in list(batches())[half * STEPS // 2 :][: STEPS // 2]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            accelerator.backward(loss)
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            found.append((loss.item(), scheduler.get_last_lr()[0]))
            optimizer.step()
            scheduler.step()
        accelerator.save_state(str(tmp_path))
    model = Net()
    optimizer = optimizer_for(model, name)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    assert found == late_by_hand(model, optimizer, scheduler, clip)
    assert len({rate for _, rate in found}) < STEPS - 1
    if name == "fused_adamw":  # the first one may try the fused kernel
        assert step_reads[1:] == [0] * (STEPS - 1)


@pytest.mark.usefixtures("cuda_on_cpu", "patched")
def test_the_scalers_that_it_makes_are_patched() -> None:
    for made in (modeling.get_grad_scaler(), fsdp_utils.get_fsdp2_grad_scaler(device="cuda")):
        assert isinstance(made, ampfast.GradScaler)
    sharded = modeling.get_grad_scaler(accelerate.DistributedType.FSDP)
    assert isinstance(sharded, ampfast.ShardedGradScaler)


@pytest.mark.usefixtures("float16_on_cpu")
def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_accelerate.py")


def test_example_refuses_a_cpu(run_example: Callable[[str], str]) -> None:
    with pytest.raises(SystemExit, match="neither casts to float16 nor unscales"):
        run_example("with_accelerate.py")


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
