"""CUDA kernels compiled as C++, whose threads are fibers of this machine: `host_cuda.h`."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptx_emulator.cache import COMPILER, built
from ptx_emulator.driver import Launcher

__all__ = ["launcher"]

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared")
MORE = ("-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-pthread")


def launcher(sources: Sequence[Path], sanitizer: str = "") -> Any:
    """Returns how the stand-in of CUDA's driver launches the kernels.

    Args:
        sources: What they are compiled from.
        sanitizer: "address" or "thread", or none.
    """
    flags = [*FLAGS, *MORE, f"-I{HERE}", *([f"-fsanitize={sanitizer}"] if sanitizer else [])]

    def make(folder: Path) -> None:
        output = ["-o", str(folder / "kernels.so"), str(HERE / "kernels.cpp"), "-ldl"]
        subprocess.run([*COMPILER, *flags, *output], check=True)

    depends = [HERE / "kernels.cpp", *sorted(HERE.glob("*.h")), *sources]
    library = ctypes.CDLL(str(built("host_cuda", depends, flags, make) / "kernels.so"))
    return Launcher(("host_cuda_launch", library))
