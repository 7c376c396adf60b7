"""MkDocs hooks that insert sections of the README into the pages.

A line that links to a section of the README, as `[The README's section "Trainers"](...)`, becomes
that section; one that says `The table of the README's section`, its first table. Files that pages
link to outside of docs/ become part of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = re.compile(
    r"""^\[(The|The table of the) README's section "(.+)"\]\(\.\./README\.md#.+\)$""", re.MULTILINE
)
# Sections of the README that have a page here.
PAGES = {
    "learning-rate-schedules": "schedules.md",
    "several-ranks": "distributed.md",
    "trainers": "trainers.md",
}


def on_page_markdown(markdown: str, *, files: Any, config: Any, **_: Any) -> str:
    """Text of a page, with its sections of the README and links to the repository's files."""
    markdown = SECTION.sub(
        lambda match: readme_section(match[2], only_table=match[1] != "The"), markdown
    )
    return re.sub(r"\]\(\.\./([^)#]+)\)", lambda match: _linked(match[1], files, config), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """HTML of a page, without the double colons of docstrings' literal blocks."""
    return html.replace("::</p>", ":</p>")


def readme_section(title: str, *, only_table: bool = False) -> str:
    """Section of the README, with links relative to docs/.

    Raises:
        ValueError: If the README has no such section, or the section no table.
    """
    section = _between(f"\n## {title}\n", "\n## ").strip() + "\n"
    if only_table:
        tables = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
        if tables is None:
            raise ValueError(f"section {title!r} of README.md has no table")
        section = tables[0]
    return _for_docs(section)


def _between(start: str, end: str) -> str:
    _, found, rest = README.partition(start)
    if not found:
        raise ValueError(f"README.md has no {start.strip()!r}")
    return rest.partition(end)[0]


def _for_docs(text: str) -> str:
    """Text with links relative to docs/ instead of the repository's root."""
    for anchor, page in PAGES.items():
        text = text.replace(f"](#{anchor})", f"]({page})")
    text = re.sub(r"\]\((?!https?:|#)(?=[^)]*/)", "](../", text)
    return text.replace("](../docs/", "](")


def _linked(path: str, files: Any, config: Any) -> str:
    """Link to a file of the repository, which becomes part of the site."""
    uri = f"repository/{path}"
    if (ROOT / path).is_file() and files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return f"]({uri})"
