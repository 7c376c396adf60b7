"""`check_ranks`: the same difference reported on every rank, or none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from groups import Foreign, line, pair, square
from support.gradients import parameter_with

from ampfast import GradScaler, ShardedGradScaler

POLICY: dict[str, Any] = {"min_scale": 1.0, "max_scale": 2.0**20}
BEGIN = "the ranks' scalers differ: "
COLUMNS = ((0, 2), (1, 3))
# Arguments of most ranks and of the odd one, and the settings that differ, by name.
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], dict[str, tuple[Any, Any]]]] = [
    ({}, {}, {}),
    ({**POLICY, "hysteresis": 2},) * 2 + ({},),
    ({"enabled": False}, {"enabled": False}, {}),
    ({}, {"growth_interval": 1000}, {"growth_interval": (2000, 1000)}),
    ({}, {"growth_factor": 1.5}, {"growth_factor": (2.0, 1.5)}),
    ({}, {"backoff_factor": 0.25}, {"backoff_factor": (0.5, 0.25)}),
    ({}, {"init_scale": 4.0}, {"scale": (65536.0, 4.0)}),
    ({}, {"allow_fp16": True}, {"allow_fp16": (False, True)}),
    ({}, {"track": "overflow"}, {"track": (None, "overflow")}),
    (
        {"growth_interval": 1, "backoff_factor": 0.5},
        {"dynamic": False},
        {"backoff_factor": (0.5, 1.0), "growth_interval": (1, 0), "dynamic": (True, False)},
    ),
    ({}, {"hysteresis": 2}, {"hysteresis": (1, 2), "hysteresis_tracker": (1, 2)}),
    ({}, POLICY, {"min_scale": (None, 1.0), "max_scale": (None, 2.0**20)}),
    ({}, {"enabled": False}, {"enabled": (True, False)}),
    ({"enabled": False}, {"enabled": False, "device": "meta"}, {"device": ("cpu", "meta")}),
]


def error_of(scaler: GradScaler) -> str:
    try:
        scaler.check_ranks()
    except RuntimeError as error:
        return str(error)
    return ""


def checked(odd: int) -> list[tuple[str, str]]:
    """With one odd rank, before any and after one or all ranks have started lazily."""
    rank, results = dist.get_rank(), []
    for common, other, _ in DIFFERENT:
        for starts in ((), (0,), range(4)):
            scaler = GradScaler(**{"device": "cpu", **(other if rank == odd else common)})
            if rank in starts:
                scaler.scale(torch.ones(()))
            results.append(error_of(scaler))
    return results


@pytest.mark.parametrize(("count", "odd"), [(2, 1), (4, 2)])
def test_a_different_setting_on_one_rank(count: int, odd: int) -> None:
    expected = []
    for _, _, differ in DIFFERENT:
        pairs = [f"{name}: {a!r} on rank 0, {b!r} on rank {odd}" for name, (a, b) in differ.items()]
        expected += 3 * [BEGIN + "; ".join(pairs) if pairs else ""]
    assert ranks.run(checked, odd, ranks=count) == [expected] * count


def trained() -> list[str]:
    """Results after each of several steps, one of which overflows on rank 1 only."""
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3, hysteresis=2)
    errors = []
    for value in (1.0, math.inf if dist.get_rank() else 1.0, 1.0):
        scaler.scale(torch.ones(()))
        scaler.step(torch.optim.SGD([parameter_with(torch.tensor([value]))], lr=0.1))
        scaler.update()
        errors.append(error_of(scaler))
    return errors


def test_states_that_went_apart() -> None:
    tracker = "growth_tracker: {} on rank 0, {} on rank 1"
    hysteresis = "hysteresis_tracker: 2 on rank 0, 1 on rank 1"
    expected = [
        "",
        f"{BEGIN}{tracker.format(2, 0)}; {hysteresis}",
        f"{BEGIN}scale: 16.0 on rank 0, 8.0 on rank 1; {tracker.format(0, 1)}; {hysteresis}",
    ]
    assert ranks.run(trained) == [expected] * 2


def of_another_torch() -> str:
    if dist.get_rank():
        torch.__version__ = "1.0"
    return error_of(GradScaler("cpu"))


def test_versions() -> None:
    text = f"{BEGIN}torch: {str(torch.__version__)!r} on rank 0, '1.0' on rank 1"
    assert ranks.run(of_another_torch) == [text] * 2


def of_groups() -> list[str]:
    """Differences within groups, meshes and foreign groups, and between those who have them."""
    rank, world = dist.get_rank(), dist.group.WORLD
    groups = [pair(*COLUMNS), square(), square()["b"], line(), Foreign(pair(*COLUMNS))]
    scale = 2.0 ** (rank == 3)
    errors = [error_of(GradScaler("cpu", scale, process_group=group)) for group in groups]
    for given in ([None, world, world, world], [world, *[square()] * 3]):
        errors.append(error_of(GradScaler("cpu", process_group=given[rank])))
    # FSDP's scaler takes the default group by default.
    makes = [GradScaler, GradScaler, ShardedGradScaler, ShardedGradScaler]
    several = {1: {"init_scale": 8.0}, 2: {"init_scale": 4.0, "track": "overflow"}}
    errors.append(error_of(makes[rank]("cpu", allow_fp16=True)))
    return [*errors, error_of(GradScaler("cpu", **several.get(rank, {})))]


def test_groups() -> None:
    text = f"{BEGIN}scale: 1.0 on rank {{}}, 2.0 on rank 3"
    size = f"{BEGIN}process_group size: None on rank 0, 4 on rank "
    everywhere = [f"{size}1", "", f"{size}2"]
    everywhere.append(
        f"{BEGIN}scale: 65536.0 on rank 0, 8.0 on rank 1; track: None on rank 0, 'overflow' on "
        "rank 2"
    )
    for rank, seen in enumerate(ranks.run(of_groups, ranks=4)):
        odd, low = text.format(1) if rank % 2 else "", text.format(2) if rank > 1 else ""
        # On a mesh, rank 3's value reaches rank 0 through a rank that shares a group with both.
        assert seen == [odd, text.format(0), low, text.format(0), odd, *everywhere]


def test_without_a_process_group_nothing_happens() -> None:
    assert not dist.is_initialized()
    for make in (GradScaler, ShardedGradScaler):
        make("cpu").check_ranks()
        make("cpu", enabled=False).check_ranks()
