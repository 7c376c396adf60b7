"""Tools: changes that no test notices."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import python


@pytest.mark.slow
def test_survivors_are_printed_with_their_explanation(tmp_path: Path) -> None:
    module, tests = tmp_path / "grown.py", tmp_path / "test_grown.py"
    module.write_text(
        "def grown(number):\n"
        "    if number > 5:\n"
        "        number = number + 1\n"
        "    # Equivalent: nobody asks\n"
        "    # for it.\n"
        "    seen = max(number, 0)\n"
        "    return seen * 2\n"
    )
    tests.write_text("from grown import grown\n\n\ndef test_it():\n    assert grown(7) == 16\n")
    run = python("tools/mutants.py", module, "--tests", tests)
    assert run.returncode == 1, run.stderr
    assert "10 changes: 7 noticed, 1 explained, 2 neither" in run.stdout
    assert "6 grown (explained)\n  '0' -> '1'" in run.stdout
    for text in ("'number > 5' -> 'number >= 5'", "'5' -> '6'"):
        assert text in run.stdout
