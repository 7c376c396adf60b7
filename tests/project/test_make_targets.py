"""Commands of CONTRIBUTING.md, called as a person calls them, in a copy of the tree.

Each in its smallest dose, `gpu` up to the search for a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

ROOT = Path(__file__).resolve().parents[2]

Make = Callable[..., tuple[int, list[str]]]


def takes_seconds(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.sweep(pytest.mark.slow(test))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the tree with its extension, which `make` finds up to date if it is so here."""
    tree = tmp_path_factory.mktemp("make") / "tree"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    (tree / "build").mkdir()
    for name in ("key", "built"):
        if (ROOT / "build" / name).exists():
            shutil.copy2(ROOT / "build" / name, tree / "build")
    return tree


@pytest.fixture
def make(tree: Path) -> Make:
    """Runs a command with this interpreter unchanged; returns its exit status and lines."""

    def run(target: str, *variables: str, **environment: str) -> tuple[int, list[str]]:
        # Without those of the commands that run this test.
        outer = ("COVERAGE", "MAKE", "MFLAGS", "OUT", "PYTEST")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
        # No GPU, no download, and no threads that wait for each other on a busy machine.
        kept |= {"CUDA_VISIBLE_DEVICES": "", "PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"}
        kept |= environment
        defaults = ("VENV=", f"PYTHON={sys.executable}", "ARGS=", "TORCHES=")
        command = ["make", "--silent", target, *defaults, *variables]
        done = subprocess.run(
            command,
            cwd=tree,
            env=kept,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(done.stdout)
        return done.returncode, done.stdout.splitlines()

    return run


def starting(lines: list[str], start: str) -> str:
    """The only line that starts so."""
    [found] = [line for line in lines if line.startswith(start)]
    return found


@takes_seconds
def test_bench(make: Make, tree: Path) -> None:
    code, lines = make("bench", "ARGS=--quick --only host")
    assert starting(lines, "the report is ") == "the report is build/bench/report.html"
    rows = json.loads((tree / "build/bench/results.json").read_text())["rows"]
    assert {"torch", "ampfast"} <= {row["side"] for row in rows}
    assert code == 0


def test_gpu(make: Make) -> None:
    code, lines = make("gpu")
    assert starting(lines, "this needs a GPU, and torch ").endswith(" sees none")
    assert code != 0
