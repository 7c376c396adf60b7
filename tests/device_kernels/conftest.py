"""Fixture that checks what every kernel launch writes and leaves alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ampfast import _C

# Fewer cases than on a GPU.
sys.path.append(str(Path(__file__).parents[1] / "gpu"))


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisons outputs before a launch, and checks scratch, table and factors after it."""
    from device_parity import launch

    plain = launch.multi_tensor

    def multi_tensor(work: Any, table: Any, segment: Any, is_last: bool) -> None:
        header, partials = table.header, table.partials
        if segment.first == 0:  # the first launch of a pass
            assert header.tolist() == [0] * 8, "scratch left by an earlier launch"
            partials.fill_(torch.nan)
            if not work.accumulate:
                work.found_inf.fill_(torch.nan)
            if work.sums is not None:
                work.sums.fill_(-1.0)
        sums = None if work.clip is None else work.clip.sums
        inputs = [t for t in (work.factor, work.coefficient, sums) if t is not None]
        if work.ending is not None and work.ending.update is not None:
            inputs = [t for t in inputs if t is not work.ending.update.scale]
        assigned = [t for t in (work.found_inf, work.sums) if t is not None]
        before = [t.clone() for t in (table.words, partials, *inputs)]
        unassigned = [t.clone() for t in assigned]

        plain(work, table, segment, is_last)

        assert torch.equal(table.words, before[0])
        assert header[2:].tolist() == [0] * 6
        for tensor, value in zip(inputs, before[2:], strict=True):
            assert bits(tensor) == bits(value), "wrote a factor"
        if work.sums is None:
            assert bits(partials) == bits(before[1])
        if not is_last:
            assert int(header[0]) % 2**32 == 0, "counted before the last launch"
            for tensor, value in zip(assigned, unassigned, strict=True):
                assert bits(tensor) == bits(value), "assigned before the last launch"
        else:
            assert header.tolist() == [0] * 8, "scratch not reset"
            if not work.accumulate and work.clip is None:  # which decides nothing
                assert work.found_inf.item() in (0.0, 1.0)

    monkeypatch.setattr(launch, "multi_tensor", multi_tensor)


@pytest.fixture
def limit_programs() -> Iterator[Callable[[int], None]]:
    """Sets the number of programs in the test."""
    from device_parity import launch

    yield launch.limit_programs
    launch.limit_programs(0)


@pytest.fixture
def few_chunks() -> Iterator[None]:
    """Chunks of several windows also in short lists."""
    _C.set_chunks(enough=2)
    yield
    _C.set_chunks()
