"""timm: its NativeScaler makes its scaler by torch's name and keeps it in `_scaler`."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import CASES, Case, Part, assert_same_run

import ampfast

timm = pytest.importorskip("timm.utils", reason="needs timm, which needs torchvision")
optim = pytest.importorskip("timm.optim", reason="needs timm, which needs torchvision")
models = pytest.importorskip("timm.models", reason="needs timm, which needs torchvision")


@pytest.mark.usefixtures("patched")
def test_the_scaler_that_it_makes_is_patched() -> None:
    assert isinstance(timm.NativeScaler("cpu")._scaler, ampfast.GradScaler)


def train(part: Part) -> None:
    """As its training script does."""
    fused = part.case.optimizer == "fused_adam"
    made = optim.create_optimizer_v2(part.model, opt="adam", lr=0.02, fused=fused)
    optimizer, scaler = part.with_masters(made), None
    if part.case.scaled:
        with part.patching():
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs(case: Case, tmp_path: Path) -> None:
    assert_same_run(train, case, tmp_path)
