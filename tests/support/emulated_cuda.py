"""CUDA kernels without a GPU: the core launches them through a stand-in of CUDA's driver."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from ptx_emulator import cuda, driver

from support import host_cuda
from support.nvcc import FLAGS, SETUP

__all__ = ["ARCHITECTURES", "install", "install_idle", "install_on_host"]

ROOT = Path(__file__).parents[2]
# The oldest architecture converts bfloat16 in software.
ARCHITECTURES = ("75", "90")
SOURCES = [ROOT / name for name in SETUP.found(*SETUP.KERNEL_SOURCES)]
SOURCE = ROOT / "csrc" / "cuda" / "multi_tensor.cu"
# Any PTX, since the stand-in only looks whether it may be some.
IMAGE = b"// of kernels that are known by name"


def install(core: ModuleType, architecture: str) -> driver.Driver:
    """Loads the kernels' PTX, which the emulator runs.

    Args:
        core: `ampfast._C`.
        architecture: Target of the code, of `ARCHITECTURES`.
    """
    ptx = cuda.compiled(SOURCE, architecture=architecture, flags=FLAGS, headers=SOURCES)
    made = driver.activate(ptx)
    core.cuda_load_kernels(0, ptx.encode())
    return made


def install_idle(core: ModuleType) -> driver.Driver:
    """Loads kernels that do nothing."""
    made = driver.stand_in()
    core.cuda_load_kernels(0, IMAGE)
    return made


def install_on_host(core: ModuleType, sanitizer: str = "") -> driver.Driver:
    """Loads the kernels as C++ for this machine, `host_cuda.h`.

    Args:
        core: `ampfast._C`.
        sanitizer: "address" or "thread", whose library must be preloaded, or none.
    """
    made = driver.stand_in()
    made.launch_by(host_cuda.launcher(SOURCES, sanitizer))
    core.cuda_load_kernels(0, IMAGE)
    return made
