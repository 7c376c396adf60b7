"""MkDocs hook: the name of the site ends with the version of the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

VERSION = Path(__file__).resolve().parents[1] / "ampfast/_version.py"


def on_config(config: Any, **_: Any) -> Any:
    """Settings with the version, which is not imported: that would need torch."""
    version = re.findall(r'^__version__ = "(.+)"$', VERSION.read_text("utf-8"), re.MULTILINE)
    config.site_name = " ".join([config.site_name, *version])
    return config
