"""Interrupts in a scaler's calls: at every call and return, and by signals at random times."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from atomic import SCENARIOS, Scenario, Trials, arranged
from tally import Tally, main

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"track": "overflow"},
    {"backend": "aten"},
    {"skip_above": 1e9},
)


@contextlib.contextmanager
def raised_at(point: int) -> Iterator[None]:
    """Raises KeyboardInterrupt at the `point`-th check for signals.

    The interpreter checks at function entry and after C calls; backward jumps are left out.
    """
    seen = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return"):
            seen += 1
            if seen == point + 2:  # the first is the entry of the block's own call
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def signalled_after(microseconds: int) -> Iterator[None]:
    """Context in which a timer's signal raises KeyboardInterrupt, as Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, max(microseconds, 1) * 1e-6)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def duration(scenario: Scenario, arguments: dict[str, Any]) -> int:
    """Microseconds of a call."""
    rig = arranged(scenario, arguments)
    start = time.perf_counter()
    scenario.call(rig)
    return int((time.perf_counter() - start) * 1e6)


def run(signals: float, seed: int = 0, width: int = 1) -> Tally:
    """Interrupts at every point, or each `width`-th, and that many signals in all."""
    tally, rng = Tally("interrupts"), random.Random(seed)
    # Those in a discarded generator.
    sys.unraisablehook = lambda _: None
    for arguments in VARIANTS:
        for scenario in SCENARIOS:
            trials = Trials(scenario, **arguments)
            tally.add(trials.all_points(raised_at, width))
            longest = 2 * max(duration(scenario, arguments) for _ in range(3))
            for _ in range(int(signals / len(SCENARIOS) / len(VARIANTS))):
                was_cut, wrong = trials.run(signalled_after, rng.randrange(longest))
                tally.count += was_cut
                tally.failures += wrong
    return tally


if __name__ == "__main__":
    sys.exit(main(run, "signals", 5000))
