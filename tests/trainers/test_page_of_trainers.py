"""docs/trainers.md: its programs run, and their schedules wait for skipped steps."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

import ampfast

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
pytest.importorskip("transformers", reason="needs transformers")

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
PROGRAMS = [
    dedent(block)
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    if block.lstrip().startswith("import ") and "LateScheduler" in block
]


def forget() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.usefixtures("float16_on_cpu")
@pytest.mark.parametrize("program", PROGRAMS, ids=["accelerate", "transformers"])
def test_a_program_with_overflows(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ampfast.GradScaler] = []

    class Overflowing(ampfast.GradScaler):
        def __init__(self, device: str) -> None:
            super().__init__(device, init_scale=2.0**24)
            made.append(self)

    monkeypatch.setattr(ampfast, "GradScaler", Overflowing)
    forget()  # what the trainer of another test left
    try:
        exec(compile(program, PAGE, "exec"), {"__name__": "__main__"})
    finally:
        forget()
    assert [scaler.stats().steps for scaler in made] == [16]
    assert 2 <= made[0].stats().skipped < 14
