"""Runs the hostile parts at full dose, each in a process of its own, and sums up."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
sys.path.append(str(ROOT / "tests" / "gpu"))

from runner import Part, run, table  # noqa: E402

# By name: module, option for the dose, full dose, time limit in seconds.
PARTS = {
    "sanitizers": ("sanitizers", None, 0, 5400),
    "threads": ("crowds", "seconds", 60, 600),
    "allocations": ("allocations", "width", 1, 3600),
    "programs": ("pytest", None, 2250, 3600),
    "clips": ("clips", "count", 8000, 1800),
    "conditions": ("conditions", "count", 5000, 1800),
    "interrupts": ("interrupts", "signals", 5000, 3600),
}


def part(name: str, seconds: float, seed: int) -> Part:
    module, amount, dose, limit = PARTS[name]
    command = [sys.executable, str(HERE / f"{module}.py")]
    environment = {}
    if module == "pytest":  # of other seeds than in every run of the tests
        command = [sys.executable, "-m", "pytest", "-q", "tests/scaler/test_differential.py"]
        environment = {"AMPFAST_FUZZ": str(dose), "AMPFAST_FUZZ_FROM": str(1_000_000 + seed)}
    if amount is not None:
        dose = seconds if name == "threads" else dose
        command += [f"--{amount}", str(dose), "--seed", str(seed)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    summary = r"^TOTAL|\b(passed|failed|error)\b"
    return Part(name, [command], limit + seconds, environment, summary=summary)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the selected parts; returns 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python tests/hostile", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="of threads (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hostile", help="of the logs")
    options = parser.parse_args(arguments)
    wanted, out = options.parts.split(","), options.out.resolve()
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(PARTS)}")
    print(f"logs in {out / 'logs'}", flush=True)
    parts = [part(name, options.seconds, options.seed) for name in PARTS if name in wanted]
    limit = sum(each.seconds for each in parts)
    # What ends this ends what runs.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(parts, out / "logs", ROOT, limit, out / "verdict.txt", f"seed {options.seed}")
    except KeyboardInterrupt:
        return 1
    finally:
        print(f"\n{table(parts)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
