"""fastai: binds the class at import, and passes its callback off as an optimizer."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sixteen_bit import CASES, Case, Part, assert_as_by_hand
from torch import Tensor
from trajectories import EXAMPLES, SETTINGS, HalfNet, Run, assert_same_run, batches, loader

import ampfast

fp16 = pytest.importorskip("fastai.callback.fp16", reason="needs fastai")
basics = pytest.importorskip("fastai.basics", reason="needs fastai")
training = pytest.importorskip("fastai.callback.training", reason="needs fastai")


@pytest.fixture(autouse=True)
def _on_the_cpu(cuda_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basics.defaults, "use_cuda", False)


def train() -> Run:
    model, run = HalfNet(), Run()
    learner: Any = None

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return run.loss(output, target, learner.scaler)

    data = basics.DataLoaders(loader(batches()), [])
    learner = basics.Learner(data, model, loss_func=loss, cbs=fp16.MixedPrecision(**SETTINGS))
    with learner.no_bar(), learner.no_logging():
        learner.fit(1, lr=0.02)
    return run.finish(model)


def test_patch() -> None:
    theirs = train()
    with ampfast.patch() as patch:
        assert f"{fp16.__name__}.GradScaler" in patch.replaced
        ours = train()
    assert_same_run(ours, theirs)


def callback_of_the_docs() -> Any:
    """The class that `docs/trainers.md` gives to those who train float16 models."""
    page = (EXAMPLES.parents[1] / "docs" / "trainers.md").read_text(encoding="utf-8")
    code = re.search(r"^    class MixedPrecision16.*\n(?:    .*\n|\n)+", page, re.MULTILINE)
    names = {
        "MixedPrecision": fp16.MixedPrecision,
        "CancelStepException": basics.CancelStepException,
    }
    exec(textwrap.dedent(code[0]), names)
    return names["MixedPrecision16"]


def train_16_bit(part: Part) -> None:
    class State(basics.Callback):
        """State of the scaler, which fastai makes for each fit and does not save."""

        order = fp16.MixedPrecision.order + 1

        def before_fit(self) -> None:
            part.adopt(self.learn.scaler)
            if part.resumes:
                self.learn.scaler.load_state_dict(torch.load(scaler_file))

        def after_epoch(self) -> None:
            torch.save(self.learn.scaler.state_dict(), scaler_file)

    scaler_file = part.folder / "scaler.pt"
    callbacks = [callback_of_the_docs()(), State()] if part.case.scaled else []
    if part.case.clip is not None:
        callbacks.append(training.GradientClip(part.case.clip))

    def make(params: list[Tensor], lr: float) -> torch.optim.Optimizer:
        fused = part.case.optimizer == "fused_adam"
        return part.with_masters(torch.optim.Adam(params, lr=lr, fused=fused))

    learner = basics.Learner(
        basics.DataLoaders(loader(part.batches), []),
        part.model,
        loss_func=part.loss,
        opt_func=partial(basics.OptimWrapper, opt=make),
        cbs=callbacks,
        path=part.folder,
    )
    if part.resumes:
        learner.load("half")
    with learner.no_bar(), learner.no_logging():
        learner.fit(1, lr=0.02)
    learner.save("half")


def test_its_own_callback_refuses_16_bit_models(tmp_path: Path) -> None:
    part = Part(CASES[0], list(batches()), tmp_path, resumes=False)
    learner = basics.Learner(
        basics.DataLoaders(loader(part.batches), []),
        part.model,
        loss_func=part.loss,
        opt_func=lambda params, lr: basics.OptimWrapper(opt=part.make_optimizer()),
        cbs=fp16.MixedPrecision(),
    )
    with (
        learner.no_bar(),
        learner.no_logging(),
        ampfast.patch(),
        pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"),
    ):
        learner.fit(1, lr=0.02)


@pytest.mark.usefixtures("patched")
@pytest.mark.filterwarnings("error:Could not load the optimizer state")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_16_bit_models(case: Case, tmp_path: Path) -> None:
    assert_as_by_hand(train_16_bit, case, tmp_path)


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_fastai.py")
