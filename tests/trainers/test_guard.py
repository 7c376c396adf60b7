"""One line guards the steps of Transformers, Accelerate and Lightning."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import STEPS, batches, loader, optimizer_for
from support.comparison import TorchScaler, assert_same
from support.steps import small_model
from test_lightning import Classifier, plugins, precision_with, trainer
from test_transformers import Model, trainer_with
from torch import Tensor, nn

import ampfast

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
loggers = pytest.importorskip("lightning.pytorch.loggers.logger", reason="needs lightning")
transformers = pytest.importorskip("transformers", reason="needs transformers")

HALF = STEPS // 2
BAD = {6: 500.0, 11: math.nan, 13: 500.0}
LIMIT = ampfast.Sigmas(6, window=4)
SCALE = {"init_scale": 4.0}


@dataclass
class Recorder:
    """A part of a training, the factors of its loss, and what it shows after each step."""

    precision: str
    optimizer: str
    clip: float
    folder: Path
    bad: dict[int, float]
    batches: list[tuple[Tensor, Tensor]]
    resumes: bool = False
    every: int = 1  # steps between rows
    model: nn.Module = field(default_factory=small_model)
    steps: int = 0
    weights: list[list[Tensor]] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)
    scaler: Any = None

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.steps += 1
        loss = nn.functional.cross_entropy(output.float(), target)
        return loss * self.bad.get(self.steps - 1, 1.0)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return optimizer_for(self.model, self.optimizer)

    def end(self) -> None:
        self.weights.append([param.detach().clone() for param in self.model.parameters()])


class Module(Classifier):
    def on_train_batch_end(self, *_: Any) -> None:
        self.part.end()


def by_lightning(run: Recorder, guard: Any) -> None:
    given: Any = {"precision": run.precision}
    if run.precision == "16-mixed":
        given = {"plugins": [precision_with(plugins, TorchScaler("cpu", **SCALE))]}
    rows = loggers.DummyLogger()
    rows.log_metrics = lambda metrics, step: run.rows.append(metrics)
    fitted = trainer(
        max_epochs=1 + run.resumes,
        logger=rows,
        log_every_n_steps=run.every,
        gradient_clip_val=run.clip,
        **given,
    )
    run.scaler = guard(fitted)
    checkpoint = run.folder / "half.ckpt"
    fitted.fit(Module(run), loader(run.batches), ckpt_path=checkpoint if run.resumes else None)
    fitted.save_checkpoint(checkpoint)


def by_accelerate(run: Recorder, guard: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=run.precision)
    if run.precision == "fp16":
        accelerator.native_amp, accelerator.scaler = True, TorchScaler("cpu", **SCALE)
    if run.precision != "bf16":  # before prepare
        run.scaler = guard(accelerator)
    model, optimizer = accelerator.prepare(run.model, run.make_optimizer())
    run.scaler = run.scaler or guard(accelerator)
    keep = lambda row, **_: run.rows.append(row)  # noqa: E731
    accelerator.trackers = [SimpleNamespace(name="rows", log=keep)]
    if run.resumes:
        accelerator.load_state(str(run.folder))
    for data, target in run.batches:
        optimizer.zero_grad()
        accelerator.backward(run.loss(model(data), target))
        if run.clip:
            accelerator.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        accelerator.log({"loss": 1.0})
        run.end()
    accelerator.save_state(str(run.folder))


def by_transformers(run: Recorder, guard: Any) -> None:
    fitted = trainer_with(
        TorchScaler("cpu", **SCALE) if run.precision == "fp16" else None,
        run.folder,
        Model(lambda _, output, labels: run.loss(output, labels), run.model),
        given=run.batches,
        optimizer=run.make_optimizer(),
        num_train_epochs=1 + run.resumes,
        lr_scheduler_type="constant",
        logging_steps=run.every,
        max_grad_norm=run.clip,
        save_strategy="steps",
        save_steps=HALF,
        **{name: name == run.precision for name in ("bf16", "fp16")},
    )

    class After(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.end()

    fitted.add_callback(After())
    run.scaler = guard(fitted)
    fitted.train(resume_from_checkpoint=run.resumes)
    run.rows += fitted.state.log_history[-2 * len(run.batches) - 1 :]


WAYS = [
    *((by_lightning, each) for each in ("32-true", "bf16-true", "bf16-mixed", "16-mixed")),
    *((by_accelerate, each) for each in ("no", "bf16", "fp16")),
    *((by_transformers, each) for each in ("no", "bf16", "fp16")),
]
BFLOAT16 = pytest.mark.parametrize(
    "way, precision", [(by_lightning, "bf16-mixed"), (by_transformers, "bf16")]
)


def trained(
    way: Callable[..., None],
    case: tuple[str, str, float],
    folder: Path,
    bad: dict[int, float],
    guards: tuple[int, ...] = (0, HALF),
    parts: tuple[int, ...] = (0, STEPS),
) -> tuple[list[list[Tensor]], Recorder]:
    """Weights after each step, of parts with new objects and a checkpoint between them.

    Those parts are guarded of which `guards` has the first step.
    """

    def guard(trainer: Any) -> Any:
        if begin not in guards:
            return None
        return ampfast.callbacks.guard(trainer, skip_above=LIMIT, max_skips=3).scaler

    weights = []
    for begin, end in pairwise(parts):
        factors = {step - begin: factor for step, factor in bad.items()}
        run = Recorder(*case, folder, factors, list(batches())[begin:end], begin > 0)
        way(run, guard)
        weights += run.weights
    assert len(weights) == STEPS
    return weights, run


@pytest.mark.parametrize("name, clip", [("adam", 0.3), ("fused_adam", 0.0)], ids=str)
@pytest.mark.parametrize("way, precision", WAYS)
def test_bad_batches_are_skipped_and_clean_trainings_are_equal(
    way: Callable[..., None],
    precision: str,
    name: str,
    clip: float,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = way, (precision, name, clip)
    clean, run = trained(*case, tmp_path / "clean", {})
    assert run.scaler.stats().skipped == 0
    assert_same(clean, trained(*case, tmp_path / "off", {}, guards=())[0])
    whole, run = trained(*case, tmp_path / "whole", BAD)
    held = [step for step in range(1, STEPS) if all(map(torch.equal, *whole[step - 1 : step + 1]))]
    assert held == list(BAD)
    stats, has_scaler = run.scaler.stats(), precision in ("16-mixed", "fp16")
    assert (stats.steps, stats.skipped, stats.spikes) == (STEPS, len(BAD), 2)
    assert type(run.scaler) is (ampfast.GradScaler if has_scaler else ampfast.StepGuard)
    logged = [row for row in run.rows if "scaler/steps" in row]
    assert [sum(row[f"scaler/{kind}"] for row in logged) for kind in ("spikes", "nonfinite")] == [
        2,
        1,
    ]
    # Norms are those before the clip.
    assert max(row.get("scaler/largest_grad_norm", 0.0) for row in logged) > 10
    caplog.clear()
    assert_same(trained(*case, tmp_path / "halves", BAD, parts=(0, HALF, STEPS))[0], whole)
    told = [each.args[0] for each in caplog.records if "was skipped" in each.msg]
    assert has_scaler or way is by_accelerate or told == list(BAD)


@pytest.mark.parametrize("first", [0, HALF])
@BFLOAT16
def test_a_guard_may_come_or_go_between_checkpoints(
    way: Callable[..., None], precision: str, first: int, tmp_path: Path
) -> None:
    case = way, (precision, "adam", 0.3)
    clean = trained(*case, tmp_path / "clean", {}, guards=())[0]
    parts = trained(*case, tmp_path / "halves", {}, guards=(first,), parts=(0, HALF, STEPS))[0]
    assert_same(parts, clean)


@BFLOAT16
def test_short_trainings_log_once_and_are_warned_of_the_window(
    way: Callable[..., None],
    precision: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def guard(trainer: Any) -> Any:
        ampfast.callbacks.guard(trainer, skip_above=9.0)  # which the next one replaces
        return ampfast.callbacks.guard(trainer, skip_above=ampfast.Sigmas(6)).scaler

    bad = {6: 500.0, 11: math.nan}
    way(run := Recorder(precision, "adam", 0.0, tmp_path, bad, list(batches()), every=500), guard)
    logged = [row for row in run.rows if "scaler/steps" in row]
    assert [(row["scaler/steps"], row["scaler/skipped"]) for row in logged] == [(STEPS, 1)]
    warning, skip = (each.getMessage() for each in caplog.records if each.name == "ampfast")
    assert "once 128 more steps were taken" in warning and "of 16 steps it skips" in warning
    assert skip.startswith("step 11 was skipped")


def test_remove_and_what_is_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    _, optimizer = accelerator.prepare(small_model(), optimizer_for(small_model()))
    before = {**vars(accelerator)}
    handle = ampfast.callbacks.guard(accelerator)
    assert optimizer.scaler is accelerator.scaler is handle.scaler
    handle.remove()
    assert vars(accelerator) == before and optimizer.scaler is None
    accelerator.scaler = own = ampfast.GradScaler("cpu", skip_above=2.0)
    handle = ampfast.callbacks.guard(accelerator, max_skips=5)
    with pytest.raises(TypeError, match="max_skips"):
        ampfast.callbacks.guard(accelerator, skip_above=3.0, max_skips="5")  # type: ignore[arg-type]
    assert handle.scaler is own and (own.skip_above, own.max_skips) == (2.0, 5)
    handle.remove()
    assert accelerator.scaler is own and own.max_skips is None
    for wrong in ({}, optimizer, nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=r"or an Accelerator, got .*; any other loop can make"):
            ampfast.callbacks.guard(wrong)
    accelerator.state.distributed_type = accelerate.DistributedType.DEEPSPEED
    with pytest.raises(ValueError, match="takes the steps itself"):
        ampfast.callbacks.guard(accelerator)


@pytest.mark.parametrize("accumulates", [True, False])
def test_accumulated_gradients_are_compared_once(accumulates: bool) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    handle = ampfast.callbacks.guard(accelerator, skip_above=1e-9)
    model, optimizer = accelerator.prepare(nn.Linear(8, 3), optimizer_for(nn.Linear(8, 3)))
    for data, _ in batches():
        with accelerator.accumulate(model) if accumulates else nullcontext():
            accelerator.backward(model(data).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert handle.scaler.stats().steps == STEPS // (1 + accumulates)
