"""Transformers' Trainer: the scaler is an attribute of its Accelerator.

It uses none on the CPU; these tests set its `native_amp` to take the path of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sixteen_bit import CASES, Case, Part, assert_as_by_hand
from support import Scaler, TorchScaler, assert_same
from torch import Tensor, nn
from trajectories import SETTINGS, STEPS, HalfNet, Run, assert_same_run, batches

import ampfast

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
transformers = pytest.importorskip("transformers", reason="needs transformers")


class Classifier(nn.Module):
    """Records each loss with the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.run, self.scaler = HalfNet(), Run(), None

    def forward(self, data: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.run.loss(self.net(data), labels, self.scaler)}


def trainer_with(scaler_type: Scaler, folder: Path, **arguments: Any) -> Any:
    rows = [
        {"data": row, "labels": label}
        for data, labels in batches()
        for row, label in zip(data, labels, strict=True)
    ]
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        fp16=True,
        learning_rate=0.02,
        num_train_epochs=1,
        per_device_train_batch_size=len(rows) // STEPS,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", **arguments},
    )
    model = Classifier()
    trainer = transformers.Trainer(model, settings, train_dataset=rows)
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = model.scaler = scaler_type("cpu", **SETTINGS)
    return trainer


def finished(trainer: Any) -> Run:
    logged = ("loss", "grad_norm", "learning_rate")
    return trainer.model.run.finish(
        trainer.model,
        logs=[[log.get(name) for name in logged] for log in trainer.state.log_history],
        optimizer=trainer.optimizer.state_dict(),
    )


def train(scaler_type: Scaler, folder: Path, **arguments: Any) -> Run:
    trainer = trainer_with(scaler_type, folder, **arguments)
    trainer.train()
    return finished(trainer)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_attribute(optim: str, max_grad_norm: float, tmp_path: Path) -> None:
    arguments = {"optim": optim, "max_grad_norm": max_grad_norm}
    ours = train(ampfast.GradScaler, tmp_path / "ours", **arguments)
    assert_same_run(ours, train(TorchScaler, tmp_path / "torch", **arguments))


def test_its_checkpoint_of_torchs_scaler_is_resumed(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
    begun = train(TorchScaler, tmp_path / "begun", **saving)
    resumed = []
    for scaler_type in (ampfast.GradScaler, TorchScaler):
        trainer = trainer_with(scaler_type, tmp_path / "resumed")
        trainer.train(resume_from_checkpoint=str(tmp_path / f"begun/checkpoint-{STEPS // 2}"))
        resumed.append(finished(trainer))
    for run in resumed:
        assert_same(run.losses, begun.losses[STEPS // 2 :])
        assert_same(run.scales, begun.scales[STEPS // 2 :])
        assert_same(run.state, begun.state)


@pytest.mark.usefixtures("cuda_on_cpu", "patched")
def test_the_scaler_that_it_makes_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate.Accelerator, "device", torch.device("cuda"))
    arguments = transformers.TrainingArguments(fp16=True, use_cpu=True, report_to="none")
    trainer = transformers.Trainer(Classifier(), arguments)
    assert isinstance(trainer.accelerator.scaler, ampfast.GradScaler)


class Classifier16(nn.Module):
    """Loss of a 16-bit model."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.net = part, part.model

    def forward(self, data: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.part.loss(self.net(data), labels)}


class Trainer16(transformers.Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        return self.model.part.with_masters(super().create_optimizer(model))


def train_16_bit(part: Part, *, by_argument: bool = False) -> None:
    rows = [
        {"data": row, "labels": label}
        for data, labels in part.batches
        for row, label in zip(data, labels, strict=True)
    ]
    settings = transformers.TrainingArguments(
        output_dir=str(part.folder),
        use_cpu=True,
        fp16=part.case.scaled,
        bf16=not part.case.scaled,
        optim={"adam": "adamw_torch", "fused_adam": "adamw_torch_fused"}[part.case.optimizer],
        learning_rate=0.02,
        lr_scheduler_type="constant",
        max_grad_norm=part.case.clip or 0.0,
        num_train_epochs=1 + part.resumes,
        per_device_train_batch_size=len(rows) // len(part.batches),
        train_sampling_strategy="sequential",
        save_steps=len(part.batches),
        report_to="none",
        disable_tqdm=True,
    )
    classifier = Classifier16(part)
    if by_argument:
        given = (part.make_optimizer(), None)
        trainer = transformers.Trainer(classifier, settings, train_dataset=rows, optimizers=given)
    else:
        trainer = Trainer16(classifier, settings, train_dataset=rows)
    if part.case.scaled:
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = part.make_scaler()
    trainer.train(resume_from_checkpoint=part.resumes)


def test_the_optimizer_of_a_16_bit_model_as_argument(tmp_path: Path) -> None:
    assert_as_by_hand(partial(train_16_bit, by_argument=True), CASES[0], tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_16_bit_models(case: Case, tmp_path: Path) -> None:
    assert_as_by_hand(train_16_bit, case, tmp_path)


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_transformers.py")
