"""Runs compiled PTX kernels on CPU tensors, without a GPU.

Path of a launch: `on_machine.py` declares the memory it may use and calls the launch of the
backend. For CUDA, `cuda_on_cpu.py` has nvcc compile the kernels, keeps the PTX, and links nvcc's
host code with `cuda_runtime.cpp`, whose `cudaLaunchKernel` calls back. For Triton,
`triton_on_cpu.py` stands in for the driver of its runtime. Both end in `run`: `assembler.py` turns
PTX into a listing, `listing.h` reads it, and `machine.cpp` runs it, over `memory.h` (where),
`races.h` (in which order) and `arithmetic.h` (what).

Not detected: reads of uninitialised registers or shared memory, a shared variable accessed beyond
its end in another one, a gradient read through another one of its list.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from assembler import Kernel
from torch import Tensor

__all__ = ["COMPILER", "PtxError", "Range", "Watch", "built", "run", "watch"]

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "ptx"
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-shared", "-fPIC")
# Programs of a launch that is checked for races.
MOST_WATCHED = 16


class PtxError(RuntimeError):
    """Illegal operation of a kernel."""


class Range(ctypes.Structure):
    """Memory that a launch may read, and perhaps write."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_int64),
        ("may_write", ctypes.c_int64),
    )

    @classmethod
    def of(cls, tensor: Tensor, *, may_write: bool) -> Range:
        return cls(tensor.data_ptr(), tensor.nbytes, may_write)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("programs", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("dynamic_shared_bytes", ctypes.c_int64),
        ("parameters", ctypes.c_char_p),
        ("parameter_bytes", ctypes.c_int64),
        ("ranges", ctypes.POINTER(Range)),
        ("range_count", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("watches_races", ctypes.c_int64),
        ("read", ctypes.c_int64),
        ("written", ctypes.c_int64),
    )


@dataclass
class Watch:
    """Checks of launches, and their record.

    Attributes:
        memory: Memory that launches may access.
        races: Whether unordered accesses are errors; only in grids of at most `MOST_WATCHED`
            programs, as every thread keeps a clock of every other.
        seed: Seed of the order in which threads run; each launch takes the next.
        launches: Names of the kernels.
        read: Bytes of global memory read.
        written: Bytes of global memory written.
    """

    memory: Sequence[Range] = ()
    races: bool = False
    seed: int = 0
    launches: list[str] = field(default_factory=list)
    read: int = 0
    written: int = 0


_OUTERMOST = Watch()
# Per thread: launches of another one use other memory.
_current = ContextVar("_current", default=_OUTERMOST)


@contextlib.contextmanager
def watch(**changes: Any) -> Iterator[Watch]:
    """Watches this thread's launches with changed settings; the outer watch counts them, too."""
    outside = _current.get()
    given = {"memory": outside.memory, "races": outside.races, "seed": outside.seed}
    inside = Watch(**{**given, **changes})
    token = _current.set(inside)
    try:
        yield inside
    finally:
        _current.reset(token)
        outside.seed = max(outside.seed, inside.seed)
        outside.launches += inside.launches
        outside.read += inside.read
        outside.written += inside.written


def built(name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """Returns the folder filled by `make`, rebuilt if a source has changed."""
    key = hashlib.sha256(repr(COMPILER).encode())
    for source in [Path(__file__), *sources]:
        key.update(source.read_bytes())
    folder = BUILD / f"{name}-{key.hexdigest()[:16]}"
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as unfinished:
            make(Path(unfinished) / "made")
            # Another process may have finished first.
            with contextlib.suppress(OSError):
                os.rename(Path(unfinished) / "made", folder)
    return folder


def run(
    kernel: Kernel, programs: int, threads: int, parameters: bytes, *, shared_bytes: int = 0
) -> None:
    """Runs a kernel to its end.

    Args:
        kernel: Assembled kernel.
        programs: Size of the grid.
        threads: Threads per program.
        parameters: Parameter block.
        shared_bytes: Dynamic shared memory per program.

    Raises:
        PtxError: On an illegal operation; the message names the instruction.
    """
    watched = _current.get()
    memory = (Range * len(watched.memory))(*watched.memory)
    launch = _Launch(
        *(programs, threads, shared_bytes, parameters, len(parameters)),
        *(memory, len(memory), watched.seed, watched.races and programs <= MOST_WATCHED, 0, 0),
    )
    watched.seed += 1
    watched.launches.append(kernel.name)
    library = _library()
    done = library.ptx_run(_loaded(kernel.listing), ctypes.byref(launch))
    watched.read += launch.read
    watched.written += launch.written
    if not done:
        raise PtxError(f"{kernel.name}: {library.ptx_error().decode()}")


@cache
def _library() -> ctypes.CDLL:
    arithmetic = [HERE / "../../csrc" / name for name in ("element.h", "cpu/half.h")]
    sources = sorted([*HERE.glob("*.h"), HERE / "machine.cpp", *arithmetic])

    def make(folder: Path) -> None:
        folder.mkdir()
        output = ["-o", str(folder / "machine.so"), str(HERE / "machine.cpp")]
        subprocess.run([*COMPILER, *FLAGS, *output], check=True)

    library = ctypes.CDLL(str(built("machine", sources, make) / "machine.so"))
    library.ptx_load.restype = ctypes.c_void_p
    library.ptx_error.restype = ctypes.c_char_p
    library.ptx_run.restype = ctypes.c_bool
    library.ptx_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library


@cache
def _loaded(listing: str) -> int:
    library = _library()
    kernel = library.ptx_load(listing.encode())
    if not kernel:
        raise PtxError(library.ptx_error().decode())
    return kernel
