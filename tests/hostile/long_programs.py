"""Random programs, run on torch's scaler and on ours in lockstep."""

from __future__ import annotations

import gc
import random
import sys

from support.processes import threads
from support.programs import LENGTH, VARIANTS, draw_program, first_difference
from tally import Tally, main

# Other seeds than the tests use.
FIRST = 1_000_000


def run(count: float, seed: int = 0) -> Tally:
    """Runs at least that many operations, on all variants of the scaler."""
    tally = Tally("operations beside torch")
    variants = list(VARIANTS)
    gc.collect()
    gc.freeze()
    try:
        for number in range(FIRST + seed, FIRST + seed + -(-int(count) // LENGTH)):
            variant = random.Random(number).choice([*variants, "plain", "plain"])
            plan, program = draw_program(number)
            with threads(2 if number % 20 == 0 else 1):
                found = first_difference(plan, program, VARIANTS[variant], watch=number % 4 != 0)
            tally.count += len(program)
            if found is not None:
                tally.fail(f"seed {number}, {variant}, {plan}: {found}")
    finally:
        gc.unfreeze()
    return tally


if __name__ == "__main__":
    sys.exit(main(run, "count", 90_000))
