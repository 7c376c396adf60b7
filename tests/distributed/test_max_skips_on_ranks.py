"""An end after skipped steps: all ranks raise in the same step."""

from __future__ import annotations

import math

import ranks
import torch
import torch.distributed as dist

import ampfast


def ends_at() -> tuple[int, str]:
    scaler = ampfast.GradScaler(
        "cpu", process_group=dist.group.WORLD, max_skips=3, track="overflow"
    )
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for step in range(9):
        # Rank 1 alone sees what is bad, from step 2 on.
        bad = step >= 2 and dist.get_rank() == 1
        param.grad = scaler.scale(torch.ones(())) * torch.full((2,), math.nan if bad else 1.0)
        scaler.step(optimizer)
        try:
            scaler.update()
        except FloatingPointError as error:
            return step, str(error)
    return -1, ""


def test_all_ranks_end_in_the_same_step() -> None:
    (step, told), (other_step, other_told) = ranks.run(ends_at)
    assert (step, other_step) == (4, 4)
    assert told.endswith("so far. This is the report of one rank: see those of the others.")
    assert "group 0, parameter 0" in other_told and "one rank" not in other_told
