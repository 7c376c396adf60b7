"""Trainers that clip by torch's name, as they are, under `patch(clip_grad_norm=True)`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from runs import SETTINGS, STEPS, Case, Net, in_halves, optimizer_for
from support.comparison import assert_same
from torch import nn

import ampfast
from ampfast import clip_grad

CASE = Case(Net().layers[0].weight.dtype, "adam", 0.05)


def by_hand() -> tuple[list[Any], list[float], list[Any]]:
    """Losses, scales and parameters of a run with our own clipping."""
    model, scaler = Net(), ampfast.GradScaler("cpu", **SETTINGS)
    optimizer = optimizer_for(model)
    losses, scales = [], []
    for data, target in CASE.batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        losses.append(loss.detach())
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, CASE.clip)
        scaler.step(optimizer)
        scaler.update()
    return losses, scales, [param.detach() for param in model.parameters()]


@pytest.mark.usefixtures("cuda_on_cpu")
@pytest.mark.parametrize("trainer", ["accelerate", "fabric", "lightning", "transformers"])
def test_a_run_is_that_with_our_own_clipping(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(trainer if trainer != "fabric" else "lightning", reason=f"needs {trainer}")
    tests, plain = importlib.import_module(f"test_{trainer}"), clip_grad._clipped
    calls = []
    monkeypatch.setattr(clip_grad, "_clipped", lambda *a: calls.append(plain(*a)) or calls[-1])
    with ampfast.patch(clip_grad_norm=True):
        run = in_halves(tests.train, CASE, tmp_path)
    assert len(calls) == STEPS
    assert_same((run.losses, run.scales, run.state["parameters"]), by_hand())
