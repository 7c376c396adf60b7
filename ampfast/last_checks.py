"""What is kept of each optimizer for as long as it lives: its last checks, for one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch import Tensor

__all__ = ["ByOptimizer", "LastChecks"]

Flags = dict[Any, Tensor]
Value = TypeVar("Value")


class ByOptimizer(Generic[Value]):
    """Values by optimizer, by identity, through weak references: an id may come back."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Callable[[], object], Value]] = {}
        # What cannot be referenced weakly is held for one iteration after its last check.
        self._held: set[int] = set()
        self._expiring: set[int] = set()

    def __iter__(self) -> Iterator[tuple[Any, Value]]:
        """Gives the optimizers that live, with their values, in the order of their first."""
        for reference, value in list(self._entries.values()):
            optimizer = reference()
            if optimizer is not None:
                yield optimizer, value

    def record(self, optimizer: object, value: Value) -> None:
        """Remembers the value of an optimizer that is checked now."""
        key = id(optimizer)
        entry = self._entries.get(key)
        if entry is not None and entry[0]() is optimizer:
            reference = entry[0]
        else:
            reference = self._reference(optimizer)
        self._entries[key] = (reference, value)
        if key in self._expiring:
            self._expiring.discard(key)
            self._held.add(key)

    def get(self, optimizer: object) -> Value | None:
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


# The found_inf tensors, by device, of the last check.
LastChecks = ByOptimizer[Flags]
