"""Cache of the tests."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what the tests compile in the repository."""
    os.environ.setdefault("PTX_EMULATOR_CACHE", str(config.rootpath / "build" / "ptx"))
