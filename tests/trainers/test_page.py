"""Pages on trainers: programs run, versions are the tested ones, links exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import ampfast

ROOT = Path(__file__).parents[2]
USERS = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
PAGE = ROOT / "docs" / "contributing" / "trainers.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROGRAMS = [
    dedent(block)
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", TEXT, re.MULTILINE)
    if block.lstrip().startswith("import ") and "LateScheduler" in block
]
TABLE = re.findall(r"^\| [^|]+ \| (\S+) ([\d.]+) \|$", TEXT, re.MULTILINE)
EXAMPLES = sorted((ROOT / "examples" / "trainers").glob("*.py"))
# Fixtures with which examples run on a CPU.
ON_CPU = dict.fromkeys(("accelerate", "transformers", "trl"), "float16_on_cpu")
ON_CPU["fastai"] = "fastai_on_cpu"
# Dependencies of trainers.
BESIDES = {"pytest", "torchvision"}


@pytest.mark.usefixtures("float16_on_cpu")
@pytest.mark.parametrize("program", PROGRAMS, ids=["accelerate", "transformers"])
def test_a_program_with_overflows(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    made: list[ampfast.GradScaler] = []

    class Overflowing(ampfast.GradScaler):
        def __init__(self, device: str) -> None:
            super().__init__(device, init_scale=2.0**24)
            made.append(self)

    monkeypatch.setattr(ampfast, "GradScaler", Overflowing)
    exec(compile(program, PAGE, "exec"), {"__name__": "__main__"})
    assert [scaler.stats().steps for scaler in made] == [16]
    assert 2 <= made[0].stats().skipped < 14


def test_the_table() -> None:
    pinned = (ROOT / "requirements" / "trainers.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([a-z-]+)==(\S+)$", pinned, re.MULTILINE))
    pins = {name: version for name, version in pins.items() if name not in BESIDES}
    assert dict(TABLE) == pins
    links = [f"../{path.relative_to(ROOT).as_posix()}" for path in EXAMPLES]
    assert sorted(re.findall(r"\]\((\S+/with_\w+\.py)\)", USERS)) == links


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example(
    path: Path, request: pytest.FixtureRequest, run_example: Callable[[str], str]
) -> None:
    name = path.stem.removeprefix("with_")
    library = "lightning" if "fabric" in name else name
    pytest.importorskip(library, reason=f"needs {library}")
    if name == "fabric_fsdp" and not torch.cuda.is_available():
        pytest.skip("Fabric has FSDP for GPUs only")
    if name in ON_CPU:
        request.getfixturevalue(ON_CPU[name])
    assert "steps=4" in run_example(path.name)


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_an_example_refuses_a_cpu(name: str, run_example: Callable[[str], str]) -> None:
    pytest.importorskip(name, reason=f"needs {name}")
    with pytest.raises(SystemExit, match="neither casts to float16 nor unscales"):
        run_example(f"with_{name}.py")
