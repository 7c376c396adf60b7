"""What was last found for each optimizer, kept for as long as the optimizer lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["LastChecks"]

Flags = dict[Any, Tensor]


class LastChecks:
    """Flags by optimizer, by identity, through weak references: an id may come back."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Callable[[], object], Flags]] = {}
        # What cannot be referenced weakly is held for one iteration after its last check.
        self._held: set[int] = set()
        self._expiring: set[int] = set()

    def __reduce__(self) -> tuple[type[LastChecks], tuple[()]]:
        # Weak references are of this process: a copy starts empty.
        return LastChecks, ()

    def record(self, optimizer: object, flags: Flags) -> None:
        """Remembers `flags`, the found_inf tensors by device, of the optimizer's last check."""
        key = id(optimizer)
        entry = self._entries.get(key)
        if entry is not None and entry[0]() is optimizer:
            reference = entry[0]
        else:
            reference = self._reference(optimizer)
        self._entries[key] = (reference, flags)
        if key in self._expiring:
            self._expiring.discard(key)
            self._held.add(key)

    def get(self, optimizer: object) -> Flags | None:
        """Returns what was recorded for this very object, or None."""
        entry = self._entries.get(id(optimizer))
        return entry[1] if entry is not None and entry[0]() is optimizer else None

    def end_iteration(self) -> None:
        """Lets go of the objects held since before the last iteration."""
        for key in self._expiring:
            self._entries.pop(key, None)
        self._expiring, self._held = self._held, set()

    def _reference(self, optimizer: object) -> Callable[[], object]:
        key, entries = id(optimizer), self._entries
        try:
            return weakref.ref(optimizer, lambda _: entries.pop(key, None))
        except TypeError:
            self._held.add(key)
            return lambda: optimizer
