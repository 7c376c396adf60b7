"""Limits of the scale, counters and history in the kernels, against a model; captured steps."""

from __future__ import annotations

import pytest
from device_parity import CPU, KERNELS, launch
from support.captures import Capturing, assert_replays_are_eager
from support.comparison import TorchScaler
from support.models import LIMITS, check_limits


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("limits", LIMITS)
def test_random_steps(limits: str) -> None:
    check_limits(KERNELS, CPU, limits)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_replays_are_torchs_eager_steps(
    kind: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = Capturing(launch, monkeypatch)
    assert_replays_are_eager(capturing, kind, lambda training: training.step(together), TorchScaler)
