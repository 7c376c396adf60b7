"""Mutates the state machine and master weights, and reports mutants that no test notices."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from explained import AT_IMPORT, EXPLAINED
from mutants import FILES, Mutant, mutants_of
from trials import Outcome, outcomes, with_collected

ROOT = Path(__file__).parents[2]
# Tests of them that run in this process.
TESTS = tuple(
    f"tests/test_{name}.py"
    for name in (
        *("backends", "bad_input", "captured_steps", "clipping_deferred", "clipping_states"),
        *("contract", "device_costs", "world_of_one", "device_hosts", "differences"),
        *("clipping", "found_inf", "gradient_memory", "health", "hooks"),
        *("overflow_report", "report", "skip_above", "scale_state", "state"),
        *("step_and_update", "widen_narrow", "wrapped_optimizers", "late_backward", "max_skips"),
    )
) + tuple(
    f"tests/companions/test_{name}.py"
    for name in (
        "log_max",
        "master_weights",
        "master_weights_costs",
        "master_weights_optimizers",
        "spikes",
        "step_guard",
    )
)


def main() -> int:
    """Prints each survivor; returns 1 if one is unexplained."""
    parser = argparse.ArgumentParser(prog="python tests/mutation", description=__doc__)
    parser.add_argument("files", nargs="*", default=FILES, help="modules (default: %(default)s)")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files of tests")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once")
    parser.add_argument("--only", default="", help="places that contain this, as GradScaler.step")
    parser.add_argument(
        "--budget", type=float, default=30.0, help="seconds of tests for a change (default: 30)"
    )
    options = parser.parse_args()

    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    files = [Path(name).resolve() for name in options.files]
    changes = [mutant for path in files for mutant in mutants_of(path)]
    mutants = [m for m in changes if not m.is_run_at_import and m.place not in AT_IMPORT]
    mutants = [m for m in mutants if options.only in m.place]

    def try_all(items: list[pytest.Item]) -> int:
        return _report(mutants, outcomes(mutants, items, options.jobs, options.budget))

    return with_collected(options.tests, try_all)


def _report(mutants: Sequence[Mutant], tried: Iterator[Outcome]) -> int:
    start, noticed, explained = time.monotonic(), 0, 0
    for number, outcome in enumerate(tried, 1):
        if sys.stderr.isatty():
            print(f"\r{number} of {len(mutants)} ", end="", file=sys.stderr, flush=True)
        if not outcome.survived:
            noticed += 1
            continue
        why = EXPLAINED.get(outcome.mutant.key)
        explained += why is not None
        print(_described(outcome, why or "NOT EXPLAINED"), flush=True)
    minutes = (time.monotonic() - start) / 60
    unexplained = len(mutants) - noticed - explained
    print(
        f"{len(mutants)} changes, {noticed} noticed, {explained} explained, {unexplained} not "
        f"explained; {minutes:.1f} minutes"
    )
    return 1 if unexplained else 0


def _described(outcome: Outcome, why: str) -> str:
    mutant = outcome.mutant
    where = f"{mutant.path.relative_to(ROOT)}:{mutant.lines[0]} {mutant.place} #{mutant.nth}"
    change = f"{mutant.before!r} -> {mutant.after!r}"
    return f"{where}\n  {change}\n  {why} ({outcome.tests} tests run it)"


if __name__ == "__main__":
    sys.exit(main())
