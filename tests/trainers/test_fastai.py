"""fastai: binds the class at import, and passes its callback off as an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from trajectories import SETTINGS, HalfNet, Run, assert_same_run, batches, loader

import ampfast

fp16 = pytest.importorskip("fastai.callback.fp16", reason="needs fastai")
basics = pytest.importorskip("fastai.basics", reason="needs fastai")


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


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_fastai.py")
