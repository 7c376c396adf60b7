"""The loops of the CPU kernels alone: sanitized, and on aarch64, for which all compiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cuda_kernels import SETUP
from support.kernels import CAPABILITIES
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"
LOOPS = (CSRC / "cpu" / "instruction_set.cpp", Path(__file__).with_name("digests.cpp"))
HERE = (os.environ.get("CXX", "c++").split()[0],)
CROSS = ("aarch64-linux-gnu-g++",)
EMULATOR = ("qemu-aarch64",)
needs_cross = pytest.mark.skipif(shutil.which(*CROSS) is None, reason=f"needs {CROSS[0]}")
needs_emulator = pytest.mark.skipif(shutil.which(*EMULATOR) is None, reason=f"needs {EMULATOR[0]}")
pytestmark = [pytest.mark.sweep, pytest.mark.slow]


def flags() -> list[str]:
    """Those of the build, without those of the link."""
    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    # torch needs C++20 from 2.13 on.
    return ["-std=c++20", "-fPIC", "-DTORCH_EXTENSION_NAME=_C", *SETUP.compile_flags(folders)[0]]


def digests(
    folder: Path, compiler: tuple[str, ...], *more: str, by: tuple[str, ...] = ()
) -> dict[str, dict[str, str]]:
    """Digests of the loops by instruction set, compiled by `compiler` and run `by` an emulator."""
    program = folder / "digests"
    sources = [str(source) for source in LOOPS]
    command = [*compiler, *flags(), *more, f"-I{CSRC}", *sources, "-o", str(program)]
    subprocess.run(command, check=True)
    run = subprocess.run([*by, str(program)], check=True, capture_output=True, text=True)
    found: dict[str, dict[str, str]] = {}
    for line in run.stdout.splitlines():
        name, dtype, loop, digest = line.split()
        found.setdefault(name, {})[f"{dtype} {loop}"] = digest
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the loops that the other tests compare with torch's results."""
    found = digests(tmp_path_factory.mktemp("here"), HERE)
    assert [*found] == CAPABILITIES
    first, *others = found.values()
    assert len(first) == 12
    assert all(other == first for other in others)
    return first


def test_sanitized_loops_have_the_same_bits(ours: dict[str, str], tmp_path: Path) -> None:
    """Under AddressSanitizer and UBSan, over blocks with nothing behind them."""
    sanitized = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1")
    found = digests(tmp_path, HERE, *sanitized)
    assert found == dict.fromkeys(CAPABILITIES, ours)


@needs_cross
@needs_emulator
def test_loops_of_aarch64_have_the_same_bits(ours: dict[str, str], tmp_path: Path) -> None:
    assert digests(tmp_path, CROSS, "-static", by=EMULATOR) == {"baseline": ours}


@needs_cross
def test_the_core_compiles_for_aarch64(tmp_path: Path) -> None:
    def compile_(source: Path) -> str:
        command = [*CROSS, *flags(), "-O1", "-c", str(source), "-o", str(tmp_path / source.stem)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    sources = sorted([*CSRC.glob("*.cpp"), *CSRC.glob("cpu/*.cpp")])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = dict(zip(sources, pool.map(compile_, sources), strict=True))
    assert not any(said.values()), said
