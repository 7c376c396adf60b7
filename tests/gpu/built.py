"""Checks that the in-place build fits this machine: `python tests/gpu/built.py`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import torch  # noqa: E402
from gpu_support import REHEARSES  # noqa: E402

from ampfast import _C, backends  # noqa: E402
from ampfast.__main__ import main as ampfast_main  # noqa: E402
from ampfast.backends import cuda  # noqa: E402

SOURCES = (
    "*.cpp",
    "*.h",
    "cpu/*.cpp",
    "cpu/*.h",
    "cuda/*.cpp",
    "cuda/*.h",
)


def complaints() -> list[str]:
    """Mismatches of the build, in words."""
    found = []
    extension = Path(_C.__file__)
    if extension.parent != ROOT / "ampfast":
        found.append(f"the extension is not the one that is built in place: {extension}")
    sources_of_kernels = importlib.import_module("setup").KERNEL_SOURCES
    for built, patterns in ((extension, SOURCES), (cuda.KERNELS, sources_of_kernels)):
        newest = max(f.stat().st_mtime for one in patterns for f in (ROOT / "csrc").glob(one))
        if built.exists() and built.stat().st_mtime < newest:
            found.append(f"a source is newer than {built.name}: run `make build`")
    if _C.build_info()["torch"] != torch.__version__.split("+")[0]:
        built_for = _C.build_info()["torch"]
        found.append(f"built for torch {built_for}, this is {torch.__version__}")
    for report in backends.report():
        if not (report.available or REHEARSES):
            found.append(f"backend {report.name} cannot run: {report.reason}")
    return found


if __name__ == "__main__":
    ampfast_main(["info"])
    wrong = complaints()
    for complaint in wrong:
        print(f"WRONG {complaint}")
    print(f"{len(wrong)} wrong" if wrong else "built in place, and every backend runs")
    sys.exit(1 if wrong else 0)
