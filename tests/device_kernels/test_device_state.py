"""Scale policies, counters and history in the kernels, against a model; captured steps."""

from __future__ import annotations

import pytest
from device_parity import CPU, KERNELS, launch
from support.captures import Capturing, assert_replays_are_eager
from support.comparison import TorchScaler
from support.models import POLICIES, check_policy


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("policy", POLICIES)
def test_random_steps(policy: str) -> None:
    check_policy(KERNELS, CPU, policy)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_replays_are_torchs_eager_steps(
    kind: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = Capturing(launch, monkeypatch)
    assert_replays_are_eager(capturing, kind, lambda training: training.step(together), TorchScaler)
