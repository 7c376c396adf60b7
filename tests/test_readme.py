"""The README: code blocks run, and names and links exist."""

from __future__ import annotations

import multiprocessing
import os
import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_readme_has_code() -> None:
    assert len(BLOCKS) >= 3


def run(block: str, errors: str) -> None:
    """Runs a block in this process."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    warnings.simplefilter("error", FutureWarning)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_each_block_runs_by_itself(block: str, tmp_path: Path) -> None:
    """Runs in a process forked from one that has imported torch, which takes seconds."""
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["torch", "torch._dynamo", "ampfast"])
    errors = tmp_path / "errors"
    process = context.Process(target=run, args=(block, str(errors)))
    process.start()
    process.join(600)
    if process.exitcode != 0:
        process.kill()
        pytest.fail(f"exit code {process.exitcode}: {errors.read_text()}")


def test_the_make_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(
        re.findall(r"make ([a-z0-9-]*[a-z0-9])", README + (ROOT / "CONTRIBUTING.md").read_text())
    )
    assert named
    assert {name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)} == set()


def test_the_paths_exist() -> None:
    paths = re.findall(r"^\| (`[^|]+`) \|", README.split("## Develop")[1], re.MULTILINE)
    named = [path for cell in paths for path in re.findall(r"`([^`]+)`", cell)]
    assert len(named) >= 7
    assert [path for path in named if not (ROOT / path).exists()] == []
