"""Fixtures of the `patch()` tests: each starts and ends with torch as it was."""

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
    """No test starts or ends patched, and each leaves every name as it was."""
    assert not is_patched()
    before = snapshot()
    yield
    ampfast.unpatch()
    after = snapshot()
    assert {name: after.get(name) for name in before} == before


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Makes loaded modules, which leave `sys.modules` with the test."""

    def make(name: str, code: str = "", made: ModuleType | None = None) -> ModuleType:
        made = made or ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        exec(textwrap.dedent(code), ModuleType.__dict__["__dict__"].__get__(made))
        return made

    return make
