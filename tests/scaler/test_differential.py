"""Random programs of scaler operations on torch's scaler and on ours."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
from support.processes import threads
from support.programs import VARIANTS, draw_program, explain, first_difference, variant_of

from ampfast.clip.norm_history import NormHistories

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


# Of each feature the operations that it changes: a norm needs sparse gradients coalesced, and a
# scaler with a group cannot be pickled.
FEATURES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "overflow": ({"track": "overflow"}, set()),
    "norms": ({"track": "norms"}, {"sparse_grads"}),
    "limit": ({"skip_above": math.inf}, {"sparse_grads"}),
    "group": ({}, {"pickled"}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_change_nothing(feature: str, world: Any, monkeypatch: Any) -> None:
    # Which warns where a program compared no norm with the limit.
    monkeypatch.setattr(NormHistories, "warn_of_no_use", lambda _: None)
    more, changed = FEATURES[feature]
    sides = (*VARIANTS["plain"][:2], more or {"process_group": world})
    for seed in range(FIRST, FIRST + PROGRAMS // 15):
        plan, program = draw_program(seed)
        program = [op for op in program if op.name not in changed]
        with threads(1):
            found = first_difference(plan, program, sides, watch=seed % 4 != 0)
        assert found is None, f"seed {seed}: {found}"
