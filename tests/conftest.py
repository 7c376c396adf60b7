"""Settings for the whole test session."""

from __future__ import annotations

import pytest
import torch

import ampfast


def pytest_report_header() -> str:
    """Names the versions, so that a log can be read on its own."""
    version = getattr(ampfast, "__version__", "unknown")
    return f"ampfast {version}, torch {torch.__version__}, {torch.get_num_threads()} threads"


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Every test starts from one seed, alone or in the whole run."""
    torch.manual_seed(20240607)
