"""The Triton kernels in Triton's interpreter, which needs a process of its own, and the scaler over
them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# What the scaler does with its kernels; the rest of its tests would see no difference.
OVER_THEM = ("contract", "differences", "differences_fused", "differences_sgd", "state")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run(*arguments: str, **environment: str) -> None:
    """Runs pytest with kernels interpreted, and fails with what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernels_interpreted() -> None:
    run(str(TESTS / "triton_kernels"))


@pytest.mark.parametrize("subject", OVER_THEM)
def test_the_scaler_over_interpreted_kernels(subject: str) -> None:
    run(str(TESTS / f"test_{subject}.py"), AMPFAST_BACKEND="triton")
