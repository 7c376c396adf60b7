"""Lightning's Trainer and Fabric: precision plugins take the scaler, but those for FSDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    CLIPS_NO_FUSED,
    PLANTED,
    STEPS,
    Case,
    Net,
    Part,
    assert_same_run,
    batches,
    loader,
    optimizer_for,
    planted,
)
from support.comparison import TorchScaler
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import ampfast

L = pytest.importorskip("lightning", reason="needs lightning")
fabrics = pytest.importorskip("lightning.fabric.plugins", reason="needs lightning")
plugins = pytest.importorskip("lightning.pytorch.plugins", reason="needs lightning")


def precision_with(kinds: Any, scaler: TorchScaler | None) -> Any:
    if scaler is None:
        return kinds.HalfPrecision("bf16-true")
    return kinds.MixedPrecision("16-mixed", "cpu", scaler=scaler)


def trainer(**more: Any) -> Any:
    given = {"max_epochs": 1, "logger": False, **more}
    return L.Trainer(
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


class Classifier(L.LightningModule):
    """The model of a part of a run."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part, self.net = part, part.model

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        data, target = batch
        return self.part.loss(self.net(data), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.part.make_optimizer()


def train(part: Part) -> None:
    if not part.case.scaled:
        part.model.float()  # which it converts
    scaler = part.make_scaler() if part.case.scaled else None
    fitted = trainer(
        plugins=[precision_with(plugins, scaler)],
        max_epochs=1 + part.resumes,
        gradient_clip_val=part.case.clip,
    )
    checkpoint = part.folder / "half.ckpt"
    model, data = Classifier(part), loader(part.batches)
    fitted.fit(model, data, ckpt_path=checkpoint if part.resumes else None)
    fitted.save_checkpoint(checkpoint)


def train_by_fabric(part: Part) -> None:
    if not part.case.scaled:
        part.model.float()  # which `setup` converts, after the optimizer is made
    precision = precision_with(fabrics, part.make_scaler() if part.case.scaled else None)
    fabric = L.Fabric(accelerator="cpu", plugins=[precision])
    model, optimizer = fabric.setup(part.model, part.make_optimizer())
    state = {"model": model, "optimizer": optimizer}
    checkpoint = part.folder / "half.ckpt"
    if part.resumes:
        rest = fabric.load(checkpoint, state)
        if part.scaler:
            part.scaler.load_state_dict(rest["scaler"])
    for data, target in part.batches:
        optimizer.zero_grad()
        fabric.backward(part.loss(model(data), target))
        if part.case.clip is not None:
            clip = part.case.clip
            fabric.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False)
        optimizer.step()
    fabric.save(checkpoint, {**state, "scaler": part.scaler and part.scaler.state_dict()})


@pytest.mark.parametrize("train", [train, train_by_fabric])
@pytest.mark.parametrize("case", CLIPS_NO_FUSED, ids=str)
def test_runs(case: Case, train: Callable[[Part], None], tmp_path: Path) -> None:
    assert_same_run(train, case, tmp_path)


class Scheduled(L.LightningModule):
    """Overflows in the steps of `PLANTED`, with a schedule by step."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.net, self.optimizer = Net(), optimizer
        self.rates: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        data, target = batch
        return planted(nn.functional.cross_entropy(self.net(data), target), self, index)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = optimizer_for(self.net, self.optimizer)
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
        trainer(plugins=[precision_with(plugins, scaler)]).fit(model, loader(batches()))
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
    assert ahead == rates(Scheduled, "fused_adamw", TorchScaler("cpu", init_scale=64.0))
    assert len(set(ahead)) == STEPS


@pytest.mark.parametrize("kinds", [fabrics, plugins], ids=["fabric", "trainer"])
@pytest.mark.usefixtures("world", "cuda_on_cpu", "patched")
def test_the_scalers_that_it_makes_are_patched(kinds: Any) -> None:
    assert isinstance(kinds.MixedPrecision("16-mixed", "cpu").scaler, ampfast.GradScaler)
    assert isinstance(kinds.FSDPPrecision("16-mixed").scaler, ampfast.ShardedGradScaler)
    # If this fails, the argument works, and example and documentation can say so.
    with pytest.raises(ValueError, match="does not use a scaler"):
        kinds.FSDPPrecision("16-mixed", scaler=ShardedGradScaler("cpu"))
