"""Accelerate: the scaler is an attribute of the Accelerator, read by `prepare`.

It uses none on the CPU; these tests set its `native_amp` to take the path of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sixteen_bit import CASES, Case, Part, assert_as_by_hand
from support import Scaler, TorchScaler
from trajectories import SETTINGS, STEPS, HalfNet, Run, assert_same_run, batches, optimizer_for

import ampfast

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils", reason="needs accelerate")
modeling = pytest.importorskip("accelerate.utils.modeling", reason="needs accelerate")


@pytest.fixture(autouse=True)
def _its_state_is_forgotten() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def accelerator_with(scaler_type: Scaler) -> Any:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.native_amp = True
    accelerator.scaler = scaler_type("cpu", **SETTINGS)
    return accelerator


def train(scaler_type: Scaler, name: str, clip: float | None, checkpoint: Path) -> Run:
    accelerator, run, model = accelerator_with(scaler_type), Run(), HalfNet()
    optimizer = optimizer_for(model, name)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skipped = []
    for step, (data, target) in enumerate(batches()):
        if step == STEPS // 2:
            accelerator.save_state(str(checkpoint))
            accelerator.load_state(str(checkpoint))
        optimizer.zero_grad()
        accelerator.backward(run.loss(model(data), target, accelerator.scaler))
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return run.finish(
        model, skipped=skipped, rates=scheduler.get_last_lr(), optimizer=optimizer.state_dict()
    )


@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clip"])
def test_attribute(clip: float | None, tmp_path: Path) -> None:
    ours = train(ampfast.GradScaler, "adam", clip, tmp_path / "ours")
    assert_same_run(ours, train(TorchScaler, "adam", clip, tmp_path / "torch"))
    assert sum(ours.state["skipped"]) == ours.skipped


@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clip"])
def test_a_fused_optimizer(clip: float | None, tmp_path: Path) -> None:
    """Its `step` always runs, so Accelerate takes no step for skipped, with either scaler."""
    ours = train(ampfast.GradScaler, "fused_adamw", clip, tmp_path / "ours")
    assert_same_run(ours, train(TorchScaler, "fused_adamw", clip, tmp_path / "torch"))
    assert not any(ours.state["skipped"])


@pytest.mark.parametrize("name", ["adam", "fused_adamw"])
@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_the_scaler_knows_when_a_scheduler_is_due(name: str) -> None:
    accelerator, model, run = accelerator_with(ampfast.GradScaler), HalfNet(), Run()
    optimizer = optimizer_for(model, name)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    model, optimizer = accelerator.prepare(model, optimizer)
    for data, target in batches():
        optimizer.zero_grad()
        accelerator.backward(run.loss(model(data), target, accelerator.scaler))
        optimizer.step()
        if not accelerator.scaler.step_skipped(optimizer.optimizer):
            scheduler.step()
    skipped = run.finish(model).skipped
    assert skipped >= 2
    assert scheduler.last_epoch == STEPS - skipped


@pytest.mark.usefixtures("cuda_on_cpu", "patched")
def test_the_scalers_that_it_makes_are_patched() -> None:
    for made in (modeling.get_grad_scaler(), fsdp_utils.get_fsdp2_grad_scaler(device="cuda")):
        assert isinstance(made, ampfast.GradScaler)
    sharded = modeling.get_grad_scaler(accelerate.DistributedType.FSDP)
    assert isinstance(sharded, ampfast.ShardedGradScaler)


def train_16_bit(part: Part) -> None:
    precision = "fp16" if part.case.scaled else "bf16"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    if part.case.scaled:
        accelerator.native_amp = True
        accelerator.scaler = part.make_scaler()
    model, optimizer = accelerator.prepare(part.model, part.make_optimizer())
    if part.resumes:
        accelerator.load_state(str(part.folder))
    for data, target in part.batches:
        optimizer.zero_grad()
        accelerator.backward(part.loss(model(data), target))
        if part.case.clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), part.case.clip)
        optimizer.step()
    accelerator.save_state(str(part.folder))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_16_bit_models(case: Case, tmp_path: Path) -> None:
    assert_as_by_hand(train_16_bit, case, tmp_path)


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_accelerate.py")
