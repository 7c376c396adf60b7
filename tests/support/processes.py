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
    return python(*arguments, folder=folder, **environment)


def python(
    *arguments: object, folder: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs this Python, in the repository by default."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


_FORKS = """
import os, sys, traceback
exec(sys.argv[1])
for program in sys.argv[2:]:
    print("\\0", end="", flush=True)
    if (child := os.fork()) == 0:
        try:
            exec(program)
        except Exception:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


def forked(before: str, *programs: str, **environment: str) -> list[str]:
    """What each program prints, in a fork of one Python of the repository that has run `before`."""
    done = python("-c", _FORKS, before, *programs, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[1:]


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
