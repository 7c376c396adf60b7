"""The largest magnitude of one tensor, which the CUDA kernels write to a row of a table."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from ptx_emulator import Range
from support.comparison import FLOATS, assert_same
from support.launchers import compiled

from ampfast import _C

LAUNCHER: Any = compiled()
if LAUNCHER is None or not LAUNCHER._module.__name__.endswith("cuda"):
    pytest.skip("needs the CUDA kernels", allow_module_level=True)
finder = sys.modules["ampfast.diagnose.find_nonfinite"]
# Of a program, as in csrc/cuda/multi_tensor.h; the launcher has three.
READ_BYTES = 16384


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 9, READ_BYTES - 1, READ_BYTES, 5 * READ_BYTES + 1])
def test_reads(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(32, 3, dtype=torch.float64)
    monkeypatch.setattr(finder, "_new_table", lambda device, *shape: (rows, "cuda"))
    numel = max(size // dtype.itemsize, 1)
    reads = _C.Reads(lambda: None)
    for offset, place, bad in (
        (0, 0, -(2.0**14)),
        (1, numel // 2, math.inf),
        (3, numel - 1, -math.inf),
        (5, numel - 1, math.nan),
        (0, 0, 0.0),
    ):
        # The next value must not be read.
        memory = torch.full((offset + numel + 1,), math.nan, dtype=dtype)
        values = memory[offset:-1].copy_(torch.randn(numel))
        values[place] = bad
        with LAUNCHER._restricted(
            [Range.of(values, may_write=False), Range.of(rows, may_write=True)]
        ):
            [number] = reads.values_of(values)
        found, _ = reads.so_far()[0][number]
        assert found is not None
        largest = values.double().abs().max()
        assert_same(rows[found], torch.stack([largest, *torch.zeros(2).double()]))
