"""Collects cases that torch still gets wrong, for a summary at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

_verdicts: dict[str, list[bool]] = {}


@pytest.fixture
def torch_fails(record_property: Callable[[str, object], None]) -> Callable[[str, bool], None]:
    """Records whether torch still gets a case wrong; a fix in torch is no failure here."""

    def note(what: str, fails: bool) -> None:
        record_property(f"torch still fails: {what}", fails)
        _verdicts.setdefault(what, []).append(fails)

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Writes a line for each tested difference from torch."""
    if _verdicts:
        terminalreporter.section(f"differences from torch {torch.__version__}")
    for what, cases in _verdicts.items():
        state = "still fails" if any(cases) else "no longer fails"
        terminalreporter.line(f"torch {state}: {what} ({sum(cases)} of {len(cases)} cases)")
