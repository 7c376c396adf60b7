"""Fixtures and hooks of the whole test session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TypeGuard

import pytest
import torch
from beside import Queue
from launchers import VARIABLE, compiled
from reference_launcher import ReferenceLauncher

import ampfast
from ampfast import _C, backends, info
from ampfast.backends.gpu import DeviceKernels

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import patch_once_a_launch

    patch_once_a_launch()


BESIDE = pytest.StashKey[Queue]()


def pytest_report_header() -> str:
    """Versions, for a log that can be read on its own."""
    version = getattr(ampfast, "__version__", "unknown")
    parts = [f"ampfast {version}", f"torch {torch.__version__}"]
    parts += [f"Triton {info._triton_version()}", f"{torch.get_num_threads()} threads"]
    if kernels := os.environ.get(VARIABLE):
        parts.append(f"kernels {kernels}")
    return ", ".join(parts)


def pytest_configure() -> None:
    """Fails early if the requested kernels are missing."""
    compiled()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts tests that wait for processes to the end."""

    # A test that waits for a single process comes last: it would keep the queue from going on.
    def place(item: pytest.Item) -> int:
        return 2 if item.get_closest_marker("last") else _is_beside(item)

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Queues the processes that the collected tests wait for."""
    waiting = [item for item in session.items if _is_beside(item)]
    wanted = [item for item in waiting if item.get_closest_marker("skip") is None]
    session.config.stash[BESIDE] = queue = Queue([item.callspec.params["run"] for item in wanted])
    session.config.add_cleanup(queue.end)


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[BESIDE].go_on()


def _is_beside(item: pytest.Item) -> TypeGuard[pytest.Function]:
    return isinstance(item, pytest.Function) and "beside" in item.fixturenames


@pytest.fixture
def beside(pytestconfig: pytest.Config) -> Queue:
    """Queue of processes that run beside the tests."""
    return pytestconfig.stash[BESIDE]


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Seeds every test equally."""
    torch.manual_seed(20240607)


@pytest.fixture(autouse=True)
def _compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives CPU tensors the kernels of `AMPFAST_TEST_KERNELS`."""
    if (launcher := compiled()) is not None:
        kernels = DeviceKernels(launcher)
        monkeypatch.setattr(backends.Choice, "kernels_for", lambda choice, device: kernels)


@pytest.fixture
def small_grain() -> Iterator[None]:
    """Splits even small lists over several threads."""
    before = _C.set_grain(32 * 1024)
    yield
    _C.set_grain(before)


@pytest.fixture(params=_C.cpu_capabilities())
def capability(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that machine and binary share."""
    before = _C.cpu_capability()
    _C.set_cpu_capability(request.param)
    yield request.param
    _C.set_cpu_capability(before)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fills uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReferenceLauncher]:
    """Launcher of device kernels for CPU tensors."""
    launcher = ReferenceLauncher()
    kernels = DeviceKernels(launcher)
    monkeypatch.setattr(backends.Choice, "kernels_for", lambda choice, device: kernels)
    _C.clear_tables()
    yield launcher
    _C.clear_tables()
