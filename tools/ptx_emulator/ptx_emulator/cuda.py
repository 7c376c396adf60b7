"""CUDA files compiled by nvcc, whose launches run on the CPU.

The host code is nvcc's: its launch stubs call `src/cuda_runtime.cpp` in place of CUDA's runtime.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from .assembler import Kernel, load
from .cache import COMPILER, SOURCES, built
from .machine import launch

__all__ = ["Library", "build"]

Pointers = ctypes.POINTER(ctypes.c_void_p)
# Returns the address of an error's text, or null.
Launcher = ctypes.CFUNCTYPE(
    *(ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_size_t, Pointers)
)


@dataclass(frozen=True)
class Library:
    """Shared library of compiled CUDA code.

    Attributes:
        path: Shared library.
        architectures: Compute capabilities that it has PTX for, such as "90".
    """

    path: Path
    architectures: tuple[str, ...]

    def load(self, architecture: str | None = None, *, runs: bool = True) -> ctypes.CDLL:
        """Loads the library; its launches run the PTX of one architecture.

        Host code sees failed launches as `cudaErrorLaunchFailure`, with the emulator's message in
        `cudaGetErrorString`. Memory is that of `emulation(memory=...)`, as launches pass addresses.

        Args:
            architecture: One of `architectures`; the first by default.
            runs: If False, launches return at once, for the time that they take.

        Returns:
            The library, for calls of its `extern "C"` functions.

        Raises:
            ValueError: If there is no PTX for this architecture.
            UnsupportedPtxError: If the PTX has an unsupported instruction.
        """
        chosen = self.architectures[0] if architecture is None else architecture
        if chosen not in self.architectures:
            known = " or ".join(self.architectures)
            raise ValueError(f"the library has PTX for {known}, not for {chosen}")
        library = ctypes.CDLL(str(self.path))
        if runs:
            pattern = "*" if len(self.architectures) == 1 else f"*compute_{chosen}"
            library.ptx_emulator_set_launcher(_launcher(self.path.parent, pattern))
        return library


def build(
    sources: Sequence[str | os.PathLike[str]],
    *,
    architectures: Sequence[str] = ("90",),
    flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    headers: Sequence[str | os.PathLike[str]] = (),
) -> Library:
    """Compiles CUDA and C++ files into a shared library, without CUDA's runtime.

    The result is cached by the contents of sources and headers, the flags and nvcc's version.

    Args:
        sources: Files for nvcc, which takes C++, too.
        architectures: Compute capabilities to compile for, such as "75".
        flags: nvcc's flags for all of them; --fmad=false makes results reproducible.
        link_flags: C++ compiler's flags to link with.
        headers: Files that the sources include, whose change requires another build.

    Raises:
        FileNotFoundError: If nvcc is not on the PATH.
        subprocess.CalledProcessError: If a compiler fails; it has written why to stderr.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise FileNotFoundError("nvcc is not on the PATH")
    files = [Path(source) for source in sources]
    runtime = SOURCES / "cuda_runtime.cpp"

    def make(folder: Path) -> None:
        targets = [f"-gencode=arch=compute_{a},code=compute_{a}" for a in architectures]
        common = [nvcc, *flags, "-Xcompiler", "-fPIC", "-c"]
        commands = [[nvcc, "-std=c++17", "-Xcompiler", "-fPIC", "-c", str(runtime)]]
        for file in files:
            keep = [*targets, "--keep", "--keep-dir", str(folder)] if file.suffix == ".cu" else []
            commands.append([*common, *keep, str(file)])
        objects = [str(folder / f"{number}.o") for number in range(len(commands))]
        commands = [[*c, "-o", o] for c, o in zip(commands, objects, strict=True)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(partial(subprocess.run, check=True), commands))
        linking = ["-shared", "-Wl,--gc-sections", "-o", str(folder / "library.so")]
        subprocess.run([*COMPILER, *linking, *objects, *link_flags], check=True)

    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    settings = (tuple(architectures), tuple(flags), tuple(link_flags), version.stdout)
    depends = [Path(__file__), runtime, *files, *map(Path, headers)]
    folder = built(files[0].stem, depends, settings, make)
    return Library(folder / "library.so", tuple(architectures))


@cache  # which keeps it alive
def _launcher(folder: Path, pattern: str) -> Any:
    kernels: dict[str, Kernel] = {}
    for ptx in sorted(folder.glob(f"{pattern}.ptx")):
        kernels.update(load(ptx.read_text()))
    return Launcher(partial(_launch, kernels))


_last_error = ctypes.create_string_buffer(b"")


def _launch(
    kernels: dict[str, Kernel], name: bytes, sizes: Any, shared_bytes: int, arguments: Any
) -> int | None:
    global _last_error
    try:
        kernel = kernels[name.decode()]
        # `arguments` points to as many addresses as there are parameters.
        given = zip(kernel.parameters, arguments, strict=False)
        packed = [ctypes.string_at(address, parameter.bytes) for parameter, address in given]
        launch(kernel, sizes[:3], sizes[3:6], *packed, shared_bytes=shared_bytes)
    except Exception as error:  # exceptions of a callback would be lost
        _last_error = ctypes.create_string_buffer(str(error).encode())
        return ctypes.addressof(_last_error)
    return None
