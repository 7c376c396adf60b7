"""`callbacks.attach` with the real trainers: figures in their loggers, at their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trajectories import SETTINGS, STEPS

import ampfast

NAMES = {"steps", "skipped", "overflows", "spikes", "skipped_share", "log2_scale"}


def assert_figures(rows: list[tuple[int, dict[str, float]]], every: int) -> None:
    """Checks rows of step and figures."""
    assert [step for step, _ in rows] == list(range(every, STEPS + 1, every))
    for step, figures in rows:
        assert set(figures) >= {f"scaler/{name}" for name in NAMES}
        assert figures["scaler/steps"] == step
    assert 0 < sum(figures["scaler/skipped"] for _, figures in rows) < STEPS


def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    from test_transformers import trainer_with

    trainer = trainer_with(ampfast.GradScaler("cpu", **SETTINGS), tmp_path)
    trainer.args.logging_steps = 2
    ampfast.callbacks.attach(trainer)
    trainer.train()
    logs = trainer.state.log_history
    figures = [(log["step"], log) for log in logs if "scaler/steps" in log]
    assert_figures(figures, every=2)
    assert sum("loss" in log for log in logs) == STEPS // 2


def test_lightning() -> None:
    lightning: Any = pytest.importorskip("lightning", reason="needs lightning")
    from lightning.pytorch.loggers.logger import DummyLogger
    from test_lightning import Classifier, trainer
    from trajectories import batches, loader

    class Memory(DummyLogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            if "scaler/steps" in metrics:
                self.rows.append((step, metrics))

    memory = Memory()
    fit = trainer(ampfast.GradScaler("cpu", **SETTINGS))
    fit.loggers, fit.log_every_n_steps = [memory], 2
    ampfast.callbacks.attach(fit)
    fit.fit(Classifier("adam"), loader(batches()))
    assert isinstance(fit, lightning.Trainer)
    assert_figures(memory.rows, every=2)
