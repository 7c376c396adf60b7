"""Random programs of scaler operations on torch's scaler and on ours."""

from __future__ import annotations

import os

import pytest
from support.processes import threads
from support.programs import VARIANTS, draw_program, explain, first_difference, variant_of

# AMPFAST_FUZZ sets the number of programs; AMPFAST_FUZZ_FROM the first seed.
PROGRAMS = int(os.environ.get("AMPFAST_FUZZ", "300"))
FIRST = int(os.environ.get("AMPFAST_FUZZ_FROM", "0"))
BATCH = 25


@pytest.mark.parametrize("start", range(FIRST, FIRST + PROGRAMS, BATCH))
def test_random_programs_agree(start: int) -> None:
    """Both worlds stay equal bit for bit after every operation."""
    for seed in range(start, min(start + BATCH, FIRST + PROGRAMS)):
        # The tensors are small: a second thread mostly adds waiting, so few programs use it.
        with threads(2 if seed % 20 == 0 else 1):
            plan, program = draw_program(seed)
            watch = seed % 4 != 0
            found = first_difference(plan, program, VARIANTS[variant_of(seed)], watch=watch)
            if found is not None:
                pytest.fail(explain(seed, found, watch), pytrace=False)


@pytest.mark.parametrize("track", ["overflow", "norms"])
def test_tracking_changes_nothing(track: str) -> None:
    sides = (*VARIANTS["plain"][:2], {"track": track})
    for seed in range(FIRST, FIRST + PROGRAMS // 15):
        plan, program = draw_program(seed)
        with threads(1):
            found = first_difference(plan, program, sides, watch=seed % 4 != 0)
        assert found is None, f"seed {seed}: {found}"
