"""Tests that need a GPU: every one runs once for each kind of kernels, or skips and says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_support import BACKENDS, gpu, why_not

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """What a test leaves running is over, and its memory free, before the next one starts.

    A kernel that reads or writes where it must not makes every later call fail; then there is no
    point in going on in this process.
    """
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"the device was lost in the test above: {error}", returncode=1)
    torch.cuda.empty_cache()


@pytest.fixture
def device() -> torch.device:
    """The current GPU, with its index."""
    return gpu()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend with kernels for GPUs."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param
