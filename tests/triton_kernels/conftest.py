"""Compiles the kernels beside other tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from beside import Process

AHEAD = pytest.StashKey[Process]()


def pytest_runtestloop(session: pytest.Session) -> None:
    """Starts a process that compiles the kernels beside other tests, for those that come last."""
    config = session.config
    compiled = [i for i in session.items if i.path.name == "test_compiled.py"]
    if compiled and len(compiled) < len(session.items) and not config.option.collectonly:
        path, keyword = str(compiled[0].path), config.option.keyword
        log = Path(os.devnull)  # what fails there fails here too
        ahead = Process(log, path, "-k", keyword, TRITON_INTERPRET="0")
        config.add_cleanup(ahead.end)
        config.stash[AHEAD] = ahead


@pytest.fixture(scope="session")
def compiled_ahead(pytestconfig: pytest.Config) -> None:
    """Waits until all requested variants are compiled."""
    if ahead := pytestconfig.stash.get(AHEAD, None):
        ahead.wait()
