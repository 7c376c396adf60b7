"""Driver for Triton's runtime: kernels that Triton compiled run on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from .assembler import Kernel, load
from .driver import path, stand_in
from .machine import launch

__all__ = ["activate"]


class _Driver:
    """Driver of a GPU whose memory is the CPU's."""

    def __init__(self, architecture: int) -> None:
        self.utils: Any = _Utils()
        self.launcher_cls: Any = self._launcher
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    # As on a GPU, without a Python frame, whose time benchmarks would count.
    get_current_stream = staticmethod({0: 0}.get)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def _launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        types = list(source.signature.values())
        threads = metadata.num_warps * self._target.warp_size

        def run(x: int, y: int, z: int, stream: int, kernel: Kernel, *rest: Any) -> None:
            given = zip(types, rest[len(rest) - len(types) :], strict=True)
            arguments = [argument for kind, argument in given if kind != "constexpr"]
            # Parameters at the end are pointers to optional scratch memory, of which there is none.
            scratch = [0] * (len(kernel.parameters) - len(arguments))
            launch(kernel, (x, y, z), threads, *arguments, *scratch, shared_bytes=metadata.shared)

        return run


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
        kernel = load(self._ptx)[name]
        # Module, function, spilled registers, spilled bytes, threads per program at most.
        return kernel, kernel, 0, 0, 1024


def _idle(driver: _Driver) -> None:
    """Gives a driver Triton's own utilities and launcher, over a stand-in of CUDA's driver."""
    stand_in()
    knobs.nvidia.libcuda_path = str(path().parent)
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    driver.utils, driver.launcher_cls = CudaUtils(), CudaLauncher


def activate(architecture: int | str, *, runs: bool = True) -> None:
    """Makes Triton compile for a GPU and run on the CPU, for the rest of the process.

    Launches then take CPU tensors. `TRITON_INTERPRET` must not be set.

    Args:
        architecture: Compute capability without a dot, such as 90.
        runs: If False, Triton's own launcher is used, over a driver of CUDA that does nothing, for
            the time that launches take.

    Raises:
        RuntimeError: If Triton's interpreter is on, which compiles nothing.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("the driver runs compiled kernels: unset TRITON_INTERPRET")
    emulated = _Driver(int(architecture))
    driver.set_active(emulated)
    if not runs:
        _idle(emulated)
        return
    knobs.runtime.kernel_load_start_hook = emulated.utils.about_to_load
