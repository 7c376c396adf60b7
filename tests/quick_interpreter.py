"""Triton's interpreter without what it repeats, to no effect, in a launch."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Patches:
    """What was replaced in Triton's language for one launch."""

    def __init__(self, scope: Any, patched: set[int]) -> None:
        self._scope = scope
        self._patched = patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


def patch_once_a_launch() -> None:
    """Replaces the language's functions once a launch.

    The interpreter does it again in every call of a function by another, which takes more than half
    of the time of a launch. One thread at a time launches.
    """
    plain = interpreter._patch_lang
    patched: set[int] = set()

    def patch(function: Any) -> _Patches | None:
        # The language goes by two names: that of kernels, and that of its own library.
        names = {id(x) for x in function.__globals__.values() if x is tl or x is tl.core}
        if names <= patched:
            return None  # a call in a launch, which nothing is restored after
        patches = _Patches(plain(function), patched)
        patched.update(names)
        return patches

    interpreter._patch_lang = patch
