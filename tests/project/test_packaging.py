"""Build decisions, source distribution, and wheels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from support.cuda_kernels import SETUP
from support.processes import ROOT, module_at
from torch.utils import cpp_extension

import ampfast

pytestmark = pytest.mark.sweep

SOABI = sysconfig.get_config_var("SOABI")
WHEELS = module_at(ROOT / "tools" / "wheels.py")


def script(path: Path, text: str) -> Path:
    """Writes an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Path of kernels that are yet to be compiled, by an nvcc that writes its arguments there."""
    monkeypatch.setattr(SETUP, "KERNELS", tmp_path / "kernels.fatbin")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    knows = 'case "$*" in *--list-gpu-code*) echo sm_75; echo sm_90; echo sm_999; exit 0;; esac\n'
    writes = 'for a; do [ "$last" = -o ] && out=$a; last=$a; done; echo "$@" > "$out"'
    script(tmp_path / "toolkit/bin/nvcc", knows + writes)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    return SETUP.KERNELS


def test_kernels_are_compiled_once_for_what_nvcc_knows(kernels, monkeypatch):
    assert SETUP.build_kernels() == ""
    arguments = kernels.read_text().split()
    targets = [each.rpartition("code=")[2] for each in arguments if each.startswith("-gencode")]
    assert targets == ["sm_75", "sm_90", "compute_75"]
    assert {"-fatbin", "--fmad=false"} < {*arguments}
    kernels.write_text("as it was")
    assert SETUP.build_kernels() == ""
    assert kernels.read_text() == "as it was"
    os.utime(kernels, (0, 0))  # older than a source
    assert SETUP.build_kernels() == ""
    assert kernels.read_text() != "as it was"
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert SETUP.build_kernels() == "", "compiled elsewhere, as those of a wheel"


def test_kernels_are_compiled_again_for_each_of_their_sources():
    """As a compiler finds what they include."""
    host = ROOT / "tests/support/host_cuda"
    command = ["c++", "-MM", "-x", "c++", f"-I{host}", str(ROOT / "csrc/cuda/multi_tensor.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    included = {Path(name).resolve() for name in re.findall(r"\S+csrc\S+", done.stdout)}
    assert included == {ROOT / name for name in SETUP.found(*SETUP.KERNEL_SOURCES)}


LIBCXX = ["clang++", "-stdlib=libc++", "-fsyntax-only", "-x", "c++"]


@pytest.mark.slow
def test_clang_and_its_library_compile_the_core():
    """As on a Mac; torch's own library is the other one here, so that it is not linked."""
    if (
        not shutil.which("clang++")
        or subprocess.run([*LIBCXX, "-"], input=b"#include <string>").returncode
    ):
        pytest.skip("needs clang++ and libc++")
    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = ["-std=c++20", "-DTORCH_EXTENSION_NAME=_C", *SETUP.compile_flags(folders)[0], "-Werror"]
    for unit in SETUP.units():
        subprocess.run([*LIBCXX, *flags, str(ROOT / unit)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_core_that_clang_built_passes_tests(sources, tmp_path):
    if not shutil.which("clang++"):
        pytest.skip("needs clang++")
    tree = shutil.copytree(sources, tmp_path / "tree")
    environ = {**os.environ, "CC": "clang", "CXX": "clang++", "CUDA_HOME": "/nowhere"}
    build = ["setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run([sys.executable, *build], cwd=tree, env=environ, check=True)
    tests = ("scaler", "clip", "backends/test_cpu.py", "backends/device_kernels")
    pytest_command = ["-m", "pytest", "-q", "-m", "not slow and not sweep"]
    pytest_command += [f"tests/{name}" for name in tests]
    subprocess.run([sys.executable, *pytest_command], cwd=tree, check=True)


def test_flags_keep_the_arithmetic():
    compiling, _ = SETUP.compile_flags(["/include"])
    assert "-ffp-contract=off" in compiling
    assert not [flag for flag in compiling if "fast" in flag or flag.startswith("-march")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source distribution, made from a copy of the tree without torch, and unpacked."""
    folder = tmp_path_factory.mktemp("sources")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT, folder / "tree", ignore=unwanted)
    backend("build_sdist", "..", cwd=folder / "tree", hidden="torch")
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


def backend(hook: str, *arguments: str, cwd: Path, hidden: str | None = None) -> str:
    """Calls a hook of the build backend as pip does: without the folder it installs into."""
    code = (
        "import sys, sysconfig\n"
        "installed = {sysconfig.get_path(name) for name in ('purelib', 'platlib')}\n"
        "sys.path[:] = [folder for folder in sys.path if folder not in installed]\n"
        f"sys.modules.update(dict.fromkeys({[hidden] if hidden else []}))\n"
        "sys.path.insert(0, 'tools')\n"
        "import build_backend\n"
        f"print(build_backend.{hook}(*{list(arguments)}))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    return result.stdout.strip().rpartition("\n")[2]


def test_sdist_holds_what_a_build_and_a_test_run_need(sources):
    folders = ["ampfast", "csrc", "tests", "tools", "requirements"]
    suffixes = {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".txt", ".typed"}
    wanted = {
        file.relative_to(ROOT).as_posix()
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in suffixes or file.name == "py.typed"
    }
    wanted |= {"setup.py", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile"}
    held = {file.relative_to(sources).as_posix() for file in sources.rglob("*")}
    assert "csrc/module.cpp" in wanted
    assert wanted - held == set()
    assert [name for name in held if name.endswith((".so", ".pyc", ".o", ".fatbin"))] == []


def test_metadata_of_the_sources(sources):
    info = Parser().parsestr((sources / "PKG-INFO").read_text(encoding="utf-8"))
    assert info["Version"] == ampfast.__version__
    assert info["Requires-Python"] == ">=3.10"
    assert info["License"] == "BSD-3-Clause"
    assert {"dev", "examples", "triton"} <= set(info.get_all("Provides-Extra", []))
    required = info.get_all("Requires-Dist")
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.10"]


def test_a_wheel_of_cores(sources, tmp_path):
    """Its metadata and contents; the cores are stand-ins, and torch is not needed."""
    tree = shutil.copytree(sources, tmp_path / "tree")
    cores = [f"ampfast/cores/torch{minor}/_C.{SOABI}.so" for minor in ("2.11", "2.13")]
    for core in cores:
        (tree / core).parent.mkdir()
        (tree / core).write_bytes(b"")
    (tree / "ampfast/kernels.fatbin").write_bytes(b"kernels")
    wheel = tmp_path / backend("build_wheel", "..", cwd=tree, hidden="torch")
    assert re.fullmatch(rf"ampfast-{ampfast.__version__}-cp3\d+-cp3\d+-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = archive.read(f"ampfast-{ampfast.__version__}.dist-info/METADATA").decode()
    assert [name for name in names if name.endswith(".so")] == cores
    assert {"ampfast/scaler/grad_scaler.py", "ampfast/kernels.fatbin"} < {*names}
    required = Parser().parsestr(info).get_all("Requires-Dist")
    (torch,) = [line for line in required if "extra ==" not in line]
    assert set(torch.removeprefix("torch").split(",")) == {">=2.11", "<2.14", "!=2.12.*"}

    WHEELS.require_cores_and_kernels(wheel, 2)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("ampfast.libs/libtorch-1234.so.2", b"")
    with pytest.raises(SystemExit, match=r"should hold 2 cores alone, has .*libtorch"):
        WHEELS.require_cores_and_kernels(wheel, 2)


def test_an_isolated_build_takes_the_installed_torch(sources):
    assert backend("get_requires_for_build_wheel", cwd=sources) == "[]"
    assert backend("get_requires_for_build_editable", cwd=sources) == "[]"
    oldest = "torch>={}.{}".format(*SETUP.OLDEST_TORCH)
    without = backend("get_requires_for_build_wheel", cwd=sources, hidden="torch")
    assert without == repr([oldest])


def test_wheels_and_ci_serve_the_oldest_the_pinned_and_the_newest_torch(monkeypatch):
    weekly = ROOT / ".github/workflows/weekly.yml"
    if not weekly.exists():
        pytest.skip("a source distribution has no .github")
    served, *pinned = [
        re.findall(r"^torch==([\d.]+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE)
        for name in ("torches.txt", "torch.txt", "cuda.txt")
    ]
    assert served[0].startswith("{}.{}.".format(*SETUP.OLDEST_TORCH))
    assert {version for (version,) in pinned} <= set(served)
    listed = re.search(r"^ +torch: \[(.+)\]$", weekly.read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert re.findall(r'"(.+?)"', listed) == served
    monkeypatch.setattr(sys, "version_info", (3, 14))
    assert WHEELS.listed() == served
    monkeypatch.setattr(sys, "version_info", (3, 10))
    assert WHEELS.listed() == served[:-1]
