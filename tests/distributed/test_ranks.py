"""The runner of these ranks: results, errors, crashes and timeouts."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def summed(values: list[float]) -> tuple[int, float]:
    tensor = torch.tensor(values[dist.get_rank()])
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_results_come_in_the_order_of_the_ranks(count: int) -> None:
    values = [2.0**i for i in range(count)]
    assert ranks.run(summed, values, ranks=count) == [(i, sum(values)) for i in range(count)]


def sums_over_groups() -> list[float]:
    rank = dist.get_rank()
    sums = []
    for members in ([0, 1], [2, 3], [0, 2]):
        group = dist.new_group(members)
        if rank in members:
            dist.all_reduce(tensor := torch.tensor(2.0**rank), group=group)
            sums.append(tensor.item())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        dist.all_reduce(tensor := torch.tensor(2.0**rank), group=mesh.get_group(name))
        sums.append(tensor.item())
    return sums


def test_groups_and_meshes() -> None:
    by_rank = ranks.run(sums_over_groups, ranks=4)
    assert by_rank == [[3, 5, 5, 3], [3, 10, 3], [12, 5, 5, 12], [12, 10, 12]]


def fails_on(failing: list[int]) -> None:
    rank = dist.get_rank()
    if rank in failing:
        raise LookupError(f"nothing on rank {rank}")
    dist.barrier()


def test_every_failing_rank_is_shown() -> None:
    with pytest.raises(ranks.RanksFailedError) as raised:
        ranks.run(fails_on, [1, 2], ranks=3)
    text = str(raised.value)
    for rank in (1, 2):
        assert f"rank {rank}: LookupError: nothing on rank {rank}\nTraceback" in text
    assert "in fails_on" in text
    assert ranks.run(fails_on, []) == [None, None]


def test_the_others_end_with_one_that_fails() -> None:
    outcomes = ranks.attempt(fails_on, [0])
    assert outcomes[0].error == "LookupError: nothing on rank 0"
    assert outcomes[1].error.startswith("RuntimeError: ")
    assert "Timed out" not in outcomes[1].error


def dies(how: str) -> None:
    if dist.get_rank() == 1:
        print("goodbye", flush=True)
        os._exit(7)


def test_a_rank_that_dies_is_reported_with_its_exit_code() -> None:
    outcomes = ranks.attempt(dies, "")
    assert [outcome.error for outcome in outcomes] == [None, "exit code 7"]
    assert "goodbye" in outcomes[1].details


def crashes(sign: Path, *, in_python: bool) -> int:
    """Crashes in its first run, on rank 1, by reading at address 0."""
    if dist.get_rank() == 1 and not sign.exists():
        sign.touch()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        if in_python:
            libc.strlen(None)
        libc.pthread_create(ctypes.byref(thread), None, libc.strlen, None)
        time.sleep(600)
    dist.barrier()
    return dist.get_rank()


def test_a_rank_that_crashes_tells_where(tmp_path: Path) -> None:
    with pytest.raises(ranks.RanksFailedError) as raised:
        ranks.run(functools.partial(crashes, in_python=True), tmp_path / "sign")
    text = str(raised.value)
    assert "rank 1: exit code -11\n" in text
    assert "frame #0: " in text
    assert "in crashes" in text


def test_a_crash_in_a_thread_of_torch_is_reported_and_retried(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="once more") as text:
        by_rank = ranks.run(functools.partial(crashes, in_python=False), tmp_path / "sign")
    assert by_rank == [0, 1]
    assert "frame #0: " in str(text[0].message)


def test_a_crash_in_ampfast_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "_C", SimpleNamespace(__file__="libc"))  # where `crashes` does
    with pytest.raises(ranks.RanksFailedError, match="rank 1: exit code -11"):
        ranks.run(functools.partial(crashes, in_python=False), tmp_path / "sign")


def sleeps(sign: Path) -> None:
    if dist.get_rank() == 0:
        sign.touch()
        time.sleep(600)


def test_a_rank_that_hangs_tells_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sign, late, wait = tmp_path / "sleeps", [False], ranks.wait

    def wait_for_all_but_one(pipes: list[Any], left: float) -> list[Any]:
        """One rank ends; the other sleeps beyond the time limit."""
        if len(pipes) == 2:
            return wait(pipes)
        while not sign.exists():
            time.sleep(0.01)
        late[0] = True
        return []

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6 * late[0], sleep=time.sleep)
    monkeypatch.setattr(ranks, "wait", wait_for_all_but_one)
    monkeypatch.setattr(ranks, "time", clock)
    outcomes = ranks.attempt(sleeps, sign)
    assert [outcome.error for outcome in outcomes] == ["still running", None]
    assert "in sleeps" in outcomes[0].details


def unpicklable() -> Any:
    return lambda: None


def test_an_unpicklable_result_is_an_error() -> None:
    with pytest.raises(ranks.RanksFailedError, match="pickle"):
        ranks.run(unpicklable)
