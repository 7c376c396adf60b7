"""Trainers that clip by torch's name, as they are, under `patch(clip_grad_norm=True)`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from runs import Case, Part, in_halves
from support.comparison import assert_same

import ampfast

CASE = Case(torch.float32, "adam", 0.05)


def by_hand(folder: Path) -> Part:
    """A whole run with our own clipping."""
    part = Part(CASE, True, CASE.batches(), folder, resumes=False)
    optimizer, scaler = part.make_optimizer(), part.make_scaler()
    for data, target in part.batches:
        optimizer.zero_grad()
        scaler.scale(part.loss(part.model(data), target)).backward()
        scaler.clip_grad_norm_(optimizer, CASE.clip)
        scaler.step(optimizer)
        scaler.update()
    return part


@pytest.mark.usefixtures("cuda_on_cpu")
@pytest.mark.parametrize("trainer", ["accelerate", "fabric", "lightning", "transformers"])
def test_a_run_is_that_with_our_own_clipping(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = "lightning" if trainer == "fabric" else trainer
    pytest.importorskip(library, reason=f"needs {library}")
    tests = importlib.import_module(f"test_{library}")
    train = tests.train_by_fabric if trainer == "fabric" else tests.train
    torchs = torch.nn.utils.clip_grad
    monkeypatch.setattr(torchs, "_get_total_norm", lambda *_: pytest.fail("torch's clips"))
    with ampfast.patch(clip_grad_norm=True):
        run = in_halves(train, CASE, tmp_path)
    expected = by_hand(tmp_path)
    assert_same((run.losses, run.scales), (expected.losses, expected.scales))
    assert_same(run.state["parameters"], expected.state()["parameters"])
