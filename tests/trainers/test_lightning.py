"""Lightning's Trainer: the scaler is an argument of its precision plugin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from sixteen_bit import CASES, Case, Part, assert_as_by_hand
from support.comparison import assert_same
from support.scalers import Scaler, TorchScaler
from torch import Tensor
from trajectories import (
    PLANTED,
    SETTINGS,
    STEPS,
    HalfNet,
    Run,
    assert_same_run,
    batches,
    loader,
    optimizer_for,
    planted,
)

import ampfast

L = pytest.importorskip("lightning", reason="needs lightning")
plugins = pytest.importorskip("lightning.pytorch.plugins", reason="needs lightning")


class Classifier(L.LightningModule):
    """Records each loss with the scale of the trainer's scaler."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.net, self.run, self.optimizer = HalfNet(), Run(), optimizer

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        data, target = batch
        return self.run.loss(self.net(data), target, self.trainer.precision_plugin.scaler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_for(self.net, self.optimizer)


def trainer(scaler: TorchScaler, steps: int = STEPS, clip: float | None = None) -> Any:
    return L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        plugins=[plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(scaler_type: Scaler, optimizer: str, clip: float | None) -> Run:
    model = Classifier(optimizer)
    trainer(scaler_type("cpu", **SETTINGS), clip=clip).fit(model, loader(batches()))
    return model.run.finish(model)


# It refuses to clip with a fused optimizer.
@pytest.mark.parametrize("optimizer, clip", [("adam", 0.05), ("fused_adamw", None)])
def test_argument(optimizer: str, clip: float | None) -> None:
    assert_same_run(train(ampfast.GradScaler, optimizer, clip), train(TorchScaler, optimizer, clip))


def test_its_checkpoint_of_torchs_scaler_is_resumed(tmp_path: Path) -> None:
    begun = trainer(TorchScaler("cpu", **SETTINGS), steps=STEPS // 2)
    begun.fit(Classifier("adam"), loader(batches()))
    begun.save_checkpoint(tmp_path / "half.ckpt")

    resumed = []
    for scaler_type in (ampfast.GradScaler, TorchScaler):
        model = Classifier("adam")
        resumes = trainer(scaler_type("cpu", **SETTINGS))
        resumes.fit(model, loader(batches()), ckpt_path=tmp_path / "half.ckpt")
        resumed.append(model.run.finish(model))
    ours, theirs = resumed
    assert len(ours.losses) == STEPS // 2
    assert_same(
        [ours.losses, ours.scales, ours.state], [theirs.losses, theirs.scales, theirs.state]
    )
    assert ours.scales[0] == begun.precision_plugin.scaler.get_scale() < SETTINGS["init_scale"]


class Scheduled(Classifier):
    """Overflows in the steps of `PLANTED`, with a schedule by step."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.rates: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return planted(super().training_step(batch), self, len(self.run.losses) - 1)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.lr_schedulers().get_last_lr()[0])


class ScheduledByTheScaler(Scheduled):
    """The two lines of docs/trainers.md."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if not self.trainer.scaler.step_skipped(scheduler.optimizer):
            super().lr_scheduler_step(scheduler, metric)


@pytest.mark.parametrize("given", [True, False], ids=["given", "patched"])
def test_schedules_with_overflows(given: bool) -> None:
    def rates(kind: type[Scheduled], optimizer: str, scaler: TorchScaler) -> list[float]:
        model = kind(optimizer)
        trainer(scaler).fit(model, loader(batches()))
        assert len(model.rates) == STEPS
        return model.rates

    with contextlib.nullcontext() if given else ampfast.patch():
        make = ampfast.GradScaler if given else torch.amp.GradScaler
        plain, fused = (
            rates(ScheduledByTheScaler, name, make("cpu", init_scale=64.0))
            for name in ("adam", "fused_adamw")
        )
        ahead = rates(Scheduled, "fused_adamw", make("cpu", init_scale=64.0))
    assert fused == plain
    held = [step for step, (a, b) in enumerate(pairwise([0.02, *fused])) if a == b]
    assert held == list(PLANTED)
    # Without the two lines Lightning advances in every step, with any optimizer and scaler.
    for name in ("adam", "fused_adamw"):
        assert ahead == rates(Scheduled, name, TorchScaler("cpu", init_scale=64.0))
    assert len(set(ahead)) == STEPS


@pytest.mark.usefixtures("patched")
def test_the_scaler_that_it_makes_is_patched() -> None:
    assert isinstance(plugins.MixedPrecision("16-mixed", "cpu").scaler, ampfast.GradScaler)


class Classifier16(L.LightningModule):
    """A 16-bit model."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.net = part, part.model

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        data, target = batch
        return self.part.loss(self.net(data), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.part.make_optimizer()


def train_16_bit(part: Part) -> None:
    if part.case.scaled:
        precision = plugins.MixedPrecision("16-mixed", "cpu", scaler=part.make_scaler())
    else:
        precision = plugins.HalfPrecision("bf16-true")
        part.model.float()  # which it converts
    fitted = L.Trainer(
        max_epochs=1 + part.resumes,
        accelerator="cpu",
        plugins=[precision],
        gradient_clip_val=part.case.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = part.folder / "half.ckpt"
    model, data = Classifier16(part), loader(part.batches)
    fitted.fit(model, data, ckpt_path=checkpoint if part.resumes else None)
    fitted.save_checkpoint(checkpoint)


@pytest.mark.parametrize("case", [case for case in CASES if not case.clips_fused], ids=str)
def test_16_bit_models(case: Case, tmp_path: Path) -> None:
    assert_as_by_hand(train_16_bit, case, tmp_path)


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_lightning.py")
