"""Fixtures of the GPU tests: each test runs for every kind of kernels, or skips with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_support import gpu, unavailable_reason
from runner import BACKENDS

from ampfast.backends import core

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips these tests without a GPU."""
    for item in items if not torch.cuda.is_available() else ():
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Synchronizes after each test and frees memory, with the tables of gradients that were there.

    Ends the session after an illegal access, which makes every later call of the process fail.
    """
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"the device was lost in the test above: {error}", returncode=1)
    core.clear_tables()
    torch.cuda.empty_cache()


@pytest.fixture
def device() -> torch.device:
    """Current GPU, with its index."""
    return gpu()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend with kernels for GPUs, or "aten" where a test asks for it."""
    if request.param in BACKENDS and (reason := unavailable_reason(request.param)):
        pytest.skip(reason)
    return request.param
