"""Kernels for CPU tensors in tests without a GPU.

`AMPFAST_TEST_KERNELS` selects a backend compiled for an architecture, such as "cuda-sm_90" or
"triton-sm_90", run by tools/ptx_emulator; with the suffix "-races", data races are errors.
"cuda-host" is the CUDA kernels as C++ for this machine, "cuda-host-address" and "cuda-host-thread"
with a sanitizer. The default is Triton's interpreter, if TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ampfast import _C
from support.nvcc import NVCC

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
    from support.emulated_cuda import EmulatedLauncher

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
    try:
        from ampfast.backends.triton import launch
    except ModuleNotFoundError as error:
        pytest.skip(f"Triton is missing: {error}", allow_module_level=True)
    if not launch.INTERPRETED:
        reason = f"interprets kernels: needs TRITON_INTERPRET=1, or {VARIABLE}"
        pytest.skip(reason, allow_module_level=True)
    return launch


def _compiled_triton(architecture: str) -> ModuleType:
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
    if NVCC is None:
        raise pytest.UsageError(f"{VARIABLE} needs nvcc on the PATH for the CUDA kernels")
    from support import emulated_cuda

    if architecture not in emulated_cuda.ARCHITECTURES:
        known = " or ".join(f"cuda-sm_{a}" for a in emulated_cuda.ARCHITECTURES)
        raise pytest.UsageError(f"{VARIABLE} is {known} for the CUDA kernels")
    emulated_cuda.install(_C, architecture)
    from ampfast.backends import cuda

    return cuda


def _cuda_on_host(sanitizer: str) -> ModuleType:
    from support import emulated_cuda

    emulated_cuda.install_on_host(_C, sanitizer)
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
    """Replaces the language's functions once per launch.

    The interpreter does so in every call between functions, which takes more than half
    of the time of a launch. One thread at a time launches.
    """
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
