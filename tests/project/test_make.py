"""Commands of the Makefile."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
@pytest.mark.parametrize(
    ("target", "runs"), [("quick", 1), ("test", 1), ("test-sweeps", 2), ("coverage", 1)]
)
def test_tests_run_in_parallel(target: str, runs: int) -> None:
    command = ["make", "--dry-run", "VENV=", f"PYTHON={sys.executable}", target]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tests = [line for line in shown.splitlines() if "pytest" in line and "-n auto" in line]
    assert len(tests) == runs
    assert all("--dist loadgroup" in line for line in tests)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="not in a worker")
def test_tests_of_a_file_share_a_worker(request: pytest.FixtureRequest) -> None:
    """Else each worker would make the fixtures of its modules."""
    # pytest-xdist schedules by what it appends to ids.
    assert request.node.nodeid.endswith(f"@{request.node.path}")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("is_installed", [False, True])
def test_the_demo_builds_nothing_where_ampfast_is_installed(
    tmp_path: Path, is_installed: bool
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$2" in "import ampfast,"*) exit {int(not is_installed)};; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    command = ["make", "--dry-run", f"PYTHON={python}", "demo"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ("setup.py" in shown) is not is_installed
    assert (f"{python} examples/demo.py" in shown) is is_installed
