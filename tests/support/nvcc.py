"""Build of the extension, and the CUDA compiler with its flags."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

NVCC = shutil.which("nvcc")


def _setup() -> ModuleType:
    """Imports setup.py, which then builds nothing."""
    path = Path(__file__).parents[2] / "setup.py"
    spec = importlib.util.spec_from_file_location("ampfast_setup", path)
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return setup


SETUP = _setup()
FLAGS = SETUP.nvcc_flags()
