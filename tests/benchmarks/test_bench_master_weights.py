"""Benchmark of master weights: equal sides, new gradients, goals and the table."""

from __future__ import annotations

import pytest
import torch
from simulated import SMALL, HostQueue, on

from benchmarks import harness, master_weights, tables
from benchmarks.cases import GradCase
from benchmarks.goals import CLIPPED_MASTERS, MASTERS
from benchmarks.harness import FULL, Setting

CALLS = (MASTERS, CLIPPED_MASTERS)


@pytest.mark.parametrize("call", CALLS)
def test_three_sides_are_timed(call):
    measured = master_weights.measure(SMALL, call, on())
    assert [row.side for row in measured.rows] == ["torch", "a loop", "ampfast"]
    for row in measured.rows:
        assert (row.subject, row.dtype, row.call) == ("masters", "float16", call)
        assert row.ms.p50 > 0
    assert measured.goals == []
    table = tables.of_subject("masters", measured.rows)
    header = ("a loop, ms", "torch, ms", "ampfast, ms", "faster")
    assert table.header[table.names :][:4] == header
    assert len(table.lines) == 1
    assert "-" not in table.lines[0]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("wrong", "match"),
    [("cast", "master weights of|not close"), ("rounded", "parameters of"), ("scale", "scale")],
)
def test_nothing_is_timed_that_is_wrong(monkeypatch, call, wrong, match):
    class Wrong(master_weights.Loop):
        def _cast(self):
            super()._cast()
            if wrong == "cast":
                self._masters[1].grad[3] *= 1.1

        def _round(self):
            super()._round()
            if wrong == "rounded":
                self.parameters[1][3] += 0.01
            if wrong == "scale":
                self._scaler.update(1.0)

    monkeypatch.setattr(master_weights, "Loop", Wrong)
    monkeypatch.setattr(master_weights, "interleave", lambda *a, **k: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match=match):
        master_weights.measure(SMALL, call, on())


def test_each_step_has_new_gradients_in_16_bit(monkeypatch):
    seen = {}

    def stepping(kind):
        class Stepping(kind):
            def step(self):
                found = [each.grad for each in self.parameters]
                assert {each.dtype for each in found} == {torch.float16}
                seen.setdefault(self, []).append(found)
                super().step()

        return Stepping

    backward = master_weights.backward

    def of_none(side, gradients):
        assert all(each.grad is None for each in side.parameters), "zero_grad"
        backward(side, gradients)

    monkeypatch.setattr(master_weights, "backward", of_none)
    for name in ("Ours", "Foreach", "Loop"):
        monkeypatch.setattr(master_weights, name, stepping(getattr(master_weights, name)))
    master_weights.measure(SMALL, CLIPPED_MASTERS, on())
    assert len(seen) == 6, "three sides for parity and three to be timed"
    for steps in seen.values():
        # All are kept here, so that no address comes back.
        assert len({each.data_ptr() for step in steps for each in step if each.numel()}) == sum(
            bool(each.numel()) for step in steps for each in step
        )


def test_a_step_that_is_skipped_while_timed_is_an_error(monkeypatch):
    interleave = harness.interleave

    def spoiling(contenders, *rest, timer, **settings):
        found = interleave(contenders, *rest, timer=timer, **settings)
        monkeypatch.setattr(master_weights, "backward", spoil)
        timer(contenders[0], range(1))
        return found

    plain = master_weights.backward

    def spoil(side, gradients):
        plain(side, gradients)
        side.parameters[0].grad[0, 0] = torch.inf

    monkeypatch.setattr(master_weights, "interleave", spoiling)
    with pytest.raises(AssertionError, match="by torch: a step was skipped while timed"):
        master_weights.measure(SMALL, MASTERS, on())


def test_jobs_and_goals():
    labels = [job.label for job in master_weights.jobs(Setting(torch.device("cpu"), FULL))]
    names = ("1000x4", "1000x1k", "resnet50", "bert_base")
    assert labels == [f"{call}, {name}" for name in names for call in CALLS]
    assert len(master_weights.jobs(on())) == 4
    assert master_weights.jobs(on(HostQueue())) == []

    small = GradCase("1000x1k", ((4,), (3,)))
    for call, limit in zip(CALLS, (1 / 2, 1 / 3), strict=True):
        (goal,) = master_weights.measure(small, call, on()).goals
        assert (goal.limit, goal.side, goal.over) == (limit, "ampfast", f"{call}, torch")
    unlimited = master_weights.measure(GradCase("1000x4", ((4,),)), CLIPPED_MASTERS, on())
    assert unlimited.goals == []


def test_the_loop_is_no_backend_of_ours():
    rows = master_weights.measure(SMALL, MASTERS, on()).rows
    assert tables.pairs(rows, "masters") == [(rows[0], rows[2])]
    assert rows[1].side == tables.LOOP
