"""CUDA kernels compiled by nvcc for every architecture, inspected without a GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from support.cuda_kernels import FLAGS, NVCC, SETUP

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "cuda" / "multi_tensor.cu"
# Eight programs of 128 threads share the 65,536 registers of a multiprocessor.
REGISTERS = 64
READ_AHEAD = 4
SM = "90"
pytestmark = [pytest.mark.sweep, pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")]

TABLES = ("float32", "float64", "float16", "bfloat16")
# Passes, and whether they write.
PASSES = {"check": False, "check_norm": False, "unscale": True, "unscale_norm": True}
PASSES |= {"clip": True, "read": False}
KERNELS = {f"ampfast_{name}_{table}": writes for name, writes in PASSES.items() for table in TABLES}


class Build(NamedTuple):
    """Outputs of one run of nvcc."""

    architectures: list[str]
    log: str
    folder: Path

    def usages(self) -> list[tuple[str, str, int, int]]:
        """Kernel, architecture, bytes in local memory and registers, by `ptxas -v`."""
        pattern = (
            r"Compiling entry function '(\w+)' for 'sm_(\d+)'\n.*\n"
            r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
            r".*Used (\d+) registers"
        )
        found = re.findall(pattern, self.log)
        return [(name, sm, sum(map(int, kept)), int(used)) for name, sm, *kept, used in found]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Kernels compiled for all architectures in one run that keeps PTX and machine code."""
    folder = tmp_path_factory.mktemp("cuda")
    known = [flag.partition("sm_")[2] for flag in SETUP.targets(NVCC) if "code=sm_" in flag]
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in known]
    output = ["--keep", "--keep-dir", str(folder), "-o", str(folder / "all.fatbin")]
    command = [str(NVCC), *FLAGS, *targets, "-fatbin", "-Xptxas", "-v", *output, str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Build(known, done.stderr, folder)


@pytest.fixture(scope="module")
def sass(build: Build) -> dict[str, str]:
    """Machine code of each pass for one architecture."""
    packaged = None
    if (triton := importlib.util.find_spec("triton")) and triton.origin:
        packaged = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    beside = Path(str(NVCC)).resolve().parent / "cuobjdump"
    found = [each for each in ("cuobjdump", beside, packaged) if each and shutil.which(each)]
    if not found:
        pytest.skip("cuobjdump is neither on the PATH nor in the toolkit or Triton")
    cubin = next(build.folder.glob(f"*_{SM}.cubin"))
    command = [found[0], "-sass", cubin]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *parts = re.split(r"^\s*Function : (\w+)$", listing, flags=re.MULTILINE)
    return {
        name: code for name, code in zip(parts[::2], parts[1::2], strict=True) if name in KERNELS
    }


def test_every_kernel_exists_and_keeps_nothing_in_memory(build):
    assert "warning" not in build.log.lower(), build.log
    usages = build.usages()
    compiled = [(name, sm) for name, sm, *_ in usages if name in KERNELS]
    assert sorted(compiled) == sorted((name, sm) for name in KERNELS for sm in build.architectures)
    assert [each for each in usages if each[2] or each[3] > REGISTERS] == []


def test_arithmetic_is_exact_in_ptx(build):
    for architecture in build.architectures:
        ptx = next(build.folder.glob(f"*compute_{architecture}.ptx")).read_text()
        # Contraction would round once where torch rounds twice; a product or sum without `.rn` may
        # still be contracted by ptxas.
        for inexact in (r"\bfma\.", r"\.ftz", r"\.approx", r"\bdiv\.full"):
            assert re.findall(rf"^.*{inexact}.*$", ptx, re.MULTILINE) == [], architecture
        # An atomic sum has no `.rn`, and rounds so.
        inexact = r"(?<!\.)\b(?:mul|add|sub)\.(?:f|bf)\d\w*\s.*$"
        assert re.findall(inexact, ptx, re.MULTILINE) == []
        assert len(re.findall(r"\bmul\.rn\.f32\b", ptx)) > 100, "the pattern above sees products"


def test_machine_code_of_windows(sass):
    assert sorted(sass) == sorted(KERNELS)
    for name, code in sass.items():
        memory = re.findall(r"^\s*/\*\w+\*/\s+(?:@!?\w+ )?\s*(LDG|STG)\.E\.128\b", code, re.M)
        accesses = "".join("L" if kind == "LDG" else "S" for kind in memory)
        assert "L" * READ_AHEAD in accesses, f"{name}: a load waits for a store: {accesses}"
        assert ("S" in accesses) == KERNELS[name], (name, accesses)
        assert re.findall(r"\b(?:LDL|STL|LD\.E|ST\.E)\b.*", code) == []
