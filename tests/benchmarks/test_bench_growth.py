"""Benchmark of growth: parity before timing, slopes, and sizes that do not fit."""

from __future__ import annotations

import dataclasses

import pytest
from simulated import BRIEF, HostQueue, on

import ampfast
from benchmarks import __main__ as command
from benchmarks import growth, timing
from benchmarks.results import Results

OURS = "ampfast"
FULL_CURVES = {curve.call: curve for curve in growth.curves(False)}


def _curve(path, **changes):
    return dataclasses.replace(FULL_CURVES[path], points={}, **changes)


@pytest.mark.parametrize("queue", [None, HostQueue()], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize(("path", "size"), [("by tensors", 20), ("by elements", 3000)])
def test_a_point_has_torch_beside_ours(path, size, queue):
    curve = _curve(path)
    measured = growth.measure(curve, size, on(queue))
    assert [row.side for row in measured.rows] == ["torch", OURS]
    for row in measured.rows:
        assert (row.subject, row.call) == ("growth", path)
        assert (row.tensors, row.elements) == ((20, 2000) if path == "by tensors" else (1, 3000))
        assert row.list_bytes == 4 * row.elements
        assert (row.vs_torch is None) is (row.side == "torch")
        assert (row.host_us is None) is (queue is None)
        assert curve.points[row.side] == {size: row.ms.p50}


def test_the_slope_is_that_of_the_line_where_it_is_one():
    curve = _curve("by tensors", linear_from=100)
    nanoseconds = {10: 1e9, **{size: 5_000 + 40 * size for size in (100, 1_000, 10_000)}}
    curve.points = {
        "torch": {size: 20 * ns / 1e6 for size, ns in nanoseconds.items()},
        OURS: {size: ns / 1e6 for size, ns in nanoseconds.items()},
    }
    measured = curve.slope()
    assert measured.notes == []
    torchs, ours = measured.rows
    assert (torchs.side, torchs.vs_torch) == ("torch", None)
    assert torchs.ns_each == pytest.approx(800)
    assert ours.ns_each == pytest.approx(40)
    assert ours.vs_torch == pytest.approx(20)
    assert (ours.call, ours.case) == ("by tensors, slope", "100 to 10,000 tensors")


def test_every_point_counts_for_the_slope_by_its_relative_distance():
    curve = _curve("by elements", linear_from=1)
    # With absolute distances the last two points would decide alone, with a slope of 2.
    curve.points = {OURS: {1: 1e-6, 1_000: 1e-3, 1_000_000: 1.0, 2_000_000: 3.0}}
    (row,) = curve.slope().rows
    assert 1.0 < row.ns_each < 1.3


def test_one_point_has_no_slope():
    curve = _curve("by tensors", linear_from=100)
    curve.points = {OURS: {10: 1.0, 100: 2.0}}
    measured = curve.slope()
    assert measured.rows == []
    (note,) = measured.notes
    assert note.startswith(f"growth: no slope by tensors of {OURS}")


@pytest.mark.parametrize("wrong", ["gradients", "flag", "tracker"])
def test_a_point_that_is_wrong_is_not_timed(monkeypatch, wrong):
    unscale_, update = ampfast.GradScaler.unscale_, ampfast.GradScaler.update

    def broken_unscale_(self, optimizer):
        gradient = optimizer.param_groups[0]["params"][3].grad
        if wrong == "flag":
            gradient.nan_to_num_(posinf=1.0)
        unscale_(self, optimizer)
        if wrong == "gradients":
            gradient[0] += 1

    def broken_update(self):
        update(self)
        self._growth_tracker.add_(wrong == "tracker")

    monkeypatch.setattr(ampfast.GradScaler, "unscale_", broken_unscale_)
    monkeypatch.setattr(ampfast.GradScaler, "update", broken_update)
    monkeypatch.setattr(timing, "interleave", lambda *arguments: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match="update by cpu, 6x100"):
        growth.measure(_curve("by tensors"), 6, on())


def test_a_point_that_does_not_fit_is_left_out_with_a_message(monkeypatch, tmp_path, capsys):
    curves = [
        _curve("by tensors", sizes=(10, 20, 30), linear_from=10),
        _curve("by elements", sizes=(10, 10**15), linear_from=10),
    ]
    monkeypatch.setattr(growth, "curves", lambda quick: curves)
    monkeypatch.setattr(command, "FULL", BRIEF)
    arguments = ["--only", "growth", "--folder", str(tmp_path)]
    assert command.main(arguments) == 0
    results = Results.read(tmp_path / command.JSON)
    assert not results.complete
    left_out, no_slope, *others = results.notes
    assert left_out.startswith("skipped growth: 1,000,000,000,000,000 elements: needs ")
    assert no_slope.startswith("growth: no slope by elements of torch")
    assert len(others) == 1
    cases = [row.case for row in results.rows if row.side == OURS]
    assert cases == ["10x100", "20x100", "30x100", "10 to 30 tensors", "1x10"]
    assert left_out in capsys.readouterr().out
