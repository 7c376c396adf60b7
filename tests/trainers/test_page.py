"""docs/trainers.md: its programs run, its versions are the tested ones, its links exist."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

import ampfast

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trainers.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROGRAMS = [
    dedent(block)
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", TEXT, re.MULTILINE)
    if block.lstrip().startswith("import ") and "LateScheduler" in block
]
TABLE = re.findall(r"^\| \[.*?\]\((.*?)\) \|.*\| (\S+) (\S+) \|$", TEXT, re.MULTILINE)
# Dependencies of trainers.
BESIDES = {"pytest", "torchvision"}


@pytest.mark.usefixtures("float16_on_cpu")
@pytest.mark.parametrize("program", PROGRAMS, ids=["accelerate", "transformers"])
def test_a_program_with_overflows(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("accelerate.state", reason="needs accelerate")
    pytest.importorskip("transformers", reason="needs transformers")
    made: list[ampfast.GradScaler] = []

    class Overflowing(ampfast.GradScaler):
        def __init__(self, device: str) -> None:
            super().__init__(device, init_scale=2.0**24)
            made.append(self)

    def forget() -> None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()

    monkeypatch.setattr(ampfast, "GradScaler", Overflowing)
    forget()  # what the trainer of another test left
    try:
        exec(compile(program, PAGE, "exec"), {"__name__": "__main__"})
    finally:
        forget()
    assert [scaler.stats().steps for scaler in made] == [16]
    assert 2 <= made[0].stats().skipped < 14


def test_versions() -> None:
    pinned = (ROOT / "requirements" / "trainers.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([a-z-]+)==(\S+)$", pinned, re.MULTILINE))
    assert {name: version for _, name, version in TABLE} == {
        name: version for name, version in pins.items() if name not in BESIDES
    }


def test_examples() -> None:
    examples = (ROOT / "examples" / "trainers").glob("*.py")
    assert sorted(link for link, _, _ in TABLE) == sorted(
        f"../{path.relative_to(ROOT).as_posix()}" for path in examples
    )
