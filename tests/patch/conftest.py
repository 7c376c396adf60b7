"""Fixtures of the `patch()` tests, which restore torch."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from originals import is_patched, snapshot

import ampfast


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Starts and ends each test unpatched, with every name restored."""
    assert not is_patched()
    before = snapshot()
    yield
    ampfast.unpatch()
    after = snapshot()
    assert {name: after.get(name) for name in before} == before


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Makes modules and drops them from `sys.modules` after the test."""

    def make(name: str, code: str = "", made: ModuleType | None = None) -> ModuleType:
        made = made or ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        exec(textwrap.dedent(code), ModuleType.__dict__["__dict__"].__get__(made))
        return made

    return make
