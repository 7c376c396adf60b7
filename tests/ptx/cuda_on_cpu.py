"""CUDA kernels compiled by nvcc and run on the CPU, launched by their host code for a GPU."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import machine
import torch
from assembler import Kernel, kernels_of
from nvcc import FLAGS, NVCC, SETUP
from torch.utils.cpp_extension import include_paths

__all__ = ["ARCHITECTURES", "install"]

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "csrc" / "cuda" / "multi_tensor.cu"
HOST = (
    ROOT / "csrc" / "cuda" / "bindings.cpp",
    ROOT / "csrc" / "gradients.cpp",
    Path(__file__).with_name("cuda_runtime.cpp"),
)
# The oldest architecture converts bfloat16 in software.
ARCHITECTURES = ("75", "90")
NAME = "ampfast_cuda_on_cpu"
HOST_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden"]

# Returns the address of a text, or null.
_LAUNCHER = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    *(ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)),
)


def install(core: ModuleType, architecture: str) -> None:
    """Gives the compiled core CUDA kernels, which it was built without.

    Args:
        core: `ampfast._C`.
        architecture: Target of the code, of `ARCHITECTURES`.
    """
    folder = _built()
    ptx = next(folder.glob(f"*compute_{architecture}.ptx")).read_text()
    module = _loaded(folder)
    launcher = _LAUNCHER(partial(_launch, kernels_of(ptx)))
    module.set_launcher(ctypes.cast(launcher, ctypes.c_void_p).value)
    module.launcher = launcher  # lives as long as its caller
    core.WITH_CUDA = True
    for name in dir(module):
        if name.startswith("cuda_"):
            setattr(core, name, getattr(module, name))


_last_error = ctypes.create_string_buffer(b"")


def _launch(
    kernels: dict[str, Kernel], name: bytes, programs: int, threads: int, arguments: object
) -> int | None:
    global _last_error
    kernel = kernels[name.decode()]
    given = zip(kernel.parameters, arguments, strict=False)  # a pointer to memory of unknown size
    packed = kernel.packed([ctypes.string_at(argument, size) for (_, size), argument in given])
    try:
        machine.run(kernel, programs, threads, packed)
    except Exception as error:  # exceptions of a callback would be lost
        _last_error = ctypes.create_string_buffer(str(error).encode())
        return ctypes.addressof(_last_error)
    return None


@cache
def _loaded(folder: Path) -> ModuleType:
    path = str(folder / f"{NAME}.so")
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, loader))
    loader.exec_module(module)
    return module


def _built() -> Path:
    folders = (ROOT / "csrc", ROOT / "csrc" / "cuda", Path(__file__).parent / "include/c10/cuda")
    headers = [h for folder in folders for h in sorted(folder.glob("*.*h"))]
    nvcc = subprocess.run([str(NVCC), "--version"], capture_output=True, text=True, check=True)
    versions = f"{torch.__version__}-{sys.implementation.cache_tag}-{nvcc.stdout.split()[-1]}"
    versions = re.sub(r"[^\w.+-]", "-", versions)
    how = [Path(__file__), ROOT / "setup.py", ROOT / "tests" / "nvcc.py"]
    return machine.built(f"cuda-{versions}", [*how, KERNELS, *HOST, *headers], _make)


def _make(folder: Path) -> None:
    folder.mkdir()
    here = Path(__file__).parent
    torch_libraries = Path(torch.__file__).parent / "lib"
    include = [f"-I{here / 'include'}"]
    include += [f"-isystem{path}" for path in [*include_paths(), *_paths_of_headers()]]
    flags = [*HOST_FLAGS, *include, f"-DTORCH_EXTENSION_NAME={NAME}"]
    commands = [
        [*machine.COMPILER, *flags, "-c", "-o", str(folder / f"{source.stem}.o"), str(source)]
        for source in HOST
    ]
    targets = [f"-gencode=arch=compute_{a},code=compute_{a}" for a in ARCHITECTURES]
    output = ["-Xcompiler", "-fPIC", "-c", "-o", str(folder / "multi_tensor.o")]
    keep = ["--keep", "--keep-dir", str(folder)]
    commands.append([str(NVCC), *FLAGS, *targets, *keep, *output, str(KERNELS)])
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(subprocess.run, check=True), commands))
    objects = [str(path) for path in folder.glob("*.o")]
    libraries = [f"-L{torch_libraries}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    shared = ["-shared", "-Wl,--gc-sections", "-o", str(folder / f"{NAME}.so")]
    subprocess.run([*machine.COMPILER, *shared, *objects, *libraries], check=True)


def _paths_of_headers() -> list[str]:
    """Include paths of Python and of nvcc's toolkit."""
    toolkit = Path(SETUP.find_nvcc()).parents[1]
    return [sysconfig.get_path("include"), str(toolkit / "include")]
