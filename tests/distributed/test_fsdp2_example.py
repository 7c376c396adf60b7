"""The FSDP2 example on two ranks, with ampfast's and torch's scaler."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "fsdp2.py"
STEPS = 20


def trained(scaler: str) -> str:
    train = runpy.run_path(str(EXAMPLE))["train"]
    return train(argparse.Namespace(scaler=scaler, steps=STEPS, device="cpu"))


@pytest.mark.sweep
def test_it_starts_its_ranks_and_both_scalers_give_the_same() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", str(STEPS), "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert ranks.run(trained, "torch", seconds=240) == [last, last]
    # Only one rank held the infinity.
    [planted] = [line for line in lines if line.startswith(f"step {STEPS // 2}:")]
    assert planted.endswith("skipped: [True, True]")
    [(steps, skipped)] = re.findall(r"steps=(\d+), skipped=(\d+)", done.stdout)
    assert int(steps) == STEPS and 1 < int(skipped) < STEPS - 1
