"""Programs and table of the README, and what is compiled."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ptx_emulator import cuda
from ptx_emulator.assembler import SYNTAX
from ptx_emulator.cache import built

FOLDER = Path(__file__).parents[1]
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def program(name: str) -> str:
    """The Python block that contains a name."""
    [found] = [block for block in blocks("python") if name in block]
    return found


def run(text: str, folder: Path) -> str:
    """Output of a program, run from a file, as Triton reads a kernel's source, in a process."""
    (folder / "program.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_without_compilers_of_kernels() -> None:
    exec(compile(program("launch(kernels"), "README.md", "exec"), {})


def test_the_core_imports_nothing_but_python(tmp_path: Path) -> None:
    foreign = {"ampfast", "numpy", "torch", "triton"}
    text = f"import sys, ptx_emulator.cuda; print(*{foreign} & {{*sys.modules}})"
    assert run(text, tmp_path) == "\n"


TRITON_ERRORS = """
for given, options in ((x[:-1], {"enable_fp_fusion": False}), (x, {"enable_fp_fusion": True})):
    try:
        scale[(8,)](given, 3.0, 1000, BLOCK=128, **options)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_triton_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beyond, contracted = run(program("triton_driver") + TRITON_ERRORS, tmp_path).splitlines()
    assert re.match(r"PtxError: scale: .*reads memory that the launch was not given", beyond)
    assert re.match(r"UnsupportedPtxError: .*without a rounding modifier", contracted)
    from ptx_emulator import triton_driver

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        triton_driver.activate(90)


CUDA_ERROR = """
with emulation(memory=[Range.of(x[:-1])]):
    code = run(x)
libcuda.cuGetErrorString(code, ctypes.byref(text))
print(code, ctypes.string_at(text.value).decode())
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_a_cuda_kernel(tmp_path: Path) -> None:
    [source] = blocks("cuda")
    (tmp_path / "scale.cu").write_text(source)
    error = run(program("cuda.compiled") + CUDA_ERROR, tmp_path)
    assert error.startswith("719 ") and "reads memory that the launch was not given" in error


def test_nvcc_may_be_missing() -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(FileNotFoundError, match="nvcc"):
        patch.setenv("PATH", "")
        cuda.compiled("scale.cu")


def test_a_build_is_kept_until_a_file_or_a_setting_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PTX_EMULATOR_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "source"
    made = []

    def build(text: str, settings: object) -> Path:
        source.write_text(text)
        return built("name", [source], settings, made.append)

    first = build("one", 1)
    assert build("one", 1) == first
    assert len({first, build("two", 1), build("one", 2)}) == len(made) == 3
    assert {folder.parent for folder in made}.isdisjoint((tmp_path / "cache").iterdir())


def test_the_table_lists_every_instruction_and_modifier() -> None:
    rows = re.findall(r"^\| (`.*`) \| (.*?) ?\| ", README, re.MULTILINE)
    listed = {
        name: set(re.findall(r"`([^`]+)`", modifiers))
        for names, modifiers in rows
        for name in re.findall(r"`([^`]+)`", names)
    }
    assert listed == {name: modifiers for name, (_, modifiers) in SYNTAX.items()}
