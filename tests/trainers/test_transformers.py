"""Transformers' Trainer, from which those of TRL derive: the scaler is its Accelerator's.

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
from runs import CASES, PLANTED, Case, Net, Part, assert_same_run, batches, planted
from support.comparison import TorchScaler, assert_same
from torch import Tensor, nn

import ampfast

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
modeling = pytest.importorskip("accelerate.utils.modeling", reason="needs accelerate")
transformers = pytest.importorskip("transformers", reason="needs transformers")


class Model(nn.Module):
    """A net with a loss of data, labels and the number of the step."""

    def __init__(self, loss: Callable[..., Tensor], net: nn.Module | None = None) -> None:
        super().__init__()
        self.loss, self.net, self.steps = loss, net or Net(), 0

    def forward(self, data: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        return {"loss": self.loss(self, self.net(data), labels)}


def plain(model: Model, output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels)


def overflowing(model: Model, output: Tensor, labels: Tensor) -> Tensor:
    """With an infinite gradient in the steps of `PLANTED`."""
    return planted(plain(model, output, labels), model, model.steps - 1)


def trainer_with(
    scaler: TorchScaler | None,
    folder: Path,
    model: nn.Module,
    kind: type[Any] = transformers.Trainer,
    given: list[tuple[Tensor, Tensor]] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **arguments: Any,
) -> Any:
    every = list(batches()) if given is None else given
    rows = [
        {"data": row, "labels": label}
        for data, labels in every
        for row, label in zip(data, labels, strict=True)
    ]
    chosen = {"fp16": True, "save_strategy": "no", "num_train_epochs": 1, "logging_steps": 1}
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        learning_rate=0.02,
        per_device_train_batch_size=len(rows) // len(every),
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
        **(chosen | arguments),
    )
    trainer = kind(model, settings, train_dataset=rows, optimizers=(optimizer, None))
    if scaler is not None:
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = scaler
    return trainer


class Trainer(transformers.Trainer):
    """Makes the optimizer of a part."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        return self.model.part.with_masters(super().create_optimizer(model))


def train(part: Part) -> None:
    model = Model(lambda model, output, labels: part.loss(output, labels), part.model)
    model.part = part
    trainer = trainer_with(
        part.make_scaler() if part.case.scaled else None,
        part.folder,
        model,
        Trainer,
        part.batches,
        fp16=part.case.scaled,
        bf16=not part.case.scaled,
        optim={"adam": "adamw_torch", "fused_adam": "adamw_torch_fused"}[part.case.optimizer],
        lr_scheduler_type="constant",
        max_grad_norm=part.case.clip or 0.0,
        num_train_epochs=1 + part.resumes,
        save_strategy="steps",
        save_steps=len(part.batches),
    )
    trainer.train(resume_from_checkpoint=part.resumes)
    logs = trainer.state.log_history
    part.more = [[log.get(name) for name in ("loss", "grad_norm")] for log in logs]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs(case: Case, tmp_path: Path) -> None:
    assert_same_run(train, case, tmp_path)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "patched"])
@pytest.mark.usefixtures("cuda_on_cpu")
def test_schedules_and_norms_with_overflows(
    given: bool, max_grad_norm: float, tmp_path: Path
) -> None:
    def logs(optim: str, scaler: TorchScaler) -> list[list[float]]:
        """Learning rates and norms."""
        arguments = {"optim": optim, "max_grad_norm": max_grad_norm}
        trainer = trainer_with(scaler, tmp_path, Model(overflowing), **arguments)
        trainer.train()
        history = [log for log in trainer.state.log_history if "loss" in log]
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
    trainer = transformers.Trainer(Model(plain), arguments)
    assert isinstance(trainer.accelerator.scaler, ampfast.GradScaler)
    assert trainer.create_optimizer().param_groups[0]["fused"], "by default"
