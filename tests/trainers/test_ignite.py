"""PyTorch-Ignite: the scaler is an argument, or made on request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import Scaler, TorchScaler
from trajectories import SETTINGS, HalfNet, Run, assert_same_run, batches, optimizer_for

import ampfast

engine = pytest.importorskip("ignite.engine", reason="needs pytorch-ignite")


def train(scaler_type: Scaler, optimizer: str) -> Run:
    model, run = HalfNet(), Run()
    scaler = scaler_type("cpu", **SETTINGS)
    trainer = engine.create_supervised_trainer(
        model,
        optimizer_for(model, optimizer),
        lambda output, target: run.loss(output, target, scaler),
        amp_mode="amp",
        scaler=scaler,
    )
    trainer.run(batches())
    return run.finish(model)


@pytest.mark.parametrize("optimizer", ["adam", "fused_adamw"])
@pytest.mark.usefixtures("cuda_on_cpu")
def test_argument(optimizer: str) -> None:
    assert_same_run(train(ampfast.GradScaler, optimizer), train(TorchScaler, optimizer))


@pytest.mark.usefixtures("cuda_on_cpu", "patched")
def test_the_scaler_that_it_makes_is_patched() -> None:
    model = HalfNet()
    trainer = engine.create_supervised_trainer(
        model, optimizer_for(model), torch.nn.functional.cross_entropy, amp_mode="amp", scaler=True
    )
    assert isinstance(trainer.state.scaler, ampfast.GradScaler)


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_ignite.py")
