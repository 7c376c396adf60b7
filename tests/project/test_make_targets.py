"""Commands of CONTRIBUTING.md, called as a person calls them, in a copy of the tree.

Each in its smallest dose, or up to its first result: `gpu` up to the search for a GPU; `docs`,
`wheels` and `smoke`, which install environments, up to the first download. Not covered are thus
the parts of `make gpu`, mkdocs, cores and wheels (`test_packaging.py` has stand-ins for them), and
parts of `hostile` besides threads (`tests/hostile/test_hostile.py` has small doses of them).
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
# An interpreter that makes an environment with itself, and only says what else it is to do.
STAND_IN = """#!/bin/sh
echo "$@"
[ "$2" != venv ] || { mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }
"""

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
def test_hostile(make: Make) -> None:
    code, lines = make("hostile", "ARGS=--parts threads --seconds 0.1")
    assert starting(lines, "threads  ok ").endswith(" rounds of threads, 0 failed")
    assert code == 0


@takes_seconds
def test_mutants(make: Make) -> None:
    code, lines = make(
        "mutants", "ARGS=ampfast/report.py --only __len__ --tests tests/test_report.py"
    )
    assert starting(lines, "1 changes, 1 noticed, 0 explained, 0 not explained")
    assert code == 0


@takes_seconds
def test_bench(make: Make, tree: Path) -> None:
    code, lines = make("bench", "ARGS=--quick --only host")
    assert starting(lines, "the report is ") == "the report is build/bench/report.html"
    rows = json.loads((tree / "build/bench/results.json").read_text())["rows"]
    assert {"torch", "ampfast"} <= {row["side"] for row in rows}
    assert code == 0


@takes_seconds
def test_coverage(make: Make) -> None:
    """Of one test of each of its two runs."""
    arguments = "ARGS=-n 0 tests/test_report.py"
    chosen = "-k 'test_log_of_other_types or test_narrow_needs_pairs'"
    code, lines = make("coverage", arguments, PYTEST_ADDOPTS=chosen)
    assert len([line for line in lines if "1 passed" in line]) == 2
    assert starting(lines, "ampfast/report.py ") and starting(lines, "TOTAL ")
    # By so few tests.
    assert starting(lines, "Coverage failure: total of ").endswith("fail-under=97")
    assert code != 0


def test_gpu(make: Make) -> None:
    code, lines = make("gpu")
    assert starting(lines, "this needs a GPU, and torch ").endswith(" sees none")
    assert code != 0


def test_docs(make: Make, tree: Path) -> None:
    stand_in = tree / "stand-in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    assert make("docs", "VENV=.venv", f"PYTHON={stand_in}", "ARGS=--clean") == (
        0,
        [
            "-m venv .venv-docs",
            "-m pip install -r requirements/docs.txt",
            "-m mkdocs build --strict --clean",
        ],
    )


@takes_seconds
def test_notebook(make: Make, tree: Path) -> None:
    """Of a single cell, whose output is saved."""
    nbformat = pytest.importorskip("nbformat", reason="reads and writes notebooks")
    pytest.importorskip("ipykernel", reason="runs notebooks")
    path = tree / "examples/underflow.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [nbformat.v4.new_code_cell("import ampfast; print(ampfast.__file__)")]
    nbformat.write(notebook, path)
    code, _ = make("notebook")
    assert code == 0
    [cell] = nbformat.read(path, as_version=4).cells
    assert cell.outputs[0].text == f"{tree / 'ampfast/__init__.py'}\n"


@takes_seconds
@pytest.mark.parametrize("target", ["wheels", "smoke"])
def test_wheels_and_smoke(make: Make, tree: Path, target: str) -> None:
    if target == "smoke":
        _, lines = make("smoke")
        assert starting(lines, "dist/ has no wheel for this Python")
        python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        (tree / "dist").mkdir()
        (tree / f"dist/ampfast-0-{python}-{python}-any.whl").touch()
    code, lines = make(target, "TORCHES=2.13.0")
    assert [line for line in lines if "No matching distribution found for" in line]
    assert " -m pip install " in starting(lines, "failed: ")
    assert code != 0
