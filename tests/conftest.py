"""Fixtures and hooks of the whole test session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.kernels import CAPABILITIES
from support.launchers import VARIABLE, ReferenceLauncher, compiled, patch_once_a_launch, serve_by

import ampfast
from ampfast import _C
from ampfast.backends.gpu import DeviceKernels
from ampfast.cli import info

# Cases that torch may still get wrong, by difference.
_verdicts: dict[str, list[bool]] = {}

if os.environ.get("TRITON_INTERPRET") == "1":
    patch_once_a_launch()


def pytest_report_header() -> str:
    """Versions, for a log that can be read on its own."""
    version = getattr(ampfast, "__version__", "unknown")
    parts = [f"ampfast {version}", f"torch {torch.__version__}"]
    parts += [f"Triton {info._triton_version()}", f"{torch.get_num_threads()} threads"]
    if kernels := os.environ.get(VARIABLE):
        parts.append(f"kernels {kernels}")
    return ", ".join(parts)


def pytest_configure() -> None:
    """Shares the cores among parallel workers; fails early if the requested kernels are missing."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(torch.get_num_threads() // workers, 1))
    compiled()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Writes a line for each tested difference from torch."""
    if _verdicts:
        terminalreporter.section(f"differences from torch {torch.__version__}")
    for what, cases in _verdicts.items():
        state = "still fails" if any(cases) else "no longer fails"
        terminalreporter.line(f"torch {state}: {what} ({sum(cases)} of {len(cases)} cases)")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups tests for parallel workers: a slow one alone and first, others by file."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        alone = item.get_closest_marker("slow") is not None
        item.add_marker(pytest.mark.xdist_group(item.nodeid if alone else str(item.path)))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Seeds every test equally."""
    torch.manual_seed(20240607)


@pytest.fixture(autouse=True)
def _compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives CPU tensors the kernels of `AMPFAST_TEST_KERNELS`."""
    if (launcher := compiled()) is not None:
        serve_by(DeviceKernels(launcher), monkeypatch)


@pytest.fixture
def few_chunks() -> Iterator[None]:
    """Chunks of several windows also in short lists, of kernels of devices."""
    _C.set_chunks(2)
    yield
    _C.set_chunks(_C.ENOUGH_CHUNKS)


@pytest.fixture(params=CAPABILITIES)
def capability(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that machine and binary share."""
    _C.use_baseline(request.param == "baseline")
    yield request.param
    _C.use_baseline(False)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fills uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Process group of gloo with this process alone."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReferenceLauncher]:
    """Launcher of device kernels for CPU tensors."""
    launcher = ReferenceLauncher()
    serve_by(DeviceKernels(launcher), monkeypatch)
    _C.clear_tables()
    yield launcher
    _C.clear_tables()


@pytest.fixture
def torch_fails(record_property: Callable[[str, object], None]) -> Callable[[str, bool], None]:
    """Records whether torch still gets a case wrong; a fix in torch is no failure here."""

    def note(what: str, fails: bool) -> None:
        record_property(f"torch still fails: {what}", fails)
        _verdicts.setdefault(what, []).append(fails)

    return note
