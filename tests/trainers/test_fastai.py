"""fastai: binds the class at import, and passes its callback off as an optimizer."""

from __future__ import annotations

import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CASES, EXAMPLES, Case, Part, assert_same_run, loader
from torch import Tensor

fp16 = pytest.importorskip("fastai.callback.fp16", reason="needs fastai")
basics = pytest.importorskip("fastai.basics", reason="needs fastai")
training = pytest.importorskip("fastai.callback.training", reason="needs fastai")


pytestmark = pytest.mark.usefixtures("fastai_on_cpu")


def callback_of_the_docs() -> Any:
    """The class that `docs/contributing/trainers.md` gives to those who train float16 models."""
    page = (EXAMPLES.parents[1] / "docs" / "contributing/trainers.md").read_text(encoding="utf-8")
    code = re.search(r"^    class MixedPrecision16.*\n(?:    .*\n|\n)+", page, re.MULTILINE)
    names = {
        "MixedPrecision": fp16.MixedPrecision,
        "CancelStepException": basics.CancelStepException,
    }
    exec(textwrap.dedent(code[0]), names)
    return names["MixedPrecision16"]


def train(part: Part) -> None:
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
    callbacks: list[Any] = []
    if part.case.scaled:
        made = callback_of_the_docs() if part.case.has_masters else fp16.MixedPrecision
        callbacks += [made(), State()]
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
    with part.patching(), learner.no_bar(), learner.no_logging():
        learner.fit(1, lr=0.02)
    learner.save("half")


@pytest.mark.filterwarnings("error:Could not load the optimizer state")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs(case: Case, tmp_path: Path) -> None:
    assert_same_run(train, case, tmp_path)
