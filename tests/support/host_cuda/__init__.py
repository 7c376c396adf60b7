"""CUDA kernels compiled as C++, whose threads are fibers of this machine: `host_cuda.h`."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptx_emulator.cache import COMPILER, built
from ptx_emulator.driver import Launcher

__all__ = ["environment", "launcher"]

HERE = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC"),
    *("-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas"),
)


def environment(sanitizer: str) -> dict[str, str]:
    """Returns variables of a process that loads kernels with a sanitizer, "address" or "thread".

    ThreadSanitizer also needs `setarch -R` before the process.
    """
    names = [f"lib{sanitizer[0]}san.so", "libstdc++.so"]
    commands = [[*COMPILER, f"-print-file-name={name}"] for name in names]
    found = [subprocess.run(c, capture_output=True, text=True, check=True) for c in commands]
    return {
        "LD_PRELOAD": " ".join(each.stdout.strip() for each in found),
        "OMP_NUM_THREADS": "1",
        # Python and torch keep memory until exit, and are not instrumented.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1",
    }


def launcher(sources: Sequence[Path], sanitizer: str = "") -> Any:
    """Returns how the stand-in of CUDA's driver launches the kernels.

    Args:
        sources: What they are compiled from.
        sanitizer: "address" or "thread", or none.
    """
    flags = [*FLAGS, f"-I{HERE}", *([f"-DHOST_CUDA_{sanitizer.upper()}"] if sanitizer else [])]
    instrumented = [f"-fsanitize={sanitizer}"] if sanitizer else []

    def make(folder: Path) -> None:
        objects = {"host_cuda": [], "kernels": instrumented}
        for name, more in objects.items():
            output = ["-c", "-o", str(folder / f"{name}.o"), str(HERE / f"{name}.cpp")]
            subprocess.run([*COMPILER, *flags, *more, *output], check=True)
        linked = [*(str(folder / f"{name}.o") for name in objects), "-ldl", "-pthread"]
        output = ["-shared", "-o", str(folder / "kernels.so"), *linked]
        subprocess.run([*COMPILER, *instrumented, *output], check=True)

    depends = [*sorted(HERE.glob("*.cpp")), *sorted(HERE.glob("*.h")), *sources]
    library = ctypes.CDLL(str(built("host_cuda", depends, flags, make) / "kernels.so"))
    return Launcher(("host_cuda_launch", library))
