"""Python blocks of docs/; as a program, runs all of them in one process.

Its argument is a file for the results, a line of JSON for each finished block: its name, and
a traceback or null.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))


class Block(NamedTuple):
    """Block of a page, and its position."""

    name: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start(1)) + 1
        blocks.append(Block(f"{page.relative_to(DOCS).as_posix()}:{line}", found[1]))
    return blocks


def run(results: Path) -> None:
    import torch
    import torch.distributed as dist

    # Globals of a block are kept: torch's reducer, as the last owner of a gloo group, holds the GIL
    # while it waits for a thread that may need it (pytorch/pytorch#56297).
    namespaces = []
    with results.open("w", encoding="utf-8") as file:
        for block in (block for page in PAGES for block in blocks_of(page)):
            torch.manual_seed(0)
            failure = None
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                namespaces.append({"__name__": "__main__"})
                try:
                    exec(compile(block.code, block.name, "exec"), namespaces[-1])
                except BaseException:
                    failure = traceback.format_exc()
            # A block that failed halfway must not affect others.
            if dist.is_initialized():
                failure = failure or "it left a process group behind"
                dist.destroy_process_group()
            file.write(json.dumps([block.name, failure]) + "\n")
            file.flush()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
