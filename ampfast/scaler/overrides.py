"""Methods that a subclass or an instance overrides, and torch's own, which then call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import _refresh_per_optimizer_state

Methods = dict[str, Callable[..., Any] | None]


def original_methods(kind: type, *names: str) -> Methods:
    """Returns methods as they are now: what replaces one later, on the class too, is a hook.

    None for one of torch's that something has replaced before.
    """
    source = _refresh_per_optimizer_state.__code__.co_filename
    found: Methods = {}
    for name in names:
        method = getattr(kind, name)
        code = getattr(method, "__code__", None)
        is_original = name in kind.__dict__ or (code and code.co_filename == source)
        found[name] = method if is_original else None
    return found


def replace_method(place: Any, name: str, method: Callable[..., Any]) -> None:
    """Replaces a method of a class by one that only watches it, which is then no hook."""
    original = vars(place)[name]
    setattr(place, name, method)
    for found in vars(place).get("_originals", ()):
        if found.get(name) is original:
            found[name] = method
