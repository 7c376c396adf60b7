"""Errors of the emulator's own compilation."""

from __future__ import annotations

from pathlib import Path

import pytest
from ptx_emulator import PtxError, machine


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PTX_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "COMPILER", ["no-such-c++"])
    with pytest.raises(PtxError, match=r"no-such-c\+\+: set CXX"):
        machine._library.__wrapped__()
