"""Triton's interpreter without repeated patching within a launch."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Patches:
    """Replaced functions of Triton's language during one launch."""

    def __init__(self, scope: Any, patched: set[int]) -> None:
        self._scope = scope
        self._patched = patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


def patch_once_a_launch() -> None:
    """Replaces the language's functions once per launch.

    The interpreter does so in every call between functions, which takes more than half
    of the time of a launch. One thread at a time launches.
    """
    plain = interpreter._patch_lang
    patched: set[int] = set()

    def patch(function: Any) -> _Patches | None:
        # The language has two modules: that of kernels, and its own library.
        names = {id(x) for x in function.__globals__.values() if x is tl or x is tl.core}
        if names <= patched:
            return None  # a call within a launch, after which nothing is restored
        patches = _Patches(plain(function), patched)
        patched.update(names)
        return patches

    interpreter._patch_lang = patch
