"""CUDA kernels compiled by nvcc for every architecture, inspected without a GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from support.nvcc import FLAGS, NVCC, SETUP
from support.registers_table import DOCUMENTED, PAGE, cells, registers_table

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "csrc" / "cuda" / "multi_tensor.cu"
FORMATS = ("Float32", "Float64", "Float16", "BFloat16")
# Eight programs of 128 threads share the 65,536 registers of a multiprocessor.
REGISTERS = 64
READ_AHEAD = 4
SM = "90"
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH"),
]
is_documented = pytest.mark.skipif(
    NVCC is None
    or "release 13.0"
    not in subprocess.run([NVCC, "--version"], capture_output=True, text=True, check=False).stdout,
    reason="the registers of the docs are of nvcc 13.0",
)


class Variant(NamedTuple):
    """Compile-time switches of a pass."""

    format: str
    write: bool = False
    norm: bool = False
    coefficient: bool = False
    clips: bool = False
    pairs: bool = False


MODES = [
    *((*switches, False, False) for switches in product((False, True), repeat=2)),
    (True, False, True, False),
]
VARIANTS = [
    *(Variant(name, *mode) for name in FORMATS for mode in MODES),
    *(Variant(name, *mode, pairs=True) for name in FORMATS[2:] for mode in MODES),
    *(Variant(name, True, False, True, True) for name in FORMATS),
]


SWITCHES = {
    "check": (False, False),
    "check_norm": (False, True),
    "unscale": (True, False),
    "unscale_norm": (True, True),
    "clip": (True, False, True),
    "clip_by": (True, False, True, True),
}


def variant_of(symbol: str) -> Variant | None:
    """Switches of a kernel by its name, or None for one that is no pass over a table."""
    found = re.fullmatch(r"ampfast_(\w+?)_(b?float\d\d)(_pairs)?", symbol)
    if found is None or found[1] not in SWITCHES:
        return None
    name = found[2].capitalize().replace("Bf", "BF")
    return Variant(name, *SWITCHES[found[1]], pairs=found[3] is not None)


class Usage(NamedTuple):
    """Resources of one kernel for one architecture, by `ptxas -v`."""

    architecture: str
    symbol: str
    stack: int
    spilled: int
    registers: int


class Build(NamedTuple):
    """Outputs of one run of nvcc."""

    architectures: list[str]
    log: str
    folder: Path

    def usages(self) -> Iterator[Usage]:
        pattern = (
            r"Compiling entry function '(\w+)' for 'sm_(\d+)'\n.*\n"
            r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
            r".*Used (\d+) registers"
        )
        for symbol, architecture, stack, stores, loads, registers in re.findall(pattern, self.log):
            spilled = int(stores) + int(loads)
            yield Usage(architecture, symbol, int(stack), spilled, int(registers))

    def ptx(self, architecture: str) -> str:
        return next(self.folder.glob(f"*compute_{architecture}.ptx")).read_text()


def by_variant(text: str, start: str) -> dict[Variant, str]:
    """Splits a listing at lines that match `start` and name a kernel."""
    parts = re.split(start, text, flags=re.MULTILINE)
    named = zip(parts[1::2], parts[2::2], strict=True)
    return {variant: body for name, body in named if (variant := variant_of(name)) is not None}


def project_architectures() -> list[str]:
    """Architectures of setup.py that this nvcc supports, as digits."""
    return [flag.partition("sm_")[2] for flag in SETUP.targets(NVCC) if "code=sm_" in flag]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Kernels compiled for all architectures in one run that keeps PTX and machine code."""
    folder = tmp_path_factory.mktemp("cuda")
    architectures = project_architectures()
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    output = ["--keep", "--keep-dir", str(folder), "-o", str(folder / "all.fatbin")]
    how = ["-fatbin", "-Xptxas", "-v"]
    done = subprocess.run(
        [str(NVCC), *FLAGS, *targets, *how, *output, str(SOURCE)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return Build(architectures, done.stderr, folder)


@pytest.fixture(scope="module")
def tool() -> str:
    """Path of cuobjdump."""
    beside = Path(str(NVCC)).resolve().parent / "cuobjdump"
    found = shutil.which("cuobjdump") or shutil.which(beside) or packaged_cuobjdump()
    if found is None:
        pytest.skip("cuobjdump is neither on the PATH nor in the toolkit or Triton")
    return found


@pytest.fixture(scope="module")
def sass(build: Build, tool: str) -> dict[Variant, str]:
    """Machine code of each variant for one architecture."""
    cubin = next(build.folder.glob(f"*_{SM}.cubin"))
    listing = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True)
    return by_variant(listing.stdout, r"^\s*Function : (\w+)$")


def packaged_cuobjdump() -> str | None:
    """cuobjdump bundled with Triton."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    return shutil.which(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def test_every_variant_exists_and_keeps_nothing_in_memory(build):
    assert "warning" not in build.log.lower(), build.log
    usages = list(build.usages())
    compiled = [(u.architecture, v) for u in usages if (v := variant_of(u.symbol)) is not None]
    assert sorted(compiled) == sorted((a, v) for a in build.architectures for v in VARIANTS)
    most = [u for u in usages if u.stack or u.spilled or u.registers > REGISTERS]
    assert most == []


KINDS = {
    "check": (False, False, False),
    "check and norm": (False, True, False),
    "unscale": (True, False, False),
    "unscale and clip": (True, False, True),
}


@is_documented
def test_registers_in_the_docs(build):
    used = {variant_of(u.symbol): u.registers for u in build.usages() if u.architecture == SM}
    names = [str(dtype).removeprefix("torch.").capitalize() for dtype in DOCUMENTED]
    for kind, switches in KINDS.items():
        found = [
            used[Variant("BFloat16" if name == "Bfloat16" else name, *switches)] for name in names
        ]
        assert registers_table()["CUDA", kind] == cells(found), kind


def test_arithmetic_is_exact_in_ptx(build):
    for architecture in build.architectures:
        ptx = build.ptx(architecture)
        # Contraction would round once where torch rounds twice; a product or sum without `.rn` may
        # still be contracted by ptxas.
        for inexact in (r"\bfma\.", r"\.ftz", r"\.approx", r"\bdiv\.full"):
            assert re.findall(rf"^.*{inexact}.*$", ptx, re.MULTILINE) == [], architecture
        # An atomic sum has no `.rn`, and rounds so.
        inexact = r"(?<!\.)\b(?:mul|add|sub)\.(?:f|bf)\d\w*\s.*$"
        assert re.findall(inexact, ptx, re.MULTILINE) == []
        assert len(re.findall(r"\bmul\.rn\.f32\b", ptx)) > 100, "the pattern above sees products"


def test_windows_are_vectors_in_ptx(build):
    for architecture in build.architectures:
        kernels = by_variant(build.ptx(architecture), r"\.entry (\w+)\(")
        assert sorted(kernels) == sorted(VARIANTS)
        for variant, body in kernels.items():
            loads = re.findall(r"\bld\.global\.v(?:4\.[buf]32|2\.[buf]64)", body)
            stores = re.findall(r"\bst\.global\.v(?:4\.[buf]32|2\.[buf]64)", body)
            assert len(loads) == READ_AHEAD, (architecture, variant)
            each = 2 if variant.pairs else 1  # of float32 values
            assert len(stores) == each * READ_AHEAD * variant.write, (architecture, variant)
            generic = re.findall(r"\b(?:ld|st)\.(?:v\d\.)?[busf]\d+\b.*$", body, re.MULTILINE)
            assert generic == [], (architecture, variant)


def test_last_program_is_ordered(build):
    for variant, body in by_variant(build.ptx(SM), r"\.entry (\w+)\(").items():
        # Publish, count, read the others' results: the order shows that it runs last.
        order = (
            r"fence\.|membar\.|atom\.acq_rel\.gpu\.global\.add\.u64|bar(?:rier)?\.(?:cta\.)?sync"
        )
        steps = [step[:3] for step in re.findall(order, body)]
        at = steps.index("ato")
        assert steps[at - 1] == steps[at + 1] == "bar", (variant, steps)
        # It orders all, once, in place of fences.
        assert {"fen", "mem"}.isdisjoint(steps) and steps.count("ato") == 1, (variant, steps)
        # There the peak is an integer, the partial sums are not.
        assert re.search(r"\bld\.global\.cg\.[sub]64 %rd", body), variant
        assert re.search(r"\bld\.global\.cg\.f64 %fd", body), variant


def instructions(listing: str) -> list[str]:
    """Machine code without predicates and padding."""
    found = re.findall(r"^\s*/\*\w{4}\*/\s+(?:@!?\w+ )?\s*(.*?);", listing, re.MULTILINE)
    return [each for each in found if not each.startswith("NOP")]


@is_documented
def test_fixed_instructions_in_the_docs(sass):
    """Before the first load of a gradient, and from its last access to the program's count."""
    expected = []
    for kind, switches in KINDS.items():
        counts = []
        for name in (*FORMATS[:1], *FORMATS[2:], *FORMATS[1:2]):
            code = instructions(sass[Variant(name, *switches)])
            at = [i for i, each in enumerate(code) if re.match(r"(LDG|STG)\.E\.128\b", each)]
            [counted] = [i for i, each in enumerate(code) if re.match(r"ATOM\S*\.ADD\b", each)]
            counts.append(f"{at[0]}, {counted - at[-1] - 1}")
        expected.append(f"| {kind} | {' | '.join(counts)} |")
    table = (
        PAGE.read_text().partition("<!-- fixed:start -->\n")[2].partition("<!-- fixed:end -->")[0]
    )
    assert table.splitlines()[2:] == expected, "\n".join(expected)


def test_machine_code_of_windows(sass):
    for variant, listing in sass.items():
        memory = re.findall(r"^\s*/\*\w+\*/\s+(?:@!?\w+ )?\s*(LDG|STG)\.E\.128\b", listing, re.M)
        accesses = "".join("L" if kind == "LDG" else "S" for kind in memory)
        assert "L" * READ_AHEAD in accesses, f"{variant}: a load waits for a store: {accesses}"
        assert ("S" in accesses) == variant.write, (variant, accesses)
        assert re.findall(r"\b(?:LDL|STL|LD\.E|ST\.E)\b.*", listing) == []
