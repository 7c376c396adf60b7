"""The figures of launches are of the present code: those of code that is gone are an error."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampfast import GradScaler
from benchmarks import launches

ROOT = Path(__file__).parents[2]
PAGE = "docs/contributing/benchmarks_full.md"
# Of kernels on a GPU alone, which the test's calls on a CPU do not enter.
OF_GPUS = ("backends/gpu.py", "backends/cuda.py", "backends/triton/launch.py")


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def measured_sources() -> list[str]:
    """Files that run while launches are measured."""
    entered: set[str] = set()

    def profile(frame: Any, event: str, _: object) -> None:
        entered.add(frame.f_code.co_filename)

    for path in launches.CALLS:
        call = launches.call_of(path, GradScaler, 10)
        call()
        sys.setprofile(profile)
        call()
        sys.setprofile(None)
    folder = ROOT / "ampfast"
    files = {Path(name) for name in entered if name.startswith(f"{folder}/")}
    assert {folder / "scaler" / "grad_scaler.py", folder / "scaler" / "passes.py"} <= files
    files |= {folder / name for name in OF_GPUS}
    files |= {path for path in (ROOT / "csrc").iterdir() if path.suffix in (".cpp", ".h")}
    return sorted(str(path.relative_to(ROOT)) for path in files)


def code_of(path: str, text: str) -> str:
    """What of a file runs: neither comments nor docstrings."""
    if not path.endswith(".py"):
        return " ".join(re.sub("//.*", "", text).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        has_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if has_docstring and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def test_launches_were_measured_with_the_present_code() -> None:
    [commit] = re.findall(r"commit (\w+), nothing else running:", (ROOT / PAGE).read_text())
    if git("cat-file", "-e", f"{commit}^{{commit}}") is None:
        pytest.skip(f"the repository lacks {commit}, with which launches were measured")
    changed = [
        path
        for path in measured_sources()
        if code_of(path, git("show", f"{commit}:{path}") or "")
        != code_of(path, (ROOT / path).read_text())
    ]
    assert changed == [], f"measure `python -m benchmarks.launches` again, for {PAGE}"
