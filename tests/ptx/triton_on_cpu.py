"""Triton kernels compiled by Triton and run on the CPU, launched by its own runtime."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from assembler import Kernel, kernels_of
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

__all__ = ["install"]

_FORMATS = {"i1": "?", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}


class _Driver:
    """Triton driver of a GPU whose memory is the CPU's."""

    def __init__(self, architecture: int) -> None:
        self.utils = _Utils()
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        types = list(source.signature.values())

        def launch(programs: int, y: int, z: int, stream: int, kernel: Kernel, *rest: Any) -> None:
            assert (y, z) == (1, 1)
            arguments = rest[-len(types) :]
            packed = [
                _packed(t, a) for t, a in zip(types, arguments, strict=True) if t != "constexpr"
            ]
            # Followed by pointers to optional scratch memory, which our kernels do not use.
            parameters = kernel.packed(packed)
            threads = metadata.num_warps * self._target.warp_size
            machine.run(kernel, programs, threads, parameters, shared_bytes=metadata.shared)

        return launch


class _Utils:
    def __init__(self) -> None:
        self._ptx = ""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 49_152}

    def about_to_load(
        self, module: Any, function: Any, name: str, files: dict[str, Any], *_: Any
    ) -> None:
        [path] = [path for file, path in files.items() if file.endswith(".ptx")]
        self._ptx = Path(path).read_text()

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        kernel = kernels_of(self._ptx)[name]
        return kernel, kernel, 0, 0, 1024


def _packed(kind: str, value: Any) -> bytes:
    if kind.startswith("*"):
        return struct.pack("q", value.data_ptr())
    return struct.pack(_FORMATS[kind], value)


def install(architecture: str) -> None:
    """Makes Triton compile for an architecture, such as "90", and run on the CPU."""
    ours = _Driver(int(architecture))
    driver.set_active(ours)
    knobs.runtime.kernel_load_start_hook = ours.utils.about_to_load
