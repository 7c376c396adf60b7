"""Lightning Fabric: the scaler is an argument of its precision plugin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sixteen_bit import CASES, Case, Part, assert_as_by_hand
from support.scalers import Scaler, TorchScaler
from trajectories import SETTINGS, HalfNet, Run, assert_same_run, batches, optimizer_for

import ampfast

L = pytest.importorskip("lightning", reason="needs lightning")
plugins = pytest.importorskip("lightning.fabric.plugins", reason="needs lightning")


def train(scaler_type: Scaler, name: str, clip: float | None) -> Run:
    run = Run()
    scaler = scaler_type("cpu", **SETTINGS)
    precision = plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fabric = L.Fabric(accelerator="cpu", plugins=[precision])
    model = HalfNet()
    model, optimizer = fabric.setup(model, optimizer_for(model, name))
    for data, target in batches():
        optimizer.zero_grad()
        fabric.backward(run.loss(model(data), target, scaler))
        if clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False)
        optimizer.step()
    return run.finish(model)


# It refuses to clip with a fused optimizer.
@pytest.mark.parametrize("optimizer, clip", [("adam", 0.05), ("fused_adamw", None)])
def test_argument(optimizer: str, clip: float | None) -> None:
    assert_same_run(train(ampfast.GradScaler, optimizer, clip), train(TorchScaler, optimizer, clip))


@pytest.mark.usefixtures("patched")
def test_the_scaler_that_it_makes_is_patched() -> None:
    assert isinstance(plugins.MixedPrecision("16-mixed", "cpu").scaler, ampfast.GradScaler)


def train_16_bit(part: Part) -> None:
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


@pytest.mark.parametrize("case", [case for case in CASES if not case.clips_fused], ids=str)
def test_16_bit_models(case: Case, tmp_path: Path) -> None:
    assert_as_by_hand(train_16_bit, case, tmp_path)


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_fabric.py")
