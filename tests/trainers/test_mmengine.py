"""MMEngine: binds the class at import; its wrapper keeps the scaler in `loss_scaler`.

It refuses to scale without a GPU; these tests skip that check.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from runs import CASES, Case, Net, Part, assert_same_run, optimizer_for
from torch import Tensor

import ampfast

model = pytest.importorskip("mmengine.model", reason="needs mmengine")
amp = pytest.importorskip("mmengine.runner.amp", reason="needs mmengine")
optim = pytest.importorskip("mmengine.optim", reason="needs mmengine")
wrapper = pytest.importorskip(
    "mmengine.optim.optimizer.amp_optimizer_wrapper", reason="needs mmengine"
)


pytestmark = pytest.mark.usefixtures("mmengine_on_cpu")


@pytest.mark.usefixtures("patched")
def test_the_scaler_that_it_makes_for_fsdp_is_patched() -> None:
    made = wrapper.AmpOptimWrapper(use_fsdp=True, optimizer=optimizer_for(Net()))
    assert isinstance(made.loss_scaler, ampfast.ShardedGradScaler)


class Classifier(model.BaseModel):
    """The model of a part."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.net = part, part.model

    def forward(self, data: Tensor, target: Tensor, mode: str) -> dict[str, Tensor]:
        return {"loss": self.part.loss(self.net(data), target)}


def train(part: Part) -> None:
    clip = {"max_norm": part.case.clip} if part.case.clip is not None else None

    def build(params: Iterator[Tensor]) -> torch.optim.Optimizer:
        return part.make_optimizer()

    trained, checkpoint = Classifier(part), part.folder / "half.pt"
    kind = "AmpOptimWrapper" if part.case.scaled else "OptimWrapper"
    config = {"type": kind, "optimizer": {"type": build}, "clip_grad": clip}
    with part.patching():
        stepped = optim.build_optim_wrapper(trained, config)
    if part.case.scaled:
        part.adopt(stepped.loss_scaler)
    if part.resumes:
        saved = torch.load(checkpoint)
        trained.load_state_dict(saved["model"])
        stepped.load_state_dict(saved["optimizer"])
    for batch in part.batches:
        trained.train_step(batch, stepped)
    saved = {"model": trained.state_dict(), "optimizer": stepped.state_dict()}
    torch.save(saved, checkpoint)


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.GradScaler.*is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own takes bfloat16 alone on a CPU.
    half = partial(torch.autocast, "cpu", torch.float16)
    monkeypatch.setattr(amp, "autocast", lambda dtype: half())
    assert_same_run(train, case, tmp_path)
