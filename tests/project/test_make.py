"""Commands of the Makefile."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
@pytest.mark.parametrize("target", ["quick", "test", "test-sweeps", "coverage"])
def test_tests_run_in_parallel(target: str) -> None:
    command = ["make", "--dry-run", "VENV=", f"PYTHON={sys.executable}", target]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [tests] = [line for line in shown.splitlines() if "pytest" in line and "-n auto" in line]
    assert "--dist loadgroup" in tests
