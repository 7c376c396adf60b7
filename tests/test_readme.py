"""The README's code runs, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_readme_has_code() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_each_block_runs_by_itself(block: str) -> None:
    command = [sys.executable, "-W", "error::FutureWarning", "-c", block]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


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
