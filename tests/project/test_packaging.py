"""Build decisions, source distribution, wheels, and one-line errors of the Makefile."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from importlib import util
from pathlib import Path

import pytest
from support.nvcc import SETUP

import ampfast
from ampfast._version import __version__

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).resolve().parents[2]
SOABI = sysconfig.get_config_var("SOABI")
_SPEC = util.spec_from_file_location("wheels", ROOT / "tools/wheels.py")
WHEELS = util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(WHEELS)


def script(path: Path, text: str) -> Path:
    """Writes an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


ERROR = "/usr/bin/cc: error: unsupported GNU version! gcc later than 15 are not supported!"


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


def test_a_build_goes_on_without_kernels(kernels, tmp_path, monkeypatch, capsys):
    nvcc = tmp_path / "toolkit/bin/nvcc"
    for text, reason in (
        (f"echo warning >&2; echo '{ERROR}' >&2; exit 1", "unsupported GNU"),
        ("exit 3", "exit code 3"),
    ):
        kernels.write_text("of other sources")
        os.utime(kernels, (0, 0))
        script(nvcc, text)
        why = SETUP.build_kernels()
        assert why.startswith("nvcc does not compile them: ") and reason in why
        assert list(tmp_path.glob("kernels.*")) == []
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    SETUP.say_what_is_left_out(SETUP.build_kernels())
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "nvcc was not found" in said and "Triton's kernels serve GPUs" in said
    SETUP.say_what_is_left_out("")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", ["no program", "#!/no/such/shell"])
def test_an_nvcc_that_does_not_start_is_none(content, kernels, tmp_path, monkeypatch):
    nvcc = tmp_path / "toolkit/bin/nvcc"
    nvcc.write_text(content)
    assert re.match("nvcc does not compile them: .Errno ", SETUP.build_kernels())
    monkeypatch.delenv("CUDA_HOME")
    shutil.copy(nvcc, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SETUP.find_nvcc() is None


def test_kernels_are_compiled_again_for_each_of_their_sources():
    """As a compiler finds what they include."""
    host = ROOT / "tests/support/host_cuda"
    command = ["c++", "-MM", "-x", "c++", f"-I{host}", str(ROOT / "csrc/cuda/multi_tensor.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    included = {Path(name).resolve() for name in re.findall(r"\S+csrc\S+", done.stdout)}
    assert included == {ROOT / name for name in SETUP.found(*SETUP.KERNEL_SOURCES)}


def test_headers_are_not_where_debian_installs_others(monkeypatch):
    def get_path(name, scheme="posix_local"):
        return "/nowhere" if scheme == "posix_local" else actual(name, scheme)

    actual = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", get_path)
    runpy.run_path(str(ROOT / "setup.py"))["require_toolchain"]()


def test_nvcc_is_found_behind_a_wrapper_and_by_its_variable(tmp_path, monkeypatch):
    real = script(tmp_path / "toolkit/bin/nvcc", "exit 0")
    says_where = f"echo '#$ TOP={tmp_path}/toolkit/bin/..' >&2"
    wrapper = script(tmp_path / "elsewhere/bin/nvcc", says_where)
    monkeypatch.setenv("PATH", str(wrapper.parent))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert SETUP.find_nvcc() == str(real.resolve())

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    assert SETUP.find_nvcc() == str(wrapper.resolve())

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert SETUP.find_nvcc() is None


def test_a_build_is_keyed_on_its_dependencies(monkeypatch):
    before = SETUP.build_key()
    assert SETUP.build_key() == before
    monkeypatch.setenv("CXXFLAGS", "-DSOMETHING")
    assert SETUP.build_key() != before


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
    assert info["Version"] == ampfast.__version__ == __version__
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
    assert re.fullmatch(rf"ampfast-{__version__}-cp3\d+-cp3\d+-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = archive.read(f"ampfast-{__version__}.dist-info/METADATA").decode()
    assert [name for name in names if name.endswith(".so")] == cores
    assert {"ampfast/grad_scaler.py", "ampfast/kernels.fatbin"} < {*names}
    required = Parser().parsestr(info).get_all("Requires-Dist")
    (torch,) = [line for line in required if "extra ==" not in line]
    assert set(torch.removeprefix("torch").split(",")) == {">=2.11", "<2.14", "!=2.12.*"}

    WHEELS.require_cores_and_kernels(wheel, 2)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("ampfast.libs/libtorch-1234.so.2", b"")
    without = tmp_path / "without.whl"
    zipfile.ZipFile(without, "w").close()
    with pytest.raises(SystemExit, match=r"without.whl has no ampfast/kernels.fatbin"):
        WHEELS.require_cores_and_kernels(without, 0)
    with pytest.raises(SystemExit, match=r"should hold 2 cores alone, has .*libtorch"):
        WHEELS.require_cores_and_kernels(wheel, 2)


def test_an_isolated_build_takes_the_installed_torch(sources):
    assert backend("get_requires_for_build_wheel", cwd=sources) == "[]"
    assert backend("get_requires_for_build_editable", cwd=sources) == "[]"
    oldest = "torch>={}.{}".format(*SETUP.OLDEST_TORCH)
    without = backend("get_requires_for_build_wheel", cwd=sources, hidden="torch")
    assert without == repr([oldest])


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        (["2.13"], "not a version of torch, such as 2.13.0: 2.13"),
        (["2.13.0", "2.13.1"], "one patch release of a torch"),
    ],
)
def test_wheels_for_no_or_the_same_torch_are_refused(monkeypatch, versions, text):
    monkeypatch.setattr(sys, "argv", ["wheels.py", "make", *versions])
    with pytest.raises(SystemExit, match=re.escape(text)):
        WHEELS.main()


@pytest.mark.parametrize(
    ("torch_version", "expected"),
    [
        ("2.13.0+cpu", ("+torch2.13", "torch==2.13.*")),
        ("2.14.1", ("+torch2.14", "torch==2.14.*")),
    ],
)
def test_a_build_names_its_torch(torch_version, expected):
    assert SETUP.fits(torch_version) == expected


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


@pytest.mark.parametrize("why", ["", "nvcc was not found"])
def test_kernels_of_a_wheel(monkeypatch, tmp_path, why):
    tree = tmp_path / "tree"
    (tree / "ampfast").mkdir(parents=True)
    (tree / "setup.py").write_text(
        f"def build_kernels():\n    open('ampfast/kernels.fatbin', 'w').close()\n    return {why!r}"
    )
    monkeypatch.setattr(WHEELS, "unpacked", lambda sources: tree)
    monkeypatch.setattr(WHEELS, "LOG", tmp_path / "log")
    kept = tmp_path / "kernels.fatbin"
    if why:
        with pytest.raises(SystemExit, match=why):
            WHEELS.build_kernels(tmp_path, kept)
    else:
        WHEELS.build_kernels(tmp_path, kept)
    assert kept.exists() is not bool(why)


def test_wheels_and_ci_serve_the_oldest_the_pinned_and_the_newest_torch(automated, monkeypatch):
    served, *pinned = [
        re.findall(r"^torch==([\d.]+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE)
        for name in ("torches.txt", "torch.txt", "cuda.txt")
    ]
    assert served[0].startswith("{}.{}.".format(*SETUP.OLDEST_TORCH))
    assert {version for (version,) in pinned} <= set(served)
    listed = re.search(r"^ +torch: \[(.+)\]$", automated["weekly.yml"], re.MULTILINE)[1]
    assert re.findall(r'"(.+?)"', listed) == served
    monkeypatch.setattr(sys, "version_info", (3, 14))
    assert WHEELS.listed() == served
    monkeypatch.setattr(sys, "version_info", (3, 10))
    assert WHEELS.listed() == served[:-1]


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
        r"torch, which is missing: run .*pip install 'torch>=2\.10'", complaint(result)
    )


def test_make_alone_lists_every_command(checkout):
    result = make(cwd=checkout)
    assert result.returncode == 0, result.stderr
    for command in ("build", "check", "demo", "smoke", "test", "wheels"):
        assert f"make {command}: " in result.stdout
