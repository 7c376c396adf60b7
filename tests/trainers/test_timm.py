"""timm: its NativeScaler makes its scaler by torch's name and keeps it in `_scaler`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sixteen_bit import CASES, Case, Part, assert_as_by_hand
from support.scalers import Scaler, TorchScaler
from trajectories import SETTINGS, HalfNet, Run, assert_same_run, batches, optimizer_for

import ampfast

timm = pytest.importorskip("timm.utils", reason="needs timm, which needs torchvision")
optim = pytest.importorskip("timm.optim", reason="needs timm, which needs torchvision")
models = pytest.importorskip("timm.models", reason="needs timm, which needs torchvision")


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


def train_16_bit(part: Part) -> None:
    """As its training script does."""
    fused = part.case.optimizer == "fused_adam"
    made = optim.create_optimizer_v2(part.model, opt="adam", lr=0.02, fused=fused)
    optimizer, scaler = part.with_masters(made), None
    if part.case.scaled:
        with ampfast.patch():
            scaler = timm.NativeScaler("cpu")
        part.adopt(scaler._scaler)
    if part.resumes:
        models.resume_checkpoint(part.model, str(part.folder / "last.pth.tar"), optimizer, scaler)
    for data, target in part.batches:
        optimizer.zero_grad()
        loss, params = part.loss(part.model(data), target), part.model.parameters()
        if scaler:
            scaler(loss, optimizer, clip_grad=part.case.clip, parameters=params)
            continue
        loss.backward()
        if part.case.clip is not None:
            timm.dispatch_clip_grad(params, part.case.clip)
        optimizer.step()
    saver = timm.CheckpointSaver(
        part.model, optimizer, amp_scaler=scaler, checkpoint_dir=str(part.folder)
    )
    saver.save_checkpoint(epoch=0)


def test_an_optimizer_that_wraps_one_is_refused() -> None:
    lookahead = optim.create_optimizer_v2(HalfNet(), opt="lookahead_adamw", lr=0.02)
    with pytest.raises(TypeError, match="pass the inner one"):
        ampfast.master_weights_(lookahead)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_16_bit_models(case: Case, tmp_path: Path) -> None:
    assert_as_by_hand(train_16_bit, case, tmp_path)


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_timm.py")
