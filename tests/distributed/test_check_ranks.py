"""`check_ranks`: the same difference reported on every rank, or none."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ampfast
from ampfast import GradScaler, ShardedGradScaler, diagnostics
from ampfast.distributed import Group, differences

POLICY: dict[str, Any] = {"min_scale": 1.0, "max_scale": 2.0**20}


def error_of(scaler: GradScaler) -> str | None:
    try:
        scaler.check_ranks()
    except RuntimeError as error:
        return str(error)
    return None


def checked(arguments: list[dict[str, Any]], starts: list[int] | None = None) -> str | None:
    """Result on one rank; scalers of the ranks in `starts` scale something first."""
    rank = dist.get_rank()
    scaler = GradScaler(**{"device": "cpu", **arguments[rank]})
    if starts is None or rank in starts:
        scaler.scale(torch.ones(()))
    return error_of(scaler)


DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {"growth_interval": 1000}, ["growth_interval: 2000 on {}, 1000 on {}"]),
    ({}, {"growth_factor": 1.5}, ["growth_factor: 2.0 on {}, 1.5 on {}"]),
    ({}, {"backoff_factor": 0.25}, ["backoff_factor: 0.5 on {}, 0.25 on {}"]),
    ({}, {"init_scale": 4.0}, ["scale: 65536.0 on {}, 4.0 on {}"]),
    ({}, {"allow_fp16": True}, ["allow_fp16: False on {}, True on {}"]),
    ({}, {"track": "overflow"}, ["track: None on {}, 'overflow' on {}"]),
    (
        {"growth_interval": 1, "backoff_factor": 0.5},
        {"dynamic": False},
        [
            "backoff_factor: 0.5 on {}, 1.0 on {}",
            "growth_interval: 1 on {}, 0 on {}",
            "dynamic: True on {}, False on {}",
        ],
    ),
    (
        {},
        {"hysteresis": 2},
        ["hysteresis: 1 on {}, 2 on {}", "hysteresis_tracker: 1 on {}, 2 on {}"],
    ),
    (
        {"hysteresis": 2},
        {"hysteresis": 2, "hysteresis_refill": "finite_step"},
        ["hysteresis_refill: 'growth' on {}, 'finite_step' on {}"],
    ),
    (
        {},
        POLICY,
        ["min_scale: None on {}, 1.0 on {}", "max_scale: None on {}, 1048576.0 on {}"],
    ),
    (POLICY, {**POLICY, "on_min_scale": "raise"}, ["on_min_scale: 'ignore' on {}, 'raise' on {}"]),
    (
        {**POLICY, "on_min_scale": "warn"},
        {**POLICY, "on_min_scale": "raise"},
        ["on_min_scale: 'warn' on {}, 'raise' on {}"],
    ),
    ({}, {"enabled": False}, ["enabled: True on {}, False on {}"]),
    (
        {"enabled": False},
        {"enabled": False, "device": "meta"},
        ["device: 'cpu' on {}, 'meta' on {}"],
    ),
]


def check_each(
    cases: list[tuple[dict[str, Any], dict[str, Any]]], odd: int
) -> list[tuple[str | None, str | None]]:
    """One odd rank, before and after the lazy start."""
    count = dist.get_world_size()
    results = []
    for common, other in cases:
        arguments = [other if rank == odd else common for rank in range(count)]
        results.append((checked(arguments, []), checked(arguments)))
    return results


@pytest.mark.parametrize(
    ("count", "odd", "places"),
    [(2, 1, ("rank 0", "rank 1")), (4, 2, ("rank 0", "rank 2"))],
)
def test_a_different_setting_on_one_rank(count: int, odd: int, places: tuple[str, str]) -> None:
    by_rank = ranks.run(check_each, [case[:2] for case in DIFFERENT], odd, ranks=count)
    for results in by_rank:
        for (_, _, expected), errors in zip(DIFFERENT, results, strict=True):
            texts = "; ".join(text.format(*places) for text in expected)
            assert errors == (f"the ranks' scalers differ: {texts}",) * 2


def test_several_differences_between_several_ranks() -> None:
    arguments = [{}, {"init_scale": 8.0}, {"init_scale": 4.0, "track": "overflow"}, {}]
    text = (
        "the ranks' scalers differ: scale: 65536.0 on rank 0, 8.0 on rank 1; "
        "track: None on rank 0, 'overflow' on rank 2"
    )
    assert ranks.run(checked, arguments, ranks=4) == [text] * 4


@pytest.mark.parametrize(
    "arguments",
    [{}, {**POLICY, "hysteresis": 2, "on_min_scale": "warn"}, {"enabled": False}],
    ids=["torchs", "policy", "disabled"],
)
@pytest.mark.parametrize("starts", [[], [0], [0, 1]])
def test_equal_ranks(arguments: dict[str, Any], starts: list[int]) -> None:
    assert ranks.run(checked, [arguments] * 2, starts) == [None, None]


def step(scaler: GradScaler, gradient: float) -> None:
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter * gradient).sum().backward()
    scaler.step(optimizer)
    scaler.update()


def trained() -> list[str | None]:
    """Results after each of several steps, one of which overflows on rank 1 only."""
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3, hysteresis=2)
    errors = []
    for gradient in (1.0, float("inf") if dist.get_rank() else 1.0, 1.0):
        step(scaler, gradient)
        errors.append(error_of(scaler))
    return errors


def test_states_that_went_apart() -> None:
    tracker = "growth_tracker: {} on rank 0, {} on rank 1"
    hysteresis = "hysteresis_tracker: 2 on rank 0, 1 on rank 1"
    begin = "the ranks' scalers differ: "
    expected = [
        None,
        f"{begin}{tracker.format(2, 0)}; {hysteresis}",
        f"{begin}scale: 16.0 on rank 0, 8.0 on rank 1; {tracker.format(0, 1)}; {hysteresis}",
    ]
    assert ranks.run(trained) == [expected] * 2


def other_versions() -> str | None:
    if dist.get_rank():
        diagnostics.__version__ = "0.0"
        torch.__version__ = "1.0"
    return error_of(GradScaler("cpu"))


def test_versions() -> None:
    differing = [("torch", str(torch.__version__), "1.0"), ("ampfast", ampfast.__version__, "0.0")]
    expected = "; ".join(f"{name}: {a!r} on rank 0, {b!r} on rank 1" for name, a, b in differing)
    assert ranks.run(other_versions) == [f"the ranks' scalers differ: {expected}"] * 2


def of_a_group() -> str | None:
    """Ranks 1 and 3 as a group of their own, without the others."""
    group = dist.new_group([1, 3])
    rank = dist.get_rank()
    if rank not in (1, 3):
        return None
    return error_of(GradScaler("cpu", init_scale=2.0**rank, process_group=group))


def test_a_group_of_its_own() -> None:
    text = "the ranks' scalers differ: scale: 2.0 on rank 1, 8.0 on rank 3"
    assert ranks.run(of_a_group, ranks=4) == [None, text, None, text]


def of_several_groups() -> list[str | None]:
    """Compares all ranks, only some of which have a group."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2))
    given = [
        [None, dist.group.WORLD, dist.group.WORLD, dist.group.WORLD],
        [dist.group.WORLD, mesh, mesh, mesh],
    ]
    errors = [error_of(GradScaler("cpu", process_group=groups[rank])) for groups in given]
    # FSDP's scaler takes the default group by default.
    makes = [GradScaler, GradScaler, ShardedGradScaler, ShardedGradScaler]
    return [*errors, error_of(makes[rank]("cpu", allow_fp16=True))]


def test_a_group_that_one_does_not_have() -> None:
    begin = "the ranks' scalers differ: process_group size: "
    assert (
        ranks.run(of_several_groups, ranks=4)
        == [
            [
                f"{begin}None on rank 0, 4 on rank 1",
                None,
                f"{begin}None on rank 0, 4 on rank 2",
            ]
        ]
        * 4
    )


def of_a_mesh(values: list[int]) -> str:
    """Rank 3's value reaches rank 0 through a rank that shares a group with both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    groups = [Group(group) for group in mesh.get_all_groups()]
    return differences({"a": values[dist.get_rank()]}, groups)


def test_a_mesh() -> None:
    text = "a: 5 on rank 0, 7 on rank 3"
    assert ranks.run(of_a_mesh, [5, 5, 5, 7], ranks=4) == [text] * 4
    assert ranks.run(of_a_mesh, [5] * 4, ranks=4) == [""] * 4


def with_missing_names() -> str:
    settings = [{"a": 1, "b": 2}, {"a": 1, "c": 3}, {"a": 1, "b": 4}][dist.get_rank()]
    return differences(settings, [Group(dist.group.WORLD)])


def test_a_name_that_some_do_not_have() -> None:
    assert ranks.run(with_missing_names, ranks=3) == ["b: 2 on rank 0, 4 on rank 2"] * 3


def test_without_a_process_group_nothing_happens() -> None:
    assert not dist.is_initialized()
    for make in (GradScaler, ShardedGradScaler):
        make("cpu").check_ranks()
        make("cpu", enabled=False).check_ranks()
