"""CUDA files compiled to PTX by nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .cache import built

__all__ = ["compiled"]


def compiled(
    source: str | os.PathLike[str],
    *,
    architecture: str = "90",
    flags: Sequence[str] = (),
    headers: Sequence[str | os.PathLike[str]] = (),
) -> str:
    """Compiles a CUDA file to PTX, which is kept by its contents, the flags and nvcc's version.

    Args:
        source: File.
        architecture: Compute capability to compile for, such as "75".
        flags: nvcc's flags; --fmad=false makes results reproducible.
        headers: Files that the source includes, whose change requires another compilation.

    Raises:
        FileNotFoundError: If nvcc is not on the PATH.
        subprocess.CalledProcessError: If the compiler fails; it has written why to stderr.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise FileNotFoundError("nvcc is not on the PATH")
    file = Path(source)
    command = [nvcc, *flags, f"-arch=compute_{architecture}", "-ptx", str(file)]

    def make(folder: Path) -> None:
        subprocess.run([*command, "-o", str(folder / "kernels.ptx")], check=True)

    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    settings = (architecture, tuple(flags), version.stdout)
    depends = [Path(__file__), file, *map(Path, headers)]
    return (built(file.stem, depends, settings, make) / "kernels.ptx").read_text()
