"""Lightning Fabric: the scaler is an argument of its precision plugin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import Scaler, TorchScaler
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


def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_fabric.py")
