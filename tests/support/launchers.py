"""Launchers for CPU tensors: torch's ops, which count launches and bytes, and compiled kernels.

`AMPFAST_TEST_KERNELS` selects a backend compiled for an architecture, such as "cuda-sm_90" or
"triton-sm_90", run by tools/ptx_emulator; with the suffix "-races", data races are errors.
"cuda-host" is the CUDA kernels as C++ for this machine, "cuda-host-address" and "cuda-host-thread"
with a sanitizer. The default is Triton's interpreter, if TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ampfast import _C, backends
from ampfast.backends import aten, core, cpu
from ampfast.backends.core import Clip, DeviceTable, Factor, Pass, Segment, Update
from support.comparison import replaced

_INFINITE = 0x7FF0000000000000


def serve_by(kernels: Any, monkeypatch: Any) -> None:
    """Gives every device these kernels."""
    monkeypatch.setattr(backends.Choice, "kernels_for", lambda choice, device: kernels)
    monkeypatch.setattr(backends.Choice, "finder", property(core.Finder))  # which keeps kernels


@dataclass
class ReferenceLauncher:
    """Counts launches, and bytes of gradients read and written."""

    launches: list[str] = field(default_factory=list)
    read: int = 0
    written: int = 0
    capturing: bool = False
    _squares: float = 0.0

    def is_capturing(self) -> bool:
        return self.capturing

    def multi_tensor(self, work: Pass, table: DeviceTable, segment: Segment, is_last: bool) -> None:
        self.launches.append("unscale" if work.write else "check")
        header = table.header
        used_peak = torch.tensor(0.0, dtype=torch.float64)
        factor = torch.tensor(1.0) if work.factor is None else work.factor.reshape(())
        if work.how == Factor.TIMES_RECIPROCAL:
            factor = factor.double().reciprocal().float()
        chunks = spans_of(table.words.tolist(), segment)
        if work.coefficient is not None:
            chunks = chunks if factor * work.coefficient != 1 else []
        for chunk in chunks:
            number, gradient = chunk.parameter, chunk.values(segment.dtype)
            self.read += gradient.nbytes
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if work.how == Factor.DIVIDE:
                exact = used = wide / factor.to(wide.dtype)
            else:
                exact = used = wide * factor.to(wide.dtype)
                used = used.to(gradient.dtype)
            if work.sums is not None:
                squares = exact.double().square().sum()
                self._squares += squares.item()
                if work.marks is not None:
                    aten.squares_in(work.marks)[number] += squares
            if work.marks is not None:
                peak = torch.linalg.vector_norm(used.reshape(-1), torch.inf)
                aten.mark_(work.marks, work.now, [number], peak.reshape(1))
            if work.write:
                written = used
                if work.coefficient is not None:
                    written = used.to(wide.dtype) * work.coefficient.to(wide.dtype)
                gradient.copy_(written)
                self.written += gradient.nbytes
            peak = used.double().abs().max()
            used_peak = torch.maximum(used_peak, peak)  # a NaN wins
        bits = used_peak.view(torch.int64) & 0x7FFFFFFFFFFFFFFF
        header[1] = torch.maximum(header[1], bits)
        if not is_last:
            return
        if work.sums is not None:
            sums = work.sums.view(2)
            sums[0], sums[1] = self._squares, header[1:2].view(torch.float64)[0]
            self._squares = 0.0
        found = bool(header[1] >= _INFINITE)
        if found or not work.accumulate:
            work.found_inf.fill_(float(found))
        if work.clip is not None:
            cpu.clip(work.clip)
        if work.factor_copy is not None:
            work.factor_copy.copy_(work.factor)
        if work.ending is not None:
            flags = [work.found_inf, *work.ending.found_infs]
            self._update(replaced(work.ending, found_infs=flags))
        header.zero_()

    def update_scale(self, update: Update) -> None:
        self.launches.append("update")
        assert 1 <= len(update.found_infs) <= 4
        self._update(update)

    def clip_coefficient(self, clip: Clip) -> None:
        self.launches.append("clip")
        cpu.clip(clip)

    def _update(self, update: Update) -> None:
        scale, tracker = update.scale.data, update.growth_tracker.data
        assert cpu.update(replaced(update, scale=scale, growth_tracker=tracker))


@dataclass
class Chunk:
    """Chunk of a table: its memory and its parameter.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        parameter: Number of its parameter.
    """

    address: int
    size: int
    parameter: int

    def values(self, dtype: torch.dtype) -> Tensor:
        memory = (ctypes.c_char * self.size).from_address(self.address)
        return torch.frombuffer(memory, dtype=dtype)


def spans_of(words: Sequence[int], segment: Segment) -> list[Chunk]:
    """Chunks of a segment."""
    found = []
    for number in range(segment.chunks):
        first = segment.word + 2 * number
        address, extent = words[first : first + 2]
        found.append(Chunk(address, extent % 2**32, extent >> 32))
    return found


os.environ.setdefault("PTX_EMULATOR_CACHE", str(Path(__file__).parents[2] / "build" / "ptx"))

VARIABLE = "AMPFAST_TEST_KERNELS"
ON_HOST = os.environ.get(VARIABLE, "").startswith("cuda-host")


@cache
def compiled() -> Any:
    """Returns the requested launcher of compiled kernels, or None.

    Raises:
        pytest.UsageError: If there are no such kernels here.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    import pytest

    from support.cuda_kernels import EmulatedLauncher

    if found := re.fullmatch(r"cuda-host(?:-(address|thread))?", name):
        return EmulatedLauncher(_cuda_on_host(found[1] or ""), races=False)
    found = re.fullmatch(r"(triton|cuda)-sm_(\d+)(-races)?", name)
    if found is None:
        raise pytest.UsageError(
            f"{VARIABLE} is triton-sm_NN or cuda-sm_NN, with or without -races, or cuda-host, "
            f"not {name!r}"
        )
    module = (_compiled_cuda if found[1] == "cuda" else _compiled_triton)(found[2])
    return EmulatedLauncher(module, races=found[3] is not None)


def chosen() -> Any:
    """Returns the launcher; skips the importing module where there is none."""
    return compiled() or _interpreter()


def _interpreter() -> ModuleType:
    import pytest

    try:
        from ampfast.backends.triton import launch
    except ModuleNotFoundError as error:
        pytest.skip(f"Triton is missing: {error}", allow_module_level=True)
    if not launch.INTERPRETED:
        reason = f"interprets kernels: needs TRITON_INTERPRET=1, or {VARIABLE}"
        pytest.skip(reason, allow_module_level=True)
    return launch


def _compiled_triton(architecture: str) -> ModuleType:
    import pytest

    try:
        from ampfast.backends.triton import launch
    except ModuleNotFoundError as error:
        raise pytest.UsageError(f"{VARIABLE} needs Triton: {error}") from None
    if launch.INTERPRETED:
        raise pytest.UsageError(f"{VARIABLE} is for compiled kernels: unset TRITON_INTERPRET")
    from ptx_emulator import triton_driver

    triton_driver.activate(architecture)
    launch._threads = lambda device: 128
    return launch


def _compiled_cuda(architecture: str) -> ModuleType:
    import pytest

    from support import cuda_kernels

    if cuda_kernels.NVCC is None:
        raise pytest.UsageError(f"{VARIABLE} needs nvcc on the PATH for the CUDA kernels")
    if architecture not in cuda_kernels.ARCHITECTURES:
        known = " or ".join(f"cuda-sm_{a}" for a in cuda_kernels.ARCHITECTURES)
        raise pytest.UsageError(f"{VARIABLE} is {known} for the CUDA kernels")
    cuda_kernels.install(_C, architecture)
    from ampfast.backends import cuda

    return cuda


def _cuda_on_host(sanitizer: str) -> ModuleType:
    from support import cuda_kernels

    cuda_kernels.install_on_host(_C, sanitizer)
    from ampfast.backends import cuda

    return cuda


class _Patches:
    """Replaced functions of Triton's language during one launch."""

    def __init__(self, scope: Any, patched: set[int]) -> None:
        self._scope = scope
        self._patched = patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


def patch_once_a_launch() -> None:
    """Replaces the language's functions once per launch, and launches one thread at a time.

    The interpreter does so in every call between functions, which takes more than half
    of the time of a launch.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._patch_lang
    patched: set[int] = set()

    def patch(function: Any) -> _Patches | None:
        # The language has two modules: that of kernels, and its own library.
        names = {id(x) for x in function.__globals__.values() if x is tl or x is tl.core}
        if names <= patched:
            return None  # a call within a launch, after which nothing is restored
        patches = _Patches(plain(function), patched)
        patched.update(names)
        return patches

    interpreter._patch_lang = patch
    launch, lock = interpreter.GridExecutor.__call__, threading.Lock()

    def launch_alone(*args: Any, **options: Any) -> object:
        with lock, np.errstate(all="ignore"):
            return launch(*args, **options)

    interpreter.GridExecutor.__call__ = launch_alone
