"""Host time of launches over a driver that does nothing: what is timed, and what is printed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cuda_kernels import NVCC

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from benchmarks import launches
from benchmarks.steps import NoOptimizer
import torch

launches.main([sys.argv[1], "--rounds", "1", "--calls", "2"])
from ampfast import GradScaler
param = torch.nn.Parameter(torch.zeros(4))
param.grad = torch.full((4,), 8.0)
scaler = GradScaler("cpu", init_scale=4.0)
scaler.scale(torch.ones(()))
scaler.unscale_(NoOptimizer([param]))
print(param.grad.tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("triton", None if importlib.util.find_spec("triton") else "triton is not installed"),
        pytest.param(
            *("cuda", None if NVCC else "nvcc is not on the PATH"), marks=pytest.mark.sweep
        ),
        ("torch", None),
    ],
)
def test_a_row(kind: str, missing: str | None) -> None:
    if torch.version.cuda is not None and kind != "torch":
        missing = "a CUDA build of torch calls the idle driver itself"
    if missing:
        pytest.skip(missing)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said, _, header, _, *rows, left = done.stdout.splitlines()
    assert "host time only" in said
    assert len(rows) == 3
    for row in rows:
        assert header.count("|") == row.count("|") == 6
        assert all(float(cell) > 0 for cell in row.split("|")[3:6])
    # Nothing is unscaled where no kernel runs.
    assert left == str(4 * [2.0 if kind == "torch" else 8.0])
