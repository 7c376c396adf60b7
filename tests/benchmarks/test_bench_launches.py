"""Host time of launches over a driver that does nothing: what is timed, and what is printed."""

from __future__ import annotations

import pytest
import torch
from support.cuda_kernels import NVCC
from support.processes import python

PROGRAM = """
import sys, torch
from ampfast import GradScaler
from benchmarks import launches
from benchmarks.steps import optimizer_over

launches.main([sys.argv[1], "--rounds", "1", "--calls", "2"])
gradient, scaler = torch.full((4,), 8.0), GradScaler("cpu", init_scale=4.0)
scaler.scale(torch.ones(()))
scaler.unscale_(optimizer_over([gradient], False))
print(gradient.tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["triton", pytest.param("cuda", marks=pytest.mark.sweep), "torch"])
def test_a_row(kind):
    if kind == "triton":
        pytest.importorskip("triton")
    if kind == "cuda" and NVCC is None:
        pytest.skip("nvcc is not on the PATH")
    if kind != "torch" and torch.version.cuda is not None:
        pytest.skip("a CUDA build of torch calls the idle driver itself")
    done = python("-c", PROGRAM, kind, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    said, _, header, _, *rows, left = done.stdout.splitlines()
    if kind == "cuda":
        *rows, _, watched = rows
        assert watched.startswith("A tensor under find_nonfinite: ")
    assert "host time only" in said and len(rows) == (4 if kind == "torch" else 6)
    for row in rows:
        assert header.count("|") == row.count("|") == 6
        assert all(float(cell) > 0 for cell in row.split("|")[3:6])
    # Nothing is unscaled where no kernel runs.
    assert left == str(4 * [2.0 if kind == "torch" else 8.0])
