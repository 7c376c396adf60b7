"""MMEngine: binds the class at import; its wrapper keeps the scaler in `loss_scaler`.

It refuses to scale without a GPU; these tests skip that check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from sixteen_bit import CASES, Case, Part, assert_as_by_hand
from torch import Tensor
from trajectories import SETTINGS, HalfNet, Run, assert_same_run, batches, optimizer_for

import ampfast

model = pytest.importorskip("mmengine.model", reason="needs mmengine")
amp = pytest.importorskip("mmengine.runner.amp", reason="needs mmengine")
optim = pytest.importorskip("mmengine.optim", reason="needs mmengine")
wrapper = pytest.importorskip(
    "mmengine.optim.optimizer.amp_optimizer_wrapper", reason="needs mmengine"
)


@pytest.fixture(autouse=True)
def _no_gpu_is_needed(cuda_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "is_cuda_available", lambda: True)


class Classifier(model.BaseModel):
    """Records each loss with the scale of the wrapper's scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.run, self.scaler = HalfNet(), Run(), None

    def forward(self, data: Tensor, target: Tensor, mode: str) -> dict[str, Tensor]:
        return {"loss": self.run.loss(self.net(data), target, self.scaler)}


def train(optimizer: str, clip: dict[str, float] | None) -> Run:
    model = Classifier()
    optimizer_wrapper = wrapper.AmpOptimWrapper(
        loss_scale=SETTINGS, optimizer=optimizer_for(model.net, optimizer), clip_grad=clip
    )
    model.scaler = optimizer_wrapper.loss_scaler
    for batch in batches():
        model.train_step(batch, optimizer_wrapper)
    return model.run.finish(model, saved=optimizer_wrapper.state_dict())


@pytest.mark.parametrize("clip", [None, {"max_norm": 0.05}], ids=["", "clip"])
@pytest.mark.parametrize("optimizer", ["adam", "fused_adamw"])
@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.GradScaler.*is deprecated:FutureWarning")
def test_patch(optimizer: str, clip: dict[str, float] | None) -> None:
    theirs = train(optimizer, clip)
    with ampfast.patch() as patch:
        assert f"{wrapper.__name__}.GradScaler" in patch.replaced
        ours = train(optimizer, clip)
    assert_same_run(ours, theirs)


@pytest.mark.usefixtures("patched")
def test_the_scaler_that_it_makes_for_fsdp_is_patched() -> None:
    made = wrapper.AmpOptimWrapper(use_fsdp=True, optimizer=optimizer_for(HalfNet()))
    assert isinstance(made.loss_scaler, ampfast.ShardedGradScaler)


class Classifier16(model.BaseModel):
    """A 16-bit model."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.net = part, part.model

    def forward(self, data: Tensor, target: Tensor, mode: str) -> dict[str, Tensor]:
        return {"loss": self.part.loss(self.net(data), target)}


def train_16_bit(part: Part) -> None:
    clip = {"max_norm": part.case.clip} if part.case.clip is not None else None

    def build(params: Iterator[Tensor]) -> torch.optim.Optimizer:
        return part.make_optimizer()

    trained, checkpoint = Classifier16(part), part.folder / "half.pt"
    kind = "AmpOptimWrapper" if part.case.scaled else "OptimWrapper"
    config = {"type": kind, "optimizer": {"type": build}, "clip_grad": clip}
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


@pytest.mark.usefixtures("patched")
@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.GradScaler.*is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_16_bit_models(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own takes bfloat16 alone on a CPU.
    half = partial(torch.autocast, "cpu", torch.float16)
    monkeypatch.setattr(amp, "autocast", lambda dtype: half())
    assert_as_by_hand(train_16_bit, case, tmp_path)


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_mmengine.py")
