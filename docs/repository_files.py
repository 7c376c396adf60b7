"""MkDocs hooks: files outside of docs/ that pages link to become part of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, *, page: Any, files: Any, config: Any, **_: Any) -> str:
    """Text of a page, with links to the repository's files; contributors' are not searched."""
    deep = page.file.src_uri.startswith("contributing/")
    if deep:
        page.meta["search"] = {"exclude": True}
    up = r"\.\./" * (1 + deep)
    return re.sub(
        rf"\]\({up}((?!\.\.)[^)#]+)\)",
        lambda found: _linked(found[1], files, config, deep),
        markdown,
    )


def on_page_content(html: str, **_: Any) -> str:
    """HTML of a page, without the double colons of docstrings' literal blocks."""
    return html.replace("::</p>", ":</p>")


def _linked(path: str, files: Any, config: Any, deep: bool) -> str:
    uri = f"repository/{path}"
    if (ROOT / path).is_file() and files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return f"]({'../' * deep}{uri})"
