"""Passes over lists: sizes, bytes, comparison before timing, on a CPU and as on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from simulated import AS_ON_GPU, ON_CPU, SMALL, launch_by

from benchmarks import kernels, machine, providers, timing
from benchmarks.providers import COPY, HALF_COPY, NORM, PATHS

TORCH_OP = torch._amp_foreach_non_finite_check_and_unscale_
SIZE = SMALL.list_bytes(torch.float32)


@pytest.mark.parametrize("dtype", [*kernels.DTYPES, torch.float64], ids=str)
def test_each_path_is_timed_beside_torchs_and_a_copy_on_a_cpu(dtype):
    measured = kernels.measure(SMALL, dtype, ON_CPU)
    calls = [call for call in (*PATHS, NORM) for _ in range(2)] + [COPY, HALF_COPY]
    assert ([row.call for row in measured.rows], measured.notes) == (2 * calls, [])
    assert [row.case for row in measured.rows] == 10 * ["small"] + 10 * ["small, cold"]
    size = SMALL.list_bytes(dtype)
    assert [row.bytes / size for row in measured.rows] == 2 * [1, 1, 2, 2, 2, 2, 1, 1, 2, 1]
    for rows in (measured.rows[:10], measured.rows[10:]):
        copies = {row.bytes: row for row in rows[8:]}
        for row in rows:
            assert row.gb_s == pytest.approx(row.bytes / row.ms.p50 / 1e6)
            assert row.copy_gb_s == copies[row.bytes].gb_s
            assert (row.timer, row.host_us) == ("wall", None)
            assert (row.vs_torch is None) is (row.side == "torch")
        assert rows[9].percent_of_copy == pytest.approx(100)


@pytest.mark.parametrize("takes", [True, False], ids=["torch's op", "no op"])
def test_launches_are_timed_beside_torch_where_it_has_the_dtype(monkeypatch, takes):
    launch_by(monkeypatch)
    monkeypatch.setattr(providers, "torch_takes", lambda dtype, device: takes)
    measured = kernels.measure(SMALL, torch.bfloat16, AS_ON_GPU, (*PATHS, NORM), "decisive")
    rows = {(row.call, row.side): row for row in measured.rows}
    assert {row.name[:2] for row in measured.rows} == {("decisive", "small, cold")}
    assert {row.timer for row in measured.rows} == {"graph"}
    assert ["has no kernel for bfloat16" in note for note in measured.notes] == [True][takes:]
    for call in PATHS:
        assert ((call, "torch") in rows) is (rows[call, "ampfast"].vs_torch is not None) is takes
    assert rows[NORM, "torch"].ms and rows[NORM, "ampfast"].vs_torch


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("value", "unscale by cpu, small float32, all finite, tensor 0: "),
        ("finds", "flag of check by cpu, small float32, all finite, tensor 0: 1.0, not 0.0"),
        ("finds nothing", "flag of check by cpu, small float32, not all finite, tensor 0: 0.0"),
        ("norm", "the norm is "),
        ("no update", "scale and tracker of unscale+update by cpu"),
    ],
)
def test_wrong_launches_are_not_timed(monkeypatch, wrong, told):
    launch_by(monkeypatch, wrong)
    monkeypatch.setattr(timing, "interleave", lambda *arguments: pytest.fail("was timed"))
    with pytest.raises(AssertionError) as failed:
        kernels.measure(SMALL, torch.float32, AS_ON_GPU, (*PATHS, NORM))
    assert str(failed.value).startswith(f"FAILED cpu, small float32: {told}")


def test_gradients_that_drift_are_not_reported(monkeypatch):
    def halves_when_timed(gradients, found_inf, inv_scale):
        TORCH_OP(gradients, found_inf, torch.clamp(inv_scale, max=0.5))

    # Equal to torch in the comparison, where the inverse scale is smaller.
    monkeypatch.setattr(providers.functional, "unscale_", halves_when_timed)
    with pytest.raises(AssertionError, match="drifted"):
        kernels.measure(SMALL, torch.float32, ON_CPU)
    for value, flag in ((1.0, 1.0), (0.25, 0.0), (4.0, 0.0), (math.nan, 0.0)):
        with pytest.raises(AssertionError, match="drifted"):
            kernels.assert_steady([[torch.tensor(value)]], "", torch.tensor(flag))


@pytest.mark.parametrize(("on", "calls", "lists"), [(ON_CPU, 1, 4), (AS_ON_GPU, 2, 2)])
def test_lists_take_turns_beyond_the_cache_and_must_fit(monkeypatch, on, calls, lists):
    assert kernels.lists_in_turn(SMALL, torch.float32, on) == lists
    assert kernels.lists_in_turn(SMALL, torch.float32, on, whole_calls=True) == calls
    seen = []
    for number in range(5):
        kernels.in_turn(lambda name, turn: seen.append((name, turn)), "ab")(number)
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 0)]
    monkeypatch.setattr(machine, "available_bytes", lambda device: 4 * lists * SIZE - 1)
    with pytest.raises(MemoryError, match="needs 0 MiB, 0 MiB are available"):
        kernels.measure(SMALL, torch.float32, on)
