"""Modes run under compute-sanitizer on a GPU: their expected results."""

from __future__ import annotations

import modes
import pytest
import torch
from device_parity import BACKEND, CPU


def test_every_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # A dtype that is widened and one that is not; other tests have the values of all.
    monkeypatch.setattr(modes, "FLOATS", (torch.float16, torch.float64))
    assert modes.run(BACKEND or "cpu", CPU) == 0, capsys.readouterr().out
    # The expectations would catch it.
    every = modes.modes
    monkeypatch.setattr(
        modes, "modes", lambda *given: [m for m in every(*given) if m[0] == "unscale"]
    )
    monkeypatch.setattr(modes, "FLOATS", (torch.float32,))
    monkeypatch.setattr(modes, "flag", lambda value, device: torch.full((), value + 1.0))
    assert modes.run(BACKEND or "cpu", CPU) > 0
