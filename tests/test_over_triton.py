"""The Triton kernels in Triton's interpreter, which needs a process of its own, and the scaler over
them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from beside import Process

TESTS = Path(__file__).parent
# What the scaler does with its kernels; the rest of its tests would see no difference.
OVER_THEM = ("contract", "differences", "differences_fused", "differences_sgd", "state")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Those of the kernels, which take longest: beside all the others."""
    log = tmp_path_factory.mktemp("kernels") / "log"
    process = Process(log, str(TESTS / "triton_kernels"), beside=True)
    yield process
    process.end()


@pytest.mark.first
@pytest.mark.parametrize("subject", OVER_THEM)
def test_the_scaler_over_interpreted_kernels(
    kernels: Process, subject: str, tmp_path: Path
) -> None:
    Process(tmp_path / "log", str(TESTS / f"test_{subject}.py"), AMPFAST_BACKEND="triton").check()


@pytest.mark.last
def test_the_kernels_interpreted(kernels: Process) -> None:
    kernels.check()
