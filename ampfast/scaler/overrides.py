"""Methods that a subclass or an instance overrides, and torch's own, which then call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Methods = dict[str, Callable[..., Any]]


def original_methods(kind: type, *names: str) -> Methods:
    """Returns methods as they are now: what replaces one later, on the class too, is a hook."""
    return {name: getattr(kind, name) for name in names}


def replace_method(place: Any, name: str, method: Callable[..., Any]) -> None:
    """Replaces a method of a class by one that only watches it, which is then no hook."""
    original = vars(place)[name]
    setattr(place, name, method)
    for found in vars(place).get("_originals", ()):
        if found.get(name) is original:
            found[name] = method
