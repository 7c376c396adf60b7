"""docs/trainers.md: tested versions, and links to the examples."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = re.findall(
    r"^\| \[.*?\]\((.*?)\) \|.*\| (\S+) (\S+) \|$",
    (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
# Dependencies of trainers.
BESIDES = {"pytest", "torchvision"}


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
