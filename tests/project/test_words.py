"""Words that pages and comments do without: where they are found, and where not."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import ROOT, module_at

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
