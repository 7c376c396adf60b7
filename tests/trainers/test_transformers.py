"""Transformers' Trainer: the scaler is an attribute of its Accelerator.

It uses none on the CPU; these tests set its `native_amp` to take the path of a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from sixteen_bit import CASES, Case, Part, assert_as_by_hand
from support.comparison import assert_same
from support.scalers import Scaler, TorchScaler
from torch import Tensor, nn
from trajectories import (
    PLANTED,
    SETTINGS,
    STEPS,
    HalfNet,
    Late,
    Run,
    assert_same_run,
    batches,
    late_by_hand,
    planted,
)

import ampfast

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
modeling = pytest.importorskip("accelerate.utils.modeling", reason="needs accelerate")
transformers = pytest.importorskip("transformers", reason="needs transformers")


class Classifier(nn.Module):
    """Records each loss with the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.run, self.scaler = HalfNet(), Run(), None

    def forward(self, data: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.run.loss(self.net(data), labels, self.scaler)}


def trainer_with(
    scaler: TorchScaler,
    folder: Path,
    model: Classifier | None = None,
    kind: type[Any] = transformers.Trainer,
    **arguments: Any,
) -> Any:
    rows = [
        {"data": row, "labels": label}
        for data, labels in batches()
        for row, label in zip(data, labels, strict=True)
    ]
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        learning_rate=0.02,
        num_train_epochs=1,
        per_device_train_batch_size=len(rows) // STEPS,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", "fp16": True, **arguments},
    )
    model = Classifier() if model is None else model
    trainer = kind(model, settings, train_dataset=rows)
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = model.scaler = scaler
    return trainer


def finished(trainer: Any) -> Run:
    logged = ("loss", "grad_norm", "learning_rate")
    return trainer.model.run.finish(
        trainer.model,
        logs=[[log.get(name) for name in logged] for log in trainer.state.log_history],
        optimizer=trainer.optimizer.state_dict(),
    )


def train(scaler_type: Scaler, folder: Path, **arguments: Any) -> Run:
    trainer = trainer_with(scaler_type("cpu", **SETTINGS), folder, **arguments)
    trainer.train()
    return finished(trainer)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_attribute(optim: str, max_grad_norm: float, tmp_path: Path, step_reads: list[int]) -> None:
    arguments = {"optim": optim, "max_grad_norm": max_grad_norm}
    ours = train(ampfast.GradScaler, tmp_path / "ours", **arguments)
    reads = step_reads.copy()
    assert_same_run(ours, train(TorchScaler, tmp_path / "torch", **arguments))
    if optim == "adamw_torch_fused":
        assert reads == step_reads[STEPS:] == [0] * STEPS


def test_the_default_is_fused(tmp_path: Path) -> None:
    ours = train(ampfast.GradScaler, tmp_path / "ours")
    theirs = train(TorchScaler, tmp_path / "torch")
    assert_same_run(ours, theirs)
    assert ours.state["optimizer"]["param_groups"][0]["fused"]


@pytest.mark.parametrize("begin", [TorchScaler, ampfast.GradScaler], ids=["torch", "ours"])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_checkpoints_are_resumed(begin: Scaler, optim: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
    begun = train(begin, tmp_path / "begun", optim=optim, **saving)
    for scaler_type in (TorchScaler, ampfast.GradScaler):
        scaler = scaler_type("cpu", **SETTINGS)
        trainer = trainer_with(scaler, tmp_path / "resumed", optim=optim)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"begun/checkpoint-{STEPS // 2}"))
        run = finished(trainer)
        assert_same(run.losses, begun.losses[STEPS // 2 :])
        assert_same(run.scales, begun.scales[STEPS // 2 :])
        assert_same(run.state, begun.state)


class LateTrainer(Late, transformers.Trainer):
    """Makes a `LateScheduler`."""


class GivenLate(transformers.Trainer):
    """Gets a `LateScheduler` as argument."""

    def __init__(self, model: Classifier, settings: Any, **more: Any) -> None:
        made = made_by_trainer(model, settings)
        late = ampfast.LateScheduler(made.lr_scheduler, model.scaler, made.optimizer)
        super().__init__(model, settings, optimizers=(made.optimizer, late), **more)


def made_by_trainer(model: Classifier, settings: Any) -> Any:
    """A Trainer with optimizer and scheduler, as `train` makes them."""
    trainer = transformers.Trainer(model, settings)
    trainer.create_optimizer_and_scheduler(STEPS)
    return trainer


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("kind", [LateTrainer, GivenLate])
def test_a_late_schedule(
    kind: type[Any], max_grad_norm: float, tmp_path: Path, step_reads: list[int]
) -> None:
    arguments = {
        "max_grad_norm": max_grad_norm,
        "train_sampling_strategy": "sequential",
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
    }

    def trained(**more: Any) -> Run:
        model, scaler = Classifier(), ampfast.GradScaler("cpu", **SETTINGS)
        model.scaler = scaler  # before the Trainer is made
        trainer = trainer_with(scaler, tmp_path, model, kind, **arguments)
        trainer.train(**more)
        return finished(trainer)

    ours = trained()
    assert step_reads == [0] * STEPS
    resumed = trained(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert_same(resumed.losses, ours.losses[STEPS // 2 :])
    assert_same(resumed.state, ours.state)

    model = Classifier()
    made = made_by_trainer(model, trainer_with(TorchScaler("cpu"), tmp_path, **arguments).args)
    theirs = late_by_hand(model.net, made.optimizer, made.lr_scheduler, max_grad_norm or None)
    rates = [rate for _, _, rate in ours.state.pop("logs")[:STEPS]]
    assert_same(rates, theirs.state.pop("rates"))
    assert_same((ours.losses, ours.scales), (theirs.losses, theirs.scales))
    assert_same(ours.state, theirs.state)
    assert len(set(rates)) < STEPS - 2


class Overflowing(Classifier):
    """Has an infinite gradient in the steps of `PLANTED`."""

    def forward(self, data: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = super().forward(data, labels)["loss"]
        return {"loss": planted(loss, self, len(self.run.losses) - 1)}


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "patched"])
@pytest.mark.usefixtures("cuda_on_cpu")
def test_schedules_and_norms_with_overflows(
    given: bool, max_grad_norm: float, tmp_path: Path
) -> None:
    def logs(optim: str, scaler: TorchScaler) -> list[list[float]]:
        """Learning rates and norms."""
        arguments = {"optim": optim, "max_grad_norm": max_grad_norm}
        trainer = trainer_with(scaler, tmp_path, Overflowing(), **arguments)
        trainer.train()
        history = trainer.state.log_history[:STEPS]
        return [[log[name] for log in history] for name in ("learning_rate", "grad_norm")]

    for optim in ("adamw_torch", "adamw_torch_fused"):
        theirs = logs(optim, TorchScaler("cpu", init_scale=64.0))
        with contextlib.nullcontext() if given else ampfast.patch():
            make = partial(ampfast.GradScaler, "cpu") if given else modeling.get_grad_scaler
            ours = logs(optim, make(init_scale=64.0))
        assert_same(ours, theirs)
        rates, norms = ours
        # The rate after a step is logged with the next one.
        held = [step for step, (a, b) in enumerate(pairwise(rates)) if a == b]
        assert held == (list(PLANTED) if optim == "adamw_torch" else [])
        for step, norm in enumerate(norms):
            assert norm == float("inf") if step in PLANTED else 0 < norm < 1e3


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


@pytest.mark.usefixtures("float16_on_cpu")
def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_transformers.py")


def test_example_refuses_a_cpu(run_example: Callable[[str], str]) -> None:
    with pytest.raises(SystemExit, match="neither casts to float16 nor unscales"):
        run_example("with_transformers.py")


class Spiky(nn.Module):
    """A classifier whose loss is 500 times too large in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.steps = nn.Linear(8, 3), 0

    def forward(self, data: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        loss = nn.functional.cross_entropy(self.net(data), labels)
        return {"loss": loss * (500 if self.steps == 13 else 1)}


class Reasons(transformers.TrainerCallback):
    """Records why each step was skipped."""

    def __init__(self, scaler: Any) -> None:
        self.scaler, self.found = scaler, []

    def on_step_end(self, *given: Any, optimizer: Any, **more: Any) -> None:
        self.found.append(self.scaler.skip_reason(optimizer.optimizer))


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["", "clip"])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_spikes(precision: str, optim: str, max_grad_norm: float, tmp_path: Path) -> None:
    """The recipe of docs/trainers.md: the Trainer's clip comes before the step in bf16."""
    limit = ampfast.Sigmas(6, window=8)
    scaler: Any = ampfast.StepGuard("cpu", skip_above=limit)
    if precision == "fp16":
        scaler = ampfast.GradScaler("cpu", init_scale=4.0, skip_above=limit)
    arguments = {"optim": optim, "max_grad_norm": max_grad_norm, "lr_scheduler_type": "constant"}
    arguments |= {"fp16": precision == "fp16", "bf16": precision == "bf16"}
    trainer = trainer_with(scaler, tmp_path, Spiky(), **arguments)
    if precision == "bf16":
        trainer.accelerator.clip_grad_norm_ = lambda params, limit, order=2.0: (
            scaler.clip_grad_norm_(trainer.optimizer.optimizer, limit, order)
        )
    trainer.add_callback(reasons := Reasons(scaler))
    trainer.train()
    assert reasons.found == [None] * 12 + ["spike"] + [None] * (STEPS - 13)
    assert scaler.stats().spikes == 1
