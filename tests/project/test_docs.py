"""README and documentation: code blocks run; commands, files, functions and links exist."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ampfast

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
PAGES = sorted(DOCS.glob("**/*.md"))
BLOCKS = [
    (page, text.count("\n", 0, found.start(1)) + 1, found[1])
    for page in (README, *PAGES)
    for text in [page.read_text(encoding="utf-8")]
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")

# Globals of blocks that ran: torch's reducer, as the last owner of a gloo group, holds the GIL
# while it waits for a thread that may need it (pytorch/pytorch#56297).
kept: list[dict[str, Any]] = []


@pytest.fixture
def no_group_left() -> Iterator[None]:
    """Destroys a process group that a block leaves behind, and fails."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("it left a process group behind")


@pytest.mark.sweep
@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.usefixtures("no_group_left")
@pytest.mark.parametrize(
    ("page", "line", "code"), BLOCKS, ids=[f"{page.stem}:{line}" for page, line, _ in BLOCKS]
)
def test_each_block_runs(page: Path, line: int, code: str) -> None:
    if "DataParallel(" in code and torch.cuda.is_available():
        pytest.skip("it is for a CPU, and DataParallel takes every GPU")
    torch.manual_seed(0)
    kept.append({"__name__": "__main__"})
    # A traceback names the line of the page.
    exec(compile("\n" * (line - 1) + code, page, "exec"), kept[-1])


def test_no_code_hides_behind_another_fence() -> None:
    for page in (README, *PAGES):
        fences = re.findall(r"^[ \t]*[`~]{3,}[ \t]*(\S*)", page.read_text(encoding="utf-8"), re.M)
        assert set(fences) <= {"", "python", "console", "diff"}, page.name
        assert fences.count("python") == sum(block[0] == page for block in BLOCKS), page.name
    assert any(block[0] == README for block in BLOCKS)


def test_quoted_output_is_that_of_the_committed_runs() -> None:
    printed = (ROOT / "benchmarks/results/printed.txt").read_text(encoding="utf-8")
    readme, migration = (page.read_text("utf-8") for page in (README, DOCS / "migration.md"))
    command = "python -m ampfast compare --steps 100 examples/digits.py --scaler torch\n"
    assert readme.count(command) == migration.count(command) == printed.count(command) == 1
    for page in (readme, migration):
        quoted = page.split(command)[1].split("```")[0].strip()
        lines = printed.split(command)[1].split("\n\n$ ")[0].splitlines()
        assert [line for line in lines if line in quoted.splitlines()] == quoted.splitlines()
    losses = re.findall(r"^cl.+?  +(\d\.\d+)  ", printed, re.MULTILINE)
    assert len(losses) == 3
    told = re.findall(r"^\|.*bad batches.* \| (\d\.\d+) \|$", readme, re.MULTILINE)
    assert told == [f"{float(loss):.2f}" for loss in losses]
    assert "in 10 seeds torch's scaler ruined 10 models" in printed
    assert "ruins the model in 10 of 10 seeds, ampfast in none" in readme


def test_every_page_is_in_the_menu_or_linked_from_a_page_there() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = settings.split("\nnav:\n")[1].split("\n\n")[0]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    hidden = re.findall(r"^not_in_nav: /(\S+)$", settings, re.MULTILINE)
    assert sorted(listed + hidden) == [page.relative_to(DOCS).as_posix() for page in PAGES]
    links = {path for page in listed for path, _ in LINK.findall((DOCS / page).read_text("utf-8"))}
    assert set(hidden) <= links
    assert re.findall(r"^  - (.+):$", nav, re.MULTILINE) == ["Start", "Use", "For contributors"]


@pytest.mark.parametrize("page", [README, CONTRIBUTING, *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), path
        if anchor:
            assert anchor in anchors_of(target), f"{path}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """Ids that MkDocs gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", t).strip().lower()) for t in titles}


def test_every_public_name_is_in_the_api_reference() -> None:
    shown: list[Any] = []
    blocks = re.split(r"^::: ", (DOCS / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for block in blocks[1:]:
        path, names = block.split("\n")[0], re.findall(r"^ +members: \[(.+)\]$", block, re.M)
        if path in sys.modules:
            page = sys.modules[path]
            members = names[0].split(", ") if names else page.__all__
            shown += [page, *(getattr(page, name) for name in members)]
        else:
            module, _, name = path.rpartition(".")
            shown.append(getattr(import_module(module), name))
    public = [name for name in ampfast.__all__ if not name.startswith("_")]
    assert [name for name in public if getattr(ampfast, name) not in shown] == []


INTERNALS = (DOCS / "internals.md").read_text(encoding="utf-8")
NAMED = [
    (path, name)
    for path, names in re.findall(r"`([\w/]+\.\w+)`:((?:\s+`\w+`,?)+)", INTERNALS)
    for name in re.findall(r"`(\w+)`", names)
]


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part)
def test_a_function_is_where_internals_say(path: str, name: str) -> None:
    # A definition begins a line, or follows attributes; methods are indented, in Python alone.
    is_python = path.endswith(".py")
    definition = (
        rf"^ *(?:def|class) {name}\b" if is_python else rf"^\w.*(?:\)\n +)?\b{name}(?:\(| \{{| : )"
    )
    assert re.search(definition, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
