"""Schedules on several ranks: all leave out a step in which one rank overflows."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from ampfast import GradScaler, LateScheduler, ShardedGradScaler

STEPS = 6
SKIPPED = (0, 3)


def advanced(kind: str, has_group: bool, is_late: bool) -> list[int]:
    """Epochs of the schedule by step; rank 0 has no gradients."""
    rank = dist.get_rank()
    parameter = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=kind == "fused")
    group = dist.group.WORLD
    scaler = GradScaler("cpu", process_group=group) if has_group else ShardedGradScaler("cpu")
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if is_late:
        schedule = LateScheduler(schedule, scaler, optimizer)
    seen = []
    for step in range(STEPS):
        seen.append(schedule.last_epoch)
        optimizer.zero_grad()
        loss = parameter.sum() * (torch.inf if rank == 1 and step in SKIPPED else 1.0)
        scaler.scale(loss).backward()
        if rank == 0:
            parameter.grad = None
        scaler.step(optimizer)
        scaler.update()
        if is_late or not scaler.step_skipped(optimizer):
            schedule.step()
    if is_late:
        schedule.flush()
    return [*seen, schedule.last_epoch]


@pytest.mark.parametrize("is_late", [False, True], ids=["exact", "late"])
@pytest.mark.parametrize(
    ("kind", "has_group"), [("plain", True), ("fused", True), ("fused", False)]
)
def test_all_ranks_are_equally_far(kind: str, has_group: bool, is_late: bool) -> None:
    ran = [sum(s not in SKIPPED for s in range(step)) for step in range(STEPS + 1)]
    expected = [0, *ran[: STEPS - 1], ran[STEPS]] if is_late else ran
    assert ranks.run(advanced, kind, has_group, is_late) == [expected] * 2
