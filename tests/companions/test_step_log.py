"""`python -m ampfast run --log`: a line of JSON for each step of each scaler."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.processes import python_in
from support.steps import Training

from ampfast import GradScaler, step_log
from ampfast.step_log import StepLog

TRAIN = """
import os
import torch
from torch.amp import GradScaler

weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
first, second = GradScaler("cpu", init_scale=2.0), GradScaler("cpu", init_scale=8.0)
off = GradScaler("cpu", enabled=False)
for step, loss in enumerate((1.0, float("inf"), 100.0, 2.0)):
    for scaler in (first, second)[: 1 + (step == 3)]:
        weight.grad = None
        scaler.scale(weight * loss).sum().backward()
        scaler.step(optimizer)
        scaler.update()
os.chdir("/")
raise SystemExit(3)
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def line(scaler: int, step: int, scale: float, skipped: str | None, norm: float | None) -> Any:
    return {
        "scaler": scaler,
        "step": step,
        "scale": scale,
        "skipped": skipped,
        "grad_norm": None if norm is None else pytest.approx(norm * math.sqrt(3)),
    }


def run(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python_in(folder, TRAIN, "-m", "ampfast", "run", *options, "train.py", **environment)


def test_each_step_of_a_program_has_a_line(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("of an earlier run\n")
    assert run(tmp_path, "--skip-above", "50", "--log", "log.jsonl").returncode == 3
    assert lines_of(tmp_path / "log.jsonl") == [
        line(1, 0, 2.0, None, 1.0),
        line(1, 1, 2.0, "overflow", None),
        line(1, 2, 1.0, "spike", 100.0),
        line(1, 3, 1.0, None, 2.0),
        line(2, 0, 8.0, None, 2.0),
    ]
    for path in ("missing/log.jsonl", "."):
        refused = run(tmp_path, "--log", path)
        assert (refused.returncode, f"cannot write {path}" in refused.stderr) == (2, True)
    assert run(tmp_path, "--log", "of_rank_1.jsonl", RANK="1").returncode == 3
    assert not (tmp_path / "of_rank_1.jsonl").exists()


def test_steps_are_written_before_the_history_forgets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(step_log.time, "monotonic", lambda: now[0])
    path = tmp_path / "log.jsonl"
    log, scaler = StepLog(str(path)), GradScaler("cpu")
    training, found = Training(scaler), []
    for step in range(2500):
        training.step(1.0)
        now[0] += 1.0 if step == 3 else 0.0
        log.see(scaler, step + 1)
        found.append(len(lines_of(path)) if step < 6 else None)
    assert found[:6] == [0, 0, 0, 4, 4, 4]
    log.write(scaler)
    log.write(scaler)
    assert [each["step"] for each in lines_of(path)] == list(range(2500))
