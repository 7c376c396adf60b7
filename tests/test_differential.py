"""Random programs of scaler operations on torch's scaler and on ours."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.processes import threads
from support.random_programs import (
    VARIANTS,
    draw_program,
    explain,
    first_difference,
    shrink,
    variant_of,
)

# AMPFAST_FUZZ sets the number of programs; AMPFAST_FUZZ_FROM the first seed.
PROGRAMS = int(os.environ.get("AMPFAST_FUZZ", "300"))
FIRST = int(os.environ.get("AMPFAST_FUZZ_FROM", "0"))
BATCH = 25
# Programs for each of what watches the passes of a scaler.
OBSERVED = PROGRAMS // 15
OBSERVERS = [{"track": "overflow"}]


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> Iterator[None]:
    """Keeps torch's own objects out of the collections that programs trigger."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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


@pytest.mark.parametrize("observer", OBSERVERS, ids=lambda each: "-".join(map(str, *each.items())))
def test_what_observes_changes_nothing(observer: dict[str, Any]) -> None:
    """Tracking changes no bit of a program."""
    ours, theirs, _ = VARIANTS["plain"]
    for seed in range(FIRST, FIRST + OBSERVED):
        plan, program = draw_program(seed)
        with threads(1):
            sides = ours, theirs, observer
            found = first_difference(plan, program, sides, watch=seed % 4 != 0)
        assert found is None, f"seed {seed}: {found}"


@pytest.mark.slow
def test_a_failing_program_is_shortened() -> None:
    pytest.importorskip("hypothesis", reason="hypothesis is not installed")
    _, program = draw_program(3)
    wanted = [program[4], program[30]]
    assert shrink(program, lambda ops: all(op in ops for op in wanted)) == wanted
