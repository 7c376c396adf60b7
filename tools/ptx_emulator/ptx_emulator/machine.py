"""Launches of kernels, run by `src/machine.cpp`."""

from __future__ import annotations

import contextlib
import ctypes
import math
import subprocess
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .assembler import Kernel, UnsupportedPtxError, is_buffer
from .cache import COMPILER, SOURCES, built
from .memory import Range, merged

__all__ = ["RACE_CHECK_LIMIT", "Emulation", "PtxError", "emulation", "launch"]

FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-shared", "-fPIC")
RACE_CHECK_LIMIT = 16
MOST_THREADS = 1024


class PtxError(RuntimeError):
    """Illegal operation of a kernel, such as an access to memory that it was not given."""


@dataclass
class Emulation:
    """Settings of launches, and their record.

    Attributes:
        memory: Memory that launches may access; None for all of the buffers among their arguments.
        races: Whether unordered accesses are errors. Grids of more than `RACE_CHECK_LIMIT` programs
            are not checked, as every thread keeps a clock of every other.
        seed: Seed of the order in which threads run; each launch takes the next.
        launches: Names of the kernels launched.
        unchecked: Names of those whose grids were too large for `races`.
        read: Bytes of global memory read.
        written: Bytes of global memory written.
    """

    memory: Sequence[Range] | None = None
    races: bool = False
    seed: int = 0
    launches: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    read: int = 0
    written: int = 0


_OUTERMOST = Emulation()
# Per thread: launches of another one use other memory.
_current = ContextVar("_current", default=_OUTERMOST)


@contextlib.contextmanager
def emulation(**changes: Any) -> Iterator[Emulation]:
    """Changes settings of this thread's launches in a `with` block, and records them.

    Args:
        **changes: `memory`, `races` and `seed` of `Emulation`; others stay as they are outside.

    Yields:
        The settings and the record. The record outside includes these launches, too.

    Raises:
        TypeError: If there is no such setting.
    """
    outside = _current.get()
    settings = {"memory": outside.memory, "races": outside.races, "seed": outside.seed}
    if unknown := changes.keys() - settings.keys():
        raise TypeError(f"no setting {min(unknown)!r}: there are {', '.join(settings)}")
    inside = Emulation(**{**settings, **changes})
    token = _current.set(inside)
    try:
        yield inside
    finally:
        _current.reset(token)
        outside.seed = max(outside.seed, inside.seed)
        outside.launches += inside.launches
        outside.unchecked += inside.unchecked
        outside.read += inside.read
        outside.written += inside.written


Sizes = ctypes.c_int64 * 3


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", Sizes),
        ("block", Sizes),
        ("dynamic_shared_bytes", ctypes.c_int64),
        ("parameters", ctypes.c_char_p),
        ("parameter_bytes", ctypes.c_int64),
        ("ranges", ctypes.POINTER(Range)),
        ("range_count", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("checks_races", ctypes.c_int64),
        ("read", ctypes.c_int64),
        ("written", ctypes.c_int64),
    )


def launch(
    kernel: Kernel,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *arguments: Any,
    shared_bytes: int = 0,
) -> None:
    """Runs a kernel to its end.

    Args:
        kernel: Kernel of `load`.
        grid: Programs (thread blocks), along up to three axes.
        block: Threads per program, along up to three axes.
        *arguments: One for each parameter: a CPU tensor or another writable buffer for a pointer,
            an int, a float, or the bytes of a structure.
        shared_bytes: Dynamic shared memory per program.

    Raises:
        PtxError: On an illegal operation; the message names instruction, thread and program.
        UnsupportedPtxError: On an instruction that cannot be emulated for its types.
        TypeError: If an argument does not fit its parameter, or their numbers differ.
        ValueError: If a size of the launch is impossible.
    """
    programs, threads = _sizes("grid", grid), _sizes("block", block)
    if math.prod(threads) > MOST_THREADS:
        raise ValueError(f"at most {MOST_THREADS} threads per program, got {math.prod(threads)}")
    if shared_bytes < 0:
        raise ValueError(f"shared_bytes must not be negative, got {shared_bytes}")
    parameters = kernel.pack(arguments)
    settings = _current.get()
    memory = settings.memory
    if memory is None:
        memory = [Range.of(argument) for argument in arguments if is_buffer(argument)]
    memory = merged(memory)
    is_checkable = math.prod(programs) <= RACE_CHECK_LIMIT
    request = _Launch(
        *(Sizes(*programs), Sizes(*threads), shared_bytes, parameters, len(parameters)),
        *((Range * len(memory))(*memory), len(memory), settings.seed),
        settings.races and is_checkable,
    )
    settings.seed += 1
    settings.launches.append(kernel.name)
    if settings.races and not is_checkable:
        settings.unchecked.append(kernel.name)
    library = _library()
    error = library.ptx_run(_loaded(kernel.listing), ctypes.byref(request))
    settings.read += request.read
    settings.written += request.written
    _raise(error, f"{kernel.name}: ")


def _sizes(name: str, given: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (given,) if isinstance(given, int) else tuple(given)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{name} must be one to three positive sizes, got {given!r}")
    return sizes + (1,) * (3 - len(sizes))


def _raise(error: int, prefix: str = "") -> None:
    """Raises the library's last error; 0 is none."""
    if error:
        kind = PtxError if error == 1 else UnsupportedPtxError
        raise kind(prefix + _library().ptx_error().decode())


@cache
def _library() -> ctypes.CDLL:
    def make(folder: Path) -> None:
        output = ["-o", str(folder / "machine.so"), str(SOURCES / "machine.cpp")]
        try:
            subprocess.run([*COMPILER, *FLAGS, *output], check=True)
        except FileNotFoundError:
            raise PtxError(
                f"the emulator needs a C++ compiler, but there is no {COMPILER[0]}: set CXX"
            ) from None

    sources = [*sorted(SOURCES.glob("*.h")), SOURCES / "machine.cpp"]
    library = ctypes.CDLL(str(built("machine", sources, FLAGS, make) / "machine.so"))
    library.ptx_error.restype = ctypes.c_char_p
    library.ptx_load.argtypes = (ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
    library.ptx_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library


@cache
def _loaded(listing: str) -> ctypes.c_void_p:
    kernel = ctypes.c_void_p()
    _raise(_library().ptx_load(listing.encode(), ctypes.byref(kernel)))
    return kernel
