"""Tools: words that pages and comments do without, and changes that no test notices."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import ROOT, module_at, python

words = module_at(ROOT / "tools" / "words.py")

PAGE = """# Title
The latter is told. `told` and [a link](told.md) are not found.
```python
told = "told"
```
It stands
in for another.
"""
MODULE = '''"""Such a module."""

TEXT = "told"  # hence this


def told():
    """Returns `told`.

    Those
    of others.
    """
    # A clip in place
    # of torch's.
'''
CORE = """// Gone.
int told = 1;  // but
               // for this
"""


def test_words_of_prose_are_found_and_code_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"docs/page.md": PAGE, "ampfast/a/module.py": MODULE, "csrc/cpu/core.h": CORE}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert words.main(tmp_path) == 1
    found = [line.rpartition(": use ")[0] for line in capsys.readouterr().out.splitlines()]
    assert found == [
        "ampfast/a/module.py:1:Such a",
        "ampfast/a/module.py:3:hence",
        "ampfast/a/module.py:9:Those of",
        "ampfast/a/module.py:12:in place of",
        "csrc/cpu/core.h:1:Gone",
        "csrc/cpu/core.h:2:but for",
        "docs/page.md:2:The latter",
        "docs/page.md:2:told",
        "docs/page.md:6:stands in",
    ]


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
