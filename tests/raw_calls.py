"""Raw calls of the short way, watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

Answers = dict[str, list[bool]]


def watched(place: Any, names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Calls of these names in a module or class: whether each took the short way."""
    found: Answers = {name: [] for name in names}

    def watching(name: str) -> Callable[..., Any]:
        original = getattr(place, name)

        def call(*args: Any) -> Any:
            answer = original(*args)
            found[name].append(answer is not None)
            return answer

        return call

    for name in names:
        monkeypatch.setattr(place, name, watching(name))
    return found
