"""Settings for the whole test session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from reference_launcher import ReferenceLauncher

import ampfast
from ampfast import _C, backends
from ampfast.backends.passes import DeviceKernels

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import patch_once_a_launch

    patch_once_a_launch()


def pytest_report_header() -> str:
    """Names the versions, so that a log can be read on its own."""
    version = getattr(ampfast, "__version__", "unknown")
    return f"ampfast {version}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts a process that runs beside the tests comes first, what waits for it last."""

    def place(item: pytest.Item) -> int:
        names = {mark.name for mark in item.iter_markers()}
        return 1 - ("first" in names) + ("last" in names)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Every test starts from one seed, alone or in the whole run."""
    torch.manual_seed(20240607)


@pytest.fixture
def small_grain() -> Iterator[None]:
    """Lists of a test's size go through several threads too."""
    before = _C.set_grain(32 * 1024)
    yield
    _C.set_grain(before)


@pytest.fixture(params=_C.cpu_capabilities())
def capability(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once with every instruction set that this machine and binary share."""
    before = _C.cpu_capability()
    _C.set_cpu_capability(request.param)
    yield request.param
    _C.set_cpu_capability(before)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fills memory that nobody has written with NaN, so that reading it always shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReferenceLauncher]:
    """The kernels that CPU tensors get are those of a device."""
    launcher = ReferenceLauncher()
    kernels = DeviceKernels(launcher)
    monkeypatch.setattr(backends.Choice, "kernels_for", lambda choice, device: kernels)
    _C.clear_tables()
    yield launcher
    _C.clear_tables()
