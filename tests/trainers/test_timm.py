"""timm: its NativeScaler makes its scaler by torch's name and keeps it in `_scaler`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import Scaler, TorchScaler
from trajectories import SETTINGS, HalfNet, Run, assert_same_run, batches, optimizer_for

import ampfast

timm = pytest.importorskip("timm.utils", reason="needs timm, which needs torchvision")


def train(scaler_type: Scaler, optimizer: str, clip: float | None) -> Run:
    model, run = HalfNet(), Run()
    loss_scaler = timm.NativeScaler("cpu")
    loss_scaler._scaler = scaler_type("cpu", **SETTINGS)
    stepped = optimizer_for(model, optimizer)
    for data, target in batches():
        stepped.zero_grad()
        loss = run.loss(model(data), target, loss_scaler._scaler)
        loss_scaler(loss, stepped, clip_grad=clip, parameters=model.parameters())
    resumed = timm.NativeScaler("cpu")
    resumed.load_state_dict(loss_scaler.state_dict())
    return run.finish(model, resumed=resumed.state_dict())


@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clip"])
@pytest.mark.parametrize("optimizer", ["adam", "fused_adamw"])
def test_attribute(optimizer: str, clip: float | None) -> None:
    assert_same_run(train(ampfast.GradScaler, optimizer, clip), train(TorchScaler, optimizer, clip))


@pytest.mark.usefixtures("patched")
def test_the_scaler_that_it_makes_is_patched() -> None:
    assert isinstance(timm.NativeScaler("cpu")._scaler, ampfast.GradScaler)


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_timm.py")
