"""The modes that compute-sanitizer watches on a GPU, interpreted: their expectations are right."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from device_parity import CPU

FOLDER = Path(__file__).parent.parent / "gpu"


def test_every_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("sanitized_modes", FOLDER / "modes.py")
    modes = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, modes)
    spec.loader.exec_module(modes)
    assert modes.run("triton", CPU) == 0, capsys.readouterr().out
    # It would notice.
    every = modes.modes
    monkeypatch.setattr(
        modes, "modes", lambda *given: [m for m in every(*given) if m[0] == "unscale"]
    )
    monkeypatch.setattr(modes, "FLOATS", (torch.float32,))
    monkeypatch.setattr(modes, "flag", lambda value, device: torch.full((), value + 1.0))
    assert modes.run("triton", CPU) > 0
