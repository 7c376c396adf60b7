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
SOURCES = ["csrc/cuda/kernels.cu"]
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


def nvcc_of(path: Path, release: str, then: str = "exit 0") -> str:
    """A compiler of that CUDA version, which runs `then` on a source."""
    says = f"echo 'Cuda compilation tools, release {release}, V{release}.88'"
    return str(script(path, f'case "$*" in *--version*) {says}; exit 0;; esac\n{then}'))


UNKNOWN = "error: #error -- unsupported GNU version! gcc versions later than 15 are not supported!"


@pytest.mark.parametrize(
    ("override", "sources", "torch_cuda", "nvcc", "reason"),
    [
        (None, SOURCES, "13.0", ("13.0",), None),
        ("1", SOURCES, "13.0", ("13.1",), None),
        ("0", SOURCES, "13.0", ("13.0",), "unasked"),
        ("", [], "13.0", ("13.0",), "no CUDA sources"),
        (None, SOURCES, None, ("13.0",), "torch is built without CUDA"),
        (None, SOURCES, "13.0", None, "nvcc was not found"),
        (None, SOURCES, "13.0", ("12.4",), "nvcc is of CUDA 12.4, torch of 13.0"),
        (None, SOURCES, "13.0", ("13.0", f"echo '{UNKNOWN}' >&2; exit 1"), "unsupported GNU"),
        (None, SOURCES, "13.0", ("13.0", "exit 3"), "nvcc does not compile here: exit code 3"),
        (None, SOURCES, "13.0", ("13.0", '[ -z "$CC" ] || exit 4'), None),
    ],
)
def test_cuda_is_built_where_it_can_be(
    override, sources, torch_cuda, nvcc, reason, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("CC", raising=False)
    path = nvcc and nvcc_of(tmp_path / "nvcc", *nvcc)
    assert SETUP.wants_cuda(override, sources, torch_cuda, path) is (reason is None)
    said = capsys.readouterr().err
    is_told = override != "0" and torch_cuda is not None and reason is not None
    assert said.count("\n") == is_told
    if is_told:
        assert reason in said and "Triton's kernels serve GPUs" in said
    if override != "0" and reason:
        with pytest.raises(SystemExit, match=f"AMPFAST_CUDA=1, but .*{reason}"):
            SETUP.wants_cuda("1", sources, torch_cuda, path)
        assert capsys.readouterr().err == ""


def test_nvcc_is_tried_with_the_compiler_of_the_build(tmp_path, monkeypatch):
    nvcc = nvcc_of(tmp_path / "nvcc", "13.0", 'case "$*" in *"-ccbin old-gcc "*) exit 5;; esac')
    monkeypatch.delenv("CC", raising=False)
    assert SETUP.mismatch(nvcc, "13.0") == ""
    monkeypatch.setenv("CC", "old-gcc")
    assert SETUP.mismatch(nvcc, "13.0") == "nvcc does not compile here: exit code 5"


@pytest.mark.parametrize("content", ["no program", "#!/no/such/shell"])
def test_an_nvcc_that_does_not_start_is_none(content, tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(content)
    nvcc.chmod(0o755)
    assert re.match("nvcc does not compile here: .Errno ", SETUP.mismatch(str(nvcc), "13.0"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SETUP.find_nvcc() is None


def test_headers_are_not_where_debian_installs_others(monkeypatch):
    def get_path(name, scheme="posix_local"):
        return "/nowhere" if scheme == "posix_local" else actual(name, scheme)

    actual = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", get_path)
    runpy.run_path(str(ROOT / "setup.py"))["require_toolchain"]()


@pytest.mark.parametrize("ninja", [True, False], ids=["ninja", "no ninja"])
@pytest.mark.parametrize("override", ["", "1"])
def test_a_build_goes_on_without_kernels_that_do_not_compile(tmp_path, override, ninja):
    """A core of one line, with a torch that says that it is built with CUDA."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "ampfast").mkdir()
    (tmp_path / "csrc/cuda").mkdir(parents=True)
    (tmp_path / "csrc/cuda/kernels.cu").write_text("")
    init = '#include <Python.h>\nextern "C" PyObject* PyInit__C() { return 0; }\n'
    (tmp_path / "csrc/module.cpp").write_text(init)
    preprocesses = """case " $* " in *" -E "*) exit 0;; *) exit 6;; esac"""
    nvcc_of(tmp_path / "toolkit/bin/nvcc", "13.0", preprocesses)
    code = (
        "import runpy, sys, torch.version; torch.version.cuda = '13.0'\n"
        "from torch.utils import cpp_extension\n"
        f"cpp_extension.is_ninja_available = lambda: {ninja}\n"
        f"cpp_extension.CUDA_HOME = {str(tmp_path / 'toolkit')!r}\n"
        "sys.argv = ['setup.py', '--quiet', 'build_ext', '--inplace']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    variables = {"CUDA_HOME": str(tmp_path / "toolkit"), "AMPFAST_CUDA": override}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, **variables, "TORCH_CUDA_ARCH_LIST": "9.0"},
        capture_output=True,
        text=True,
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("ampfast is built")]
    assert (done.returncode == 0) is (len(told) == 1) is (override == ""), done.stderr
    built = [*tmp_path.glob("ampfast/_C.*.so")]
    assert len(built) == len(told)
    if built:
        assert b"libcudart" not in built[0].read_bytes()


@pytest.mark.parametrize("override", ["2", "yes", " 1"])
def test_other_values_of_the_override_are_refused(override):
    with pytest.raises(SystemExit, match=re.escape(repr(override))):
        SETUP.wants_cuda(override, SOURCES, "13.0", None)


def test_architectures_are_supported_by_nvcc(tmp_path):
    nvcc = script(tmp_path / "nvcc", "echo sm_75; echo sm_80; echo sm_90; echo sm_999")
    assert SETUP.cuda_architectures(str(nvcc)) == "7.5;8.0;9.0+PTX"
    # Which torch's build refuses.
    assert SETUP.cuda_architectures(str(script(tmp_path / "nvcc", "exit 9"))) == "+PTX"


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
    assert [name for name in held if name.endswith((".so", ".pyc", ".o"))] == []


def test_metadata_of_the_sources(sources):
    info = Parser().parsestr((sources / "PKG-INFO").read_text(encoding="utf-8"))
    assert info["Version"] == ampfast.__version__ == __version__
    assert info["Requires-Python"] == ">=3.10"
    assert info["License"] == "BSD-3-Clause"
    assert {"dev", "examples", "triton"} <= set(info.get_all("Provides-Extra", []))
    required = info.get_all("Requires-Dist")
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.11"]


def test_a_wheel_of_cores(sources, tmp_path):
    """Its metadata and contents; the cores are stand-ins, and torch is not needed."""
    tree = shutil.copytree(sources, tmp_path / "tree")
    cores = [f"ampfast/cores/torch{minor}/_C.{SOABI}.so" for minor in ("2.11", "2.13")]
    for core in cores:
        (tree / core).parent.mkdir()
        (tree / core).write_bytes(b"")
    wheel = tmp_path / backend("build_wheel", "..", cwd=tree, hidden="torch")
    assert re.fullmatch(rf"ampfast-{__version__}-cp3\d+-cp3\d+-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = archive.read(f"ampfast-{__version__}.dist-info/METADATA").decode()
    assert [name for name in names if name.endswith(".so")] == cores
    assert "ampfast/grad_scaler.py" in names
    required = Parser().parsestr(info).get_all("Requires-Dist")
    (torch,) = [line for line in required if "extra ==" not in line]
    assert set(torch.removeprefix("torch").split(",")) == {">=2.11", "<2.14", "!=2.12.*"}

    WHEELS.require_cores_alone(wheel, 2)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("ampfast.libs/libtorch-1234.so.2", b"")
    with pytest.raises(SystemExit, match=r"should hold 2 cores alone, has .*libtorch"):
        WHEELS.require_cores_alone(wheel, 2)


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
        r"torch, which is missing: run .*pip install 'torch>=2\.11'", complaint(result)
    )


def test_make_alone_lists_every_command(checkout):
    result = make(cwd=checkout)
    assert result.returncode == 0, result.stderr
    for command in ("build", "check", "demo", "smoke", "test", "wheels"):
        assert f"make {command}: " in result.stdout
