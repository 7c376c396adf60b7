"""Build decisions, contents of the source distribution, and one-line errors of the Makefile."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest
from nvcc import SETUP

import ampfast
from ampfast._version import __version__
from ampfast.backends import cpu

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["csrc/cuda/kernels.cu"]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return SETUP


@pytest.mark.parametrize(
    ("override", "sources", "torch_cuda", "nvcc", "expected"),
    [
        (None, SOURCES, "13.0", "/cuda/bin/nvcc", True),
        ("", SOURCES, "13.0", "/cuda/bin/nvcc", True),
        ("1", SOURCES, "13.0", "/cuda/bin/nvcc", True),
        ("0", SOURCES, "13.0", "/cuda/bin/nvcc", False),
        (None, [], "13.0", "/cuda/bin/nvcc", False),
        (None, SOURCES, None, "/cuda/bin/nvcc", False),
        (None, SOURCES, "13.0", None, False),
        ("0", [], None, None, False),
    ],
)
def test_cuda_is_built_where_it_can_be(build, override, sources, torch_cuda, nvcc, expected):
    assert build.wants_cuda(override, sources, torch_cuda, nvcc) is expected


@pytest.mark.parametrize(
    ("sources", "torch_cuda", "nvcc", "reason"),
    [
        ([], "13.0", "/cuda/bin/nvcc", "no CUDA sources"),
        (SOURCES, None, "/cuda/bin/nvcc", "torch is built without CUDA"),
        (SOURCES, "13.0", None, "nvcc was not found"),
    ],
)
def test_requiring_cuda_without_nvcc_gives_a_reason(build, sources, torch_cuda, nvcc, reason):
    with pytest.raises(SystemExit, match=f"AMPFAST_CUDA=1, but .*{reason}"):
        build.wants_cuda("1", sources, torch_cuda, nvcc)


@pytest.mark.parametrize("override", ["2", "yes", "true", " 1"])
def test_other_values_of_the_override_are_refused(build, override):
    with pytest.raises(SystemExit, match=re.escape(repr(override))):
        build.wants_cuda(override, SOURCES, "13.0", "/cuda/bin/nvcc")


def script(path: Path, text: str) -> Path:
    """Writes an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvcc is a shell script")
def test_architectures_are_supported_by_nvcc(build, tmp_path):
    nvcc = script(tmp_path / "nvcc", "echo sm_75; echo sm_80; echo sm_90; echo sm_999")
    assert build.cuda_architectures(str(nvcc)) == "7.5;8.0;9.0+PTX"


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvcc is a shell script")
def test_nvcc_is_found_behind_a_wrapper_and_by_its_variable(build, tmp_path, monkeypatch):
    real = script(tmp_path / "toolkit/bin/nvcc", "exit 0")
    says_where = f"echo '#$ TOP={tmp_path}/toolkit/bin/..' >&2"
    wrapper = script(tmp_path / "elsewhere/bin/nvcc", says_where)
    monkeypatch.setenv("PATH", str(wrapper.parent))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert build.find_nvcc() == str(real.resolve())

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    assert build.find_nvcc() == str(wrapper.resolve())

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert build.find_nvcc() is None


def test_a_build_is_keyed_on_its_dependencies(build, monkeypatch):
    before = build.build_key()
    assert build.build_key() == before
    monkeypatch.setenv("CXXFLAGS", "-DSOMETHING")
    assert build.build_key() != before


@pytest.mark.skipif(sys.platform == "win32", reason="the flags of GCC and Clang")
def test_flags_keep_the_arithmetic(build):
    compiling, _ = build.compile_flags(["/include"])
    assert "-ffp-contract=off" in compiling
    assert not [flag for flag in compiling if "fast" in flag or flag.startswith("-march")]


@pytest.mark.parametrize(("cpus", "threads"), [(None, "1"), (3, "3"), (64, "8")])
def test_nvcc_compiles_for_several_architectures_at_once(build, monkeypatch, cpus, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    flags = build.nvcc_flags()
    assert flags[flags.index("--threads") + 1] == threads
    assert "--fmad=false" in flags


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of the source distribution, made from a copy of the tree."""
    pytest.importorskip("setuptools")
    if not (ROOT / "setup.py").exists() or not (ROOT / "csrc").exists():
        pytest.skip("not a source tree")
    folder = tmp_path_factory.mktemp("sdist")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT, folder / "tree", ignore=unwanted)
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "sdist", "--formats=gztar", "--dist-dir", ".."],
        cwd=folder / "tree",
        check=True,
        capture_output=True,
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
        return {name.partition("/")[2]: file.read() for name, file in files.items() if file}


@pytest.fixture(scope="module")
def package_info(sdist: dict[str, bytes]) -> Message:
    """Metadata that an installer reads."""
    return Parser().parsestr(sdist["PKG-INFO"].decode())


def test_sdist_holds_all_that_a_build_and_a_test_run_need(sdist):
    folders = ["ampfast", "csrc", "tests", "requirements"]
    suffixes = {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".txt", ".typed"}
    wanted = {
        file.relative_to(ROOT).as_posix()
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in suffixes or file.name == "py.typed"
    }
    wanted |= {"setup.py", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile"}
    assert "csrc/module.cpp" in wanted
    assert wanted - sdist.keys() == set()


def test_sdist_holds_nothing_that_was_built(sdist):
    built = (".so", ".pyd", ".pyc", ".o")
    assert [name for name in sdist if name.endswith(built) or name.startswith("build/")] == []


@pytest.mark.parametrize(
    ("torch_version", "with_cuda", "is_source", "label", "requirement"),
    [
        ("2.13.0+cpu", False, False, "+torch2.13", "torch==2.13.*"),
        ("2.14.1", True, False, "+torch2.14.cuda", "torch==2.14.*"),
        ("2.13.0+cpu", False, True, "", "torch>=2.11"),
    ],
)
def test_a_built_wheel_names_its_torch(
    build, torch_version, with_cuda, is_source, label, requirement
):
    fits = build.fits(torch_version, with_cuda=with_cuda, is_source=is_source)
    assert fits == (label, requirement)


def test_an_extension_for_another_torch_is_refused():
    cpu._require_torch("2.13.0", "2.13.1+cu130")
    for other in ("2.14.0", "3.13.0", "2.1.3"):
        with pytest.raises(ImportError, match=f"for torch 2.13.0, and this is torch {other}; "):
            cpu._require_torch("2.13.0", other)


def test_an_extension_that_cannot_be_loaded_has_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ampfast._C", None)
    monkeypatch.delattr(ampfast, "_C")
    with pytest.raises(ImportError, match=r"core cannot be loaded \(.*_C.*\); build it against"):
        runpy.run_path(cpu.__file__)


def test_metadata_asks_for_torch_alone(sdist, package_info):
    # Older versions of setuptools write requirements here only.
    required = sdist["ampfast.egg-info/requires.txt"].decode()
    assert required.partition("\n[")[0].split() == ["torch>=2.11"]
    assert package_info["Requires-Python"] == ">=3.10"
    assert package_info["License"] == "BSD-3-Clause"
    assert {"demo", "dev", "triton"} <= set(package_info.get_all("Provides-Extra", []))


def test_version_stands_in_one_place(package_info):
    assert ampfast.__version__ == __version__ == package_info["Version"]


def test_version_is_written_in_one_file():
    """The build reads the version from its only place."""
    version = re.compile(rf"(?<![\d.]){re.escape(ampfast.__version__)}(?![\d.])")
    suffixes = {".py", ".pyi", ".toml", ".yml", ".cpp", ".h", ".cu", ".cuh"}
    folders = ("ampfast", "csrc", "tests", "benchmarks", "examples")
    files = [*ROOT.glob("*"), *(file for name in folders for file in (ROOT / name).rglob("*"))]
    writers = [
        file.relative_to(ROOT).as_posix()
        for file in files
        if file.suffix in suffixes and version.search(file.read_text(encoding="utf-8"))
    ]
    assert writers == ["ampfast/_version.py"]


def test_the_changelog_knows_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    newest = text.split("\n## ")[1]
    assert headings[0] == ampfast.__version__ or (
        headings[0] == "Unreleased" and ampfast.__version__ in newest
    )


@pytest.fixture(scope="module")
def automated() -> dict[str, str]:
    """Automation that runs make commands, by name."""
    files = [*ROOT.glob(".github/workflows/*.yml"), *ROOT.glob(".ci/run")]
    if not files:
        pytest.skip("a source distribution has no .github and no .ci")
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def test_automation_runs_commands_of_the_makefile(automated):
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, text in automated.items():
        called = re.findall(r"\bmake ([a-z][a-z0-9-]*)", text)
        if listed := re.search(r"^ +command: \[(.+)\]$", text, re.MULTILINE):
            called += listed[1].split(", ")
        assert called, name
        assert set(called) <= targets, name


def test_ci_has_the_oldest_the_pinned_and_the_newest_torch(build, automated):
    oldest = "{}.{}".format(*build.OLDEST_TORCH)
    pinned = [
        re.search(r"^torch==(\S+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE)[1]
        for name in ("torch.txt", "cuda.txt")
    ]
    for name in ("weekly.yml", "wheels.yml"):
        listed = re.search(r"^ +torch: \[(.+)\]$", automated[name], re.MULTILINE)[1]
        versions = [version.strip('"') for version in listed.split(", ")]
        assert versions[0].startswith(f"{oldest}."), name
        assert set(pinned) <= set(versions), name


def test_workflows_take_actions_of_one_major_version(automated):
    used = [use for text in automated.values() for use in re.findall(r"uses: (\S+)", text)]
    assert used
    assert [use for use in used if not re.fullmatch(r"actions/[a-z-]+@v\d+", use)] == []
    assert len(set(used)) == len({use.partition("@")[0] for use in used})


def make(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs make as a user would, even within another make."""
    variables = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "PYTHONPATH", "VENV", "CXX")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Directory with the files that the Makefile reads before a build."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "csrc").mkdir()
    return tmp_path


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The only line printed by make besides its own final one."""
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize("venv", ["VENV=", "VENV=environment"])
def test_make_reports_an_old_python(checkout, venv):
    old = script(checkout / "old", 'case "$1" in --version) echo Python 3.8.18;; *) exit 1;; esac')
    result = make("test", f"PYTHON={old}", venv, cwd=checkout)
    assert "Python 3.10 or newer" in complaint(result)
    assert "3.8.18" in complaint(result)
    assert not (checkout / "environment").exists()


@pytest.mark.parametrize("venv", ["VENV=", "VENV=environment"])
def test_make_reports_a_missing_compiler(checkout, venv):
    result = make("demo", f"PYTHON={sys.executable}", venv, "CXX=no-such-c++", cwd=checkout)
    assert "`no-such-c++` was not found; install one" in complaint(result)
    assert not (checkout / "environment").exists()


def test_make_reports_a_missing_torch(checkout):
    bare = script(checkout / "bare", f'exec {sys.executable} -S "$@"')
    result = make("test", f"PYTHON={bare}", "VENV=", cwd=checkout)
    assert re.search(
        r"torch, which is missing: run .*pip install 'torch>=2\.11'", complaint(result)
    )


def test_make_alone_lists_every_command(checkout):
    result = make(cwd=checkout)
    assert result.returncode == 0, result.stderr
    for command in ("bench", "build", "check", "clean", "demo", "distclean", "format", "test"):
        assert f"make {command}: " in result.stdout
