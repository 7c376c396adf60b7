"""Fixture that checks what every kernel launch writes and leaves alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Fewer cases than on a GPU.
sys.path.append(str(Path(__file__).parents[2] / "gpu"))


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisons outputs before a launch, and checks scratch, table and factors after it."""
    from launched import launch

    plain = launch.multi_tensor

    def multi_tensor(work: Any, table: Any, segment: Any, is_last: bool) -> None:
        header, partials = table.header, table.partials
        outputs = [t for t in (work.found_inf, work.sums) if t is not None]
        if segment.first == 0:  # the first launch of a pass
            assert header.tolist() == [0] * 8, "scratch left by an earlier launch"
            partials.fill_(torch.nan)
            for output in outputs[work.accumulate :]:
                output.fill_(torch.nan)
        kept = [table.words, work.factor, work.coefficient]
        kept += [partials] * (work.sums is None) + outputs * (not is_last)
        kept = [
            t for t in kept if t is not None and (work.ending is None or t is not work.ending.scale)
        ]
        before = [bits(t) for t in kept]

        plain(work, table, segment, is_last)

        assert before == [bits(t) for t in kept], "wrote an input, or before the last launch"
        if not is_last:
            assert header[2:].tolist() == [0] * 6
            assert int(header[0]) % 2**32 == 0, "counted before the last launch"
        else:
            assert header.tolist() == [0] * 8, "scratch not reset"
            if not work.accumulate and (work.clip is None or work.clip.found_inf is None):
                assert work.found_inf.item() in (0.0, 1.0)

    monkeypatch.setattr(launch, "multi_tensor", multi_tensor)


@pytest.fixture
def limit_programs() -> Iterator[Callable[[int], None]]:
    """Sets the number of programs in the test."""
    from launched import launch

    yield launch.limit_programs
    launch.limit_programs(0)
