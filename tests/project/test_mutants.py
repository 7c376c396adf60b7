"""`make mutants`: its files and explanations match the code."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from ampfast import GradScaler

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tests/mutation"))
    return importlib.import_module("mutants")


def test_every_class_of_the_scaler_is_changed(mutants: ModuleType) -> None:
    ours = [kind for kind in GradScaler.__mro__ if kind.__module__.startswith("ampfast.")]
    holders = {Path(inspect.getfile(thing)) for thing in ours}
    assert {path.relative_to(ROOT).as_posix() for path in holders} <= set(mutants.FILES)


def test_every_change_that_is_explained_can_be_made(mutants: ModuleType) -> None:
    explained = importlib.import_module("explained").EXPLAINED
    found = {mutant.key for name in mutants.FILES for mutant in mutants.mutants_of(ROOT / name)}
    assert sorted(explained.keys() - found) == []
