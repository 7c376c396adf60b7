"""Counts of cases run and failed in a part of `make hostile`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from support.processes import threads


@dataclass
class Tally:
    """Number of cases, and a description of each failure.

    Attributes:
        noun: Name of the cases, in the plural.
        count: Number of cases run.
        failures: A line for each that failed.
    """

    noun: str
    count: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, wrong: Iterable[list[str]]) -> None:
        """Counts cases, of each of which these are the failures."""
        for each in wrong:
            self.count += 1
            self.failures += each

    def fail(self, text: str) -> None:
        self.failures.append(text)

    def summary(self) -> str:
        return f"{self.count:,} {self.noun}, {len(self.failures):,} failed"

    def require_success(self) -> None:
        """Fails a test unless something ran and nothing failed."""
        assert self.count, f"no {self.noun} ran"
        shown = list(dict.fromkeys(self.failures))[:20]
        assert not self.failures, "\n".join([self.summary(), *shown])


def main(run: Callable[[float, int], Tally], amount: str, default: float) -> int:
    """Command line of a part: runs it, prints failures and summary, returns the exit status.

    Args:
        run: The part; takes amount and seed.
        amount: Name of the option for the amount.
        default: Default of that option.
    """
    parser = argparse.ArgumentParser(description=sys.modules[run.__module__].__doc__)
    parser.add_argument(f"--{amount}", dest="amount", type=float, default=default)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with threads(1):
        tally = run(options.amount, options.seed)
    for failure, times in Counter(tally.failures).most_common():
        print("WRONG", failure, f"({times} times)" if times > 1 else "")
    print("TOTAL", tally.summary())
    return 0 if tally.count and not tally.failures else 1
