"""Lightning Fabric: the scaler is an argument of its precision plugin, but of that for FSDP."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import CLIPS_NO_FUSED, Case, Part, assert_same_run
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import ampfast

L = pytest.importorskip("lightning", reason="needs lightning")
plugins = pytest.importorskip("lightning.fabric.plugins", reason="needs lightning")
pytorch = pytest.importorskip("lightning.pytorch.plugins", reason="needs lightning")


def train(part: Part) -> None:
    if part.case.scaled:
        precision = plugins.MixedPrecision("16-mixed", "cpu", scaler=part.make_scaler())
    else:
        precision = plugins.HalfPrecision("bf16-true")
        part.model.float()  # which `setup` converts, after the optimizer is made
    fabric = L.Fabric(accelerator="cpu", plugins=[precision])
    model, optimizer = fabric.setup(part.model, part.make_optimizer())
    state = {"model": model, "optimizer": optimizer}
    checkpoint = part.folder / "half.ckpt"
    if part.resumes:
        rest = fabric.load(checkpoint, state)
        if part.scaler:
            part.scaler.load_state_dict(rest["scaler"])
    for data, target in part.batches:
        optimizer.zero_grad()
        fabric.backward(part.loss(model(data), target))
        if part.case.clip is not None:
            clip = part.case.clip
            fabric.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False)
        optimizer.step()
    fabric.save(checkpoint, {**state, "scaler": part.scaler and part.scaler.state_dict()})


# It refuses to clip with a fused optimizer.
@pytest.mark.parametrize("case", CLIPS_NO_FUSED, ids=str)
def test_runs(case: Case, tmp_path: Path) -> None:
    assert_same_run(train, case, tmp_path)


@pytest.mark.usefixtures("patched")
def test_the_scaler_that_it_makes_is_patched() -> None:
    assert isinstance(plugins.MixedPrecision("16-mixed", "cpu").scaler, ampfast.GradScaler)


@pytest.mark.parametrize("plugins", [plugins, pytorch], ids=["fabric", "trainer"])
@pytest.mark.usefixtures("world", "cuda_on_cpu", "patched")
def test_the_sharded_scaler_that_it_makes_is_patched(plugins: object) -> None:
    assert isinstance(plugins.FSDPPrecision("16-mixed").scaler, ampfast.ShardedGradScaler)
    # If this fails, the argument works, and example and documentation can say so.
    with pytest.raises(ValueError, match="does not use a scaler"):
        plugins.FSDPPrecision("16-mixed", scaler=ShardedGradScaler("cpu"))
