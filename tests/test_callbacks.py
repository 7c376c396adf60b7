"""A trainer's logger gets its scaler's figures; the trainers themselves are stand-ins."""

from __future__ import annotations

import logging
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.steps import Training

import ampfast
from ampfast import GradScaler

Logged = list[tuple[int, dict[str, float]]]


class TransformersTrainer:
    """Logs every second step, as `logging_steps=2` has it."""

    def __init__(self, scaler: Any) -> None:
        facts = {"distributed_type": "NO", "device": torch.device("cpu"), "_optimizers": []}
        facts |= {"native_amp": True, "mixed_precision": "fp16"}
        self.accelerator, self.logged = SimpleNamespace(scaler=scaler, **facts), Logged()
        self.callbacks: list[Any] = []
        self.add_callback, self.remove_callback = self.callbacks.append, self.callbacks.remove
        self.state = SimpleNamespace(is_world_process_zero=True, global_step=0)

    def log(self, values: dict[str, float]) -> None:
        if "loss" not in values:
            self.logged.append((self.state.global_step, values))
        self.control.should_log = False
        for each in self.callbacks:
            each.on_log(None, self.state, self.control, logs=values)

    def end_batch(self, steps: int) -> None:
        self.state.global_step = steps
        self.control = SimpleNamespace(should_log=steps % 2 == 0)
        for each in self.callbacks:
            each.on_step_end(None, self.state, self.control, model=None)
        if steps % 2 == 0:
            assert self.control.should_log, "the trainer's own line is lost"
            self.log({"loss": 1.0})


class LightningTrainer:
    def __init__(self, scaler: Any) -> None:
        self.precision_plugin, self.logged = SimpleNamespace(scaler=scaler), Logged()
        self.strategy = None
        self.callbacks: list[Any] = []
        self.log_every_n_steps, self.global_step, self.is_global_zero = 2, 0, True
        self.loggers = [self]

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def end_batch(self, steps: int) -> None:
        self.global_step = steps
        for each in self.callbacks:
            each.on_train_batch_end(self, None, None, None, 0)


TransformersTrainer.__module__ = "transformers.trainer"
LightningTrainer.__module__ = "lightning.pytorch.trainer.trainer"


class Derived(TransformersTrainer):
    """As those of TRL."""


TRAINERS = (TransformersTrainer, Derived, LightningTrainer)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"transformers": "TrainerCallback", "lightning": "", "lightning.pytorch": "Callback"}
    for name, base in names.items():
        module: Any = ModuleType(name)
        if base:
            setattr(module, base, type(base, (), {}))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("kind", TRAINERS)
def test_figures_are_logged_where_the_trainer_logs(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = GradScaler("cpu", init_scale=8.0, track="overflow", skip_above=10.0)
    training = Training(scaler).step(math.inf)  # before the guard
    trainer = kind(scaler)
    ampfast.callbacks.guard(trainer, prefix="amp/")
    trainer.end_batch(0)
    with caplog.at_level(logging.WARNING, "ampfast"):
        for steps, gradient in enumerate([3.0, 2.0, 20.0, 1.0, math.inf, 1.5], start=1):
            training.step(gradient)
            trainer.end_batch(steps)
            trainer.end_batch(steps)  # whose gradients accumulate
    names = ("steps", "skipped", "nonfinite", "spikes", "skipped_share", "log2_scale")
    names += ("grad_norm", "largest_grad_norm", "skip_limit")
    rows = [
        (2, 3, 0, 0, 0, 0.0, 2, 2.0, 3.0, 10.0),
        (4, 5, 1, 0, 1, 0.5, 2, 1.0, 20.0, 10.0),
        (6, 7, 1, 1, 0, 0.5, 1, 1.5, 1.5, 10.0),
    ]
    expected = [
        (step, {f"amp/{n}": pytest.approx(v) for n, v in zip(names, row, strict=True)})
        for step, *row in rows
    ]
    assert trainer.logged == expected
    spike, report = (each.getMessage() for each in caplog.records)
    assert spike.startswith("step 3 was skipped: a spike") and "group 0, parameter 0" in report


def test_another_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got builtins\.dict; .* log ampfast\.report\.figures"):
        ampfast.callbacks.guard({})
