"""Choice of the compiled core by torch's version, and its refusals."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ampfast
from ampfast import cores
from ampfast.backends import core


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Folder of cores for three versions of torch."""
    for name in ("torch2.9", "torch2.13", "torch2.14", "__pycache__"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("patch", ["0", "1+cu130", "0a0+git1234"])
def test_the_core_of_torchs_minor_version_is_chosen(wheel, patch):
    assert cores.folders_for(f"2.13.{patch}", wheel) == [str(wheel / "torch2.13")]


@pytest.mark.parametrize("version", ["2.15.0", "2.1.3", "3.13.0"])
def test_a_torch_without_a_core_gets_the_remedy(wheel, version):
    with pytest.raises(ImportError) as caught:
        cores.folders_for(version, wheel)
    text = str(caught.value)
    assert text.startswith(f"this is torch {version}, and this wheel of ampfast has compiled cores")
    assert "for torch 2.9, 2.13, 2.14; " in text
    assert "pip install --no-build-isolation ." in text


def test_a_build_for_one_torch_has_no_choice(tmp_path):
    assert cores.folders_for("2.15.0", tmp_path) == []


@pytest.mark.slow
def test_the_package_imports_the_chosen_core(tmp_path):
    """A copy of the package, laid out as in a wheel."""
    source = Path(ampfast.__file__).parent
    package = tmp_path / "ampfast"
    shutil.copytree(
        source, package, ignore=shutil.ignore_patterns("_C.*", "torch2*", "__pycache__")
    )
    minor = ".".join(torch.__version__.split(".")[:2])
    for name in (f"torch{minor}", "torch2.1"):
        (package / "cores" / name).mkdir()
    core = Path(ampfast._C.__file__)
    shutil.copy(core, package / "cores" / f"torch{minor}")
    command = [sys.executable, "-c", "import ampfast; print(ampfast._C.__file__)"]
    run = {"cwd": tmp_path, "capture_output": True, "text": True}
    result = subprocess.run(command, check=True, **run)
    assert result.stdout.strip() == str(package / "cores" / f"torch{minor}" / core.name)

    shutil.rmtree(package / "cores" / f"torch{minor}")
    result = subprocess.run(command, check=False, **run)
    last = result.stderr.strip().rpartition("\n")[2]
    assert last.startswith(f"ImportError: this is torch {torch.__version__}, and this wheel")


def test_a_core_for_another_torch_is_refused():
    core._require_torch("2.13.0", "2.13.1+cu130")
    for other in ("2.14.0", "3.13.0", "2.1.3"):
        with pytest.raises(ImportError, match=f"for torch 2.13.0, and this is torch {other}; "):
            core._require_torch("2.13.0", other)


def test_a_core_that_cannot_be_loaded_has_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ampfast._C", None)
    monkeypatch.delattr(ampfast, "_C")
    with pytest.raises(ImportError, match=r"core cannot be loaded \(.*_C.*\); build it against"):
        runpy.run_path(core.__file__)
