"""MMEngine: binds the class at import; its wrapper keeps the scaler in `loss_scaler`.

It refuses to scale without a GPU; these tests skip that check.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor
from trajectories import SETTINGS, HalfNet, Run, assert_same_run, batches, optimizer_for

import ampfast

model = pytest.importorskip("mmengine.model", reason="needs mmengine")
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


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_mmengine.py")
