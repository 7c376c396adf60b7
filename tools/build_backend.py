"""setuptools' build backend, which builds against the torch that is already installed.

pip builds in a temporary environment, with the interpreter of the one that it installs into. The
torch of the latter is the one that the core must fit, so that is visible here; only without one, or
where a frontend builds with another interpreter, is torch a requirement of the build.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.util import find_spec

# Last, so that the environment's own packages come first.
sys.path += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]

from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    """Returns what a build needs besides ``build-system.requires``."""
    return [] if find_spec("torch") else ["torch>=2.10"]


get_requires_for_build_editable = get_requires_for_build_wheel
