"""Iterations under torch.compile on CPU tensors; for GPUs see tests/gpu."""

from __future__ import annotations

import pytest
import torch
from support.captures import assert_no_more_breaks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_compiled_steps_break_no_more_often(kind: str) -> None:
    assert_no_more_breaks(kind, torch.device("cpu"))
