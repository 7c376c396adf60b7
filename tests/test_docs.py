"""Documentation: code blocks run, every page is in the menu, and links resolve."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import docs_blocks
import pytest
from docs_blocks import DOCS, PAGES

ROOT = DOCS.parent
BLOCKS = [block.name for page in PAGES for block in docs_blocks.blocks_of(page)]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Results by block, all run in one process, since importing torch takes seconds."""
    file = tmp_path_factory.mktemp("docs") / "results"
    done = subprocess.run(
        [sys.executable, docs_blocks.__file__, file],
        cwd=file.parent,
        # The programs are for a CPU, and DataParallel would take every GPU.
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    ended = dict(json.loads(line) for line in lines)
    cut_off = f"the process ended before it, with {done.returncode}:\n{done.stderr}"
    return {name: ended.get(name, cut_off) for name in BLOCKS}


@pytest.mark.parametrize("name", BLOCKS)
def test_each_block_runs(results: dict[str, str | None], name: str) -> None:
    if failure := results[name]:
        pytest.fail(failure)


def test_no_code_hides_behind_another_fence() -> None:
    for page in PAGES:
        fences = re.findall(r"^[ \t]*[`~]{3,}[ \t]*(\S*)", page.read_text(encoding="utf-8"), re.M)
        assert set(fences) <= {"", "python", "console", "diff"}, page.name
        assert fences.count("python") == len(docs_blocks.blocks_of(page)), page.name


def test_every_page_is_in_the_menu() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = settings.split("\nnav:\n")[1].split("\n\n")[0]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
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


def test_the_make_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)", text, re.MULTILINE))
    assert named
    for command in {first or second for first, second in named}:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command


def test_sections_included_from_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    titles = [
        title
        for page in pages
        for title in re.findall(r"""^\[The .*README's section "(.+)"\]\(""", page, re.MULTILINE)
    ]
    assert len(titles) >= 5
    assert [title for title in titles if f"\n## {title}\n" not in readme] == []
