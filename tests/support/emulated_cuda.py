"""CUDA kernels compiled by nvcc for the PTX emulator, launched by their host code for a GPU."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from ptx_emulator import cuda
from torch.utils.cpp_extension import include_paths

from support.nvcc import FLAGS

__all__ = ["ARCHITECTURES", "install"]

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
# The oldest architecture converts bfloat16 in software.
ARCHITECTURES = ("75", "90")
NAME = "ampfast_emulated_cuda"


def install(core: ModuleType, architecture: str, *, runs: bool = True) -> None:
    """Gives the compiled core CUDA kernels, which it was built without.

    Args:
        core: `ampfast._C`.
        architecture: Target of the code, of `ARCHITECTURES`.
        runs: Whether launches run, else they return at once.
    """
    library = _built()
    library.load(architecture, runs=runs)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library.path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, loader))
    loader.exec_module(module)
    core.WITH_CUDA = True
    for name in dir(module):
        if name.startswith("cuda_"):
            setattr(core, name, getattr(module, name))


def _built() -> cuda.Library:
    include = HERE / "include"  # torch's headers of CUDA need its CUDA build
    system = [*include_paths(), sysconfig.get_path("include")]
    flags = [*FLAGS, f"-I{include}", *(f"-isystem={path}" for path in system)]
    flags += [f"-DTORCH_EXTENSION_NAME={NAME}", "-Xcompiler=-O1,-fvisibility=hidden"]
    libraries = ["c10", "torch", "torch_cpu", "torch_python"]
    return cuda.build(
        [
            *(CSRC / "cuda" / name for name in ("multi_tensor.cu", "bindings.cpp")),
            *(CSRC / name for name in ("arguments.cpp", "gradients.cpp", "master_weights.cpp")),
            HERE / "emulated_cuda.cpp",
        ],
        architectures=ARCHITECTURES,
        flags=flags,
        link_flags=[f"-L{Path(torch.__file__).parent / 'lib'}", *(f"-l{n}" for n in libraries)],
        headers=sorted(
            header for folder in (CSRC, CSRC / "cuda", include) for header in folder.rglob("*.*h")
        ),
    )
