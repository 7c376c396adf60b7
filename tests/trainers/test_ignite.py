"""PyTorch-Ignite: the scaler is an argument, or made on request."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import CASES, Case, Net, Part, assert_same_run, optimizer_for

import ampfast

engine = pytest.importorskip("ignite.engine", reason="needs pytorch-ignite")
handlers = pytest.importorskip("ignite.handlers", reason="needs pytorch-ignite")


@pytest.mark.usefixtures("cuda_on_cpu", "patched")
def test_the_scaler_that_it_makes_is_patched() -> None:
    model = Net()
    trainer = engine.create_supervised_trainer(
        model, optimizer_for(model), torch.nn.functional.cross_entropy, amp_mode="amp", scaler=True
    )
    assert isinstance(trainer.state.scaler, ampfast.GradScaler)


def train(part: Part) -> None:
    mode = {"amp_mode": "amp", "scaler": part.make_scaler()} if part.case.scaled else {}
    optimizer = part.make_optimizer()
    trainer = engine.create_supervised_trainer(part.model, optimizer, part.loss, **mode)
    saved = {"model": part.model, "optimizer": optimizer, "trainer": trainer}
    if part.scaler:
        saved["scaler"] = part.scaler
    if part.resumes:
        checkpoint = torch.load(next(part.folder.glob("*.pt")))
        handlers.Checkpoint.load_objects(saved, checkpoint)
    disk = handlers.DiskSaver(str(part.folder), require_empty=False)
    trainer.add_event_handler(engine.Events.EPOCH_COMPLETED, handlers.Checkpoint(saved, disk))
    trainer.run(part.batches, max_epochs=1 + part.resumes)


@pytest.mark.usefixtures("cuda_on_cpu")
@pytest.mark.parametrize("case", [case for case in CASES if case.clip is None], ids=str)
def test_runs(case: Case, tmp_path: Path) -> None:
    assert_same_run(train, case, tmp_path)
