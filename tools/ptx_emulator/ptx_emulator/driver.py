"""CUDA's driver for host code without a GPU: its launches run on the CPU, or do nothing.

Code that looks for `libcuda.so.1` at run time finds `src/driver.cpp` once `stand_in` has loaded it.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from .assembler import Kernel, load
from .cache import COMPILER, SOURCES, built
from .machine import launch

__all__ = ["Driver", "Launched", "activate", "path", "stand_in"]

Pointers = ctypes.POINTER(ctypes.c_void_p)
# Returns the address of an error's text, or null.
Launcher = ctypes.CFUNCTYPE(
    *(ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_size_t, Pointers),
    ctypes.c_void_p,
)


@dataclass(frozen=True)
class Launched:
    """One launch.

    Attributes:
        kernel: Name.
        grid: Programs along each axis.
        block: Threads of a program along each axis.
        stream: Address of the stream; None for the first.
        arguments: Bytes of each argument, of a kernel that was added.
    """

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    stream: int | None
    arguments: tuple[bytes, ...]


class Driver:
    """The stand-in in this process.

    Args:
        library: The shared library, loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.ptx_emulator_calls.restype = ctypes.c_int64
        self._launcher: Any = None
        self._sizes: dict[str, tuple[int, ...]] = {}

    def calls(self, function: str) -> int:
        """Returns how often a function of the driver was called, such as "cuLaunchKernel"."""
        return int(self._library.ptx_emulator_calls(function.encode()))

    def fail(self, function: str, result: int) -> None:
        """Makes the next call of a function fail with this CUresult."""
        self._library.ptx_emulator_fail(function.encode(), result)

    def add_kernel(self, name: str, *sizes: int) -> None:
        """Adds a kernel by the bytes of its parameters; from then on others are not found."""
        self._sizes[name] = sizes
        self._library.ptx_emulator_add_kernel(name.encode())

    def launch_by(self, launcher: Any) -> None:
        """Hands launches to a function with the arguments of `Launcher`; None: to nothing."""
        self._launcher = launcher  # which keeps it alive
        self._library.ptx_emulator_set_launcher(launcher)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Launched]]:
        """Records launches, which run as outside, in a `with` block."""
        record: list[Launched] = []
        outside = self._launcher

        def note(name: bytes, sizes: Any, shared: int, arguments: Any, stream: int | None) -> Any:
            given = zip(self._sizes.get(name.decode(), ()), arguments, strict=False)
            packed = tuple(ctypes.string_at(address, size) for size, address in given)
            grid, block = tuple(sizes[:3]), tuple(sizes[3:6])
            record.append(Launched(name.decode(), grid, block, stream, packed))
            return outside(name, sizes, shared, arguments, stream) if outside else None

        self.launch_by(Launcher(note))
        try:
            yield record
        finally:
            self.launch_by(outside)


def path() -> Path:
    """Returns the shared library, which is compiled where it is not there."""
    source = SOURCES / "driver.cpp"
    flags = ["-std=c++17", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]

    def make(folder: Path) -> None:
        output = ["-o", str(folder / "libcuda.so.1"), str(source)]
        subprocess.run([*COMPILER, *flags, *output], check=True)

    return built("driver", [source], flags, make) / "libcuda.so.1"


@cache
def stand_in() -> Driver:
    """Returns the stand-in, which is this process's driver from then on; its launches do nothing.

    The process must not have loaded another driver.
    """
    return Driver(ctypes.CDLL(str(path()), mode=ctypes.RTLD_GLOBAL))


def activate(ptx: str) -> Driver:
    """Makes launches of the kernels in `ptx` run on the CPU, for the rest of the process.

    Host code sees failed launches as CUDA_ERROR_LAUNCH_FAILED, with the emulator's message in
    `cuGetErrorString`. Memory is that of `emulation(memory=...)`, as launches pass addresses.

    Raises:
        UnsupportedPtxError: If the PTX has an unsupported instruction.
    """
    kernels, driver = load(ptx), stand_in()
    for name, kernel in kernels.items():
        driver.add_kernel(name, *(parameter.bytes for parameter in kernel.parameters))
    driver.launch_by(Launcher(partial(_launch, kernels)))
    return driver


_last_error = ctypes.create_string_buffer(b"")


def _launch(
    kernels: dict[str, Kernel],
    name: bytes,
    sizes: Any,
    shared_bytes: int,
    arguments: Any,
    stream: int | None,
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
