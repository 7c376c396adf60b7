"""Random programs of scaler operations, run on torch's scaler and on ours in lockstep."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from random_programs import VARIANTS, Lockstep, lockstep, run_programs

# Number of programs.
PROGRAMS = int(os.environ.get("AMPFAST_FUZZ", "300"))


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> Iterator[None]:
    """Keeps torch's own objects out of the collections that programs trigger."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("batch", range(4))
def test_random_programs_agree(batch: int) -> None:
    """Both worlds stay equal bit for bit after every operation."""
    run_programs(Lockstep, PROGRAMS // 6, seed=batch)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "plain"])
def test_other_ways_agree(variant: str) -> None:
    """Overridden hooks and torch's ops take other ways through our code, with equal results."""
    run_programs(lockstep(VARIANTS[variant]), PROGRAMS // 24)
