"""Captured steps of plain optimizers, replayed over the kernels."""

from __future__ import annotations

import pytest
from device_parity import launch
from support.captures import Capturing, assert_replays_are_eager
from support.scalers import TorchScaler


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_replays_are_torchs_eager_steps(
    kind: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = Capturing(launch, monkeypatch)
    assert_replays_are_eager(capturing, kind, lambda training: training.step(together), TorchScaler)
