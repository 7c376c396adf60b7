"""Programs in a process of their own, modules by path, threads of torch, living processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).parents[2]


def python_in(
    folder: Path, program: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs this Python in a folder that has the given program as train.py."""
    (folder / "train.py").write_text(program)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python in the repository."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def module_at(path: Path) -> ModuleType:
    """Imports a file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs a block with this many torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_alive(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
