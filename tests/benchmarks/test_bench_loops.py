"""Benchmark of training loops: the scaler's own time, equal loops, and their tables."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import torch.distributed as dist
from simulated import CPU, on

import ampfast
from ampfast import distributed
from benchmarks import real_loops
from benchmarks.real_loops import (
    ADAMW,
    FUSED_ADAMW,
    GROUP,
    GUARD,
    KINDS,
    LIMITS,
    LOG_MAX,
    SCHEDULED,
    SCHEDULED_ADAMW,
    TRACK,
    Loop,
)
from benchmarks.results import Row, Spread

OURS = ampfast.backends.default_for(CPU)
FEATURES = (TRACK, LIMITS, GUARD, LOG_MAX, GROUP)
NETS = {net.name: (net, limits) for net, limits in real_loops.GOALS}
SMALL = real_loops.perceptron(2, 32, 64)


class Clock:
    """Clock that only the test advances."""

    def __init__(self):
        self.now = 0

    def perf_counter_ns(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(real_loops, "time", clock)

    def slow(function, nanoseconds):
        def call(*args, **kwargs):
            clock.now += nanoseconds
            return function(*args, **kwargs)

        return call

    for owner, name, nanoseconds in (
        (torch.optim.AdamW, "step", 5000),
        (torch.amp.GradScaler, "scale", 10),
        (torch.amp.GradScaler, "step", 200),
        (torch.amp.GradScaler, "update", 3),
        (torch.Tensor, "backward", 70_000),
        (real_loops.Lesson, "loss", 900_000),
        (torch.optim.lr_scheduler.LambdaLR, "step", 4_000_000),
    ):
        monkeypatch.setattr(owner, name, slow(getattr(owner, name), nanoseconds))
    return clock


@pytest.mark.parametrize("optimizer", [ADAMW, FUSED_ADAMW, *SCHEDULED])
def test_each_part_has_the_scalers_time_and_nothing_else(clock, optimizer):
    loop = Loop(SMALL, optimizer, "torch")
    for _ in range(2):
        assert loop.step() == real_loops.Step(10, 200, 3, 975_213)
    assert loop.timed() == 213e-9
    assert loop.step(bad=True).scaler == 213
    assert len(loop.steps) == 1


NAMED = {
    TRACK: {"track": "overflow"},
    LIMITS: {"min_scale": 1.0, "max_scale": 2.0**24, "hysteresis": 2},
    LOG_MAX: {"policy": ampfast.LogMax()},
}


@pytest.mark.parametrize("call", [each for each in KINDS if each != GROUP])
def test_scalers_and_optimizers_are_what_a_call_names(monkeypatch, call):
    given = {}
    plain = ampfast.GradScaler.__init__

    def init(self, *args, **options):
        given.update(options)
        plain(self, *args, **options)

    monkeypatch.setattr(ampfast.GradScaler, "__init__", init)
    loops = [Loop(SMALL, call, provider) for provider in ("torch", OURS)]
    kind = ampfast.StepGuard if call == GUARD else ampfast.GradScaler
    assert [type(loop._scaler) for loop in loops] == [torch.amp.GradScaler, kind]
    settings = {"init_scale": real_loops.SCALE, "growth_interval": 2**31 - 1, "backend": OURS}
    assert call == GUARD or given == settings | NAMED.get(call, {})
    for loop in loops:
        (group,) = loop._optimizer.param_groups
        assert bool(group["fused"]) is (call in (FUSED_ADAMW, SCHEDULED[1]))
        for step in range(3):
            assert group["lr"] == 1e-4 * (0.9999**step if call in SCHEDULED else 1)
            loop.step()
        assert ("step" in vars(loop._optimizer)) is (call in SCHEDULED)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_a_group_is_of_this_process_alone_and_ends(monkeypatch):
    reduced = []
    plain = distributed.Group.all_reduce_
    monkeypatch.setattr(
        distributed.Group, "all_reduce_", lambda *given: (reduced.append(1), plain(*given))[1]
    )
    measured = real_loops.measure(SMALL, GROUP, on(), {})
    assert [(row.call, row.side) for row in measured.rows] == [(GROUP, "torch"), (GROUP, "ampfast")]
    assert len(reduced) >= real_loops.PARITY_STEPS + measured.rows[0].rounds
    assert not dist.is_initialized()


def test_a_torch_without_gloo_leaves_the_group_out(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    measured = real_loops.measure(SMALL, GROUP, on(), {})
    told = "loops: left out AdamW, group of one, since this torch has no gloo"
    assert (measured.rows, measured.notes) == ([], [told])


@pytest.mark.parametrize("call", [each for each in FEATURES if each != GROUP])
def test_features_are_judged_beside_torchs_plain_scaler(call):
    measured = real_loops.measure(SMALL, call, on(), {call: math.inf})
    assert [(row.call, row.side) for row in measured.rows] == [(call, "torch"), (call, "ampfast")]
    (goal,) = measured.goals
    assert (goal.call, goal.over, goal.verdict) == (call, f"{call}, torch", "met")


@pytest.mark.parametrize("call", [SCHEDULED_ADAMW, LIMITS, GUARD, LOG_MAX])
def test_a_feature_that_trains_otherwise_is_not_reported(monkeypatch, call):
    plain = ampfast.GradScaler.step

    def step(self, optimizer):
        optimizer.param_groups[0]["lr"] *= 2
        return plain(self, optimizer)

    monkeypatch.setattr(ampfast.GradScaler, "step", step)
    with pytest.raises(AssertionError, match=f"perceptron 2x32, batch 64, {call}, step 0"):
        real_loops.measure(SMALL, call, on(), {})


def test_a_scale_that_rounds_is_not_reported(monkeypatch):
    monkeypatch.setattr(real_loops, "SCALE", 3 * 2.0**14)
    with pytest.raises(
        AssertionError, match=r"AdamW, step 0: the scale 49152\.0 is no power of two"
    ):
        real_loops.measure(SMALL, ADAMW, on(), {})


def test_the_graph_is_freed_before_the_calls_that_are_timed(monkeypatch):
    graphs, alive = [], []
    scale, step = torch.amp.GradScaler.scale, torch.amp.GradScaler.step

    def watched(self, loss):
        scaled = scale(self, loss)
        graphs.extend(map(weakref.ref, (loss, scaled)))
        return scaled

    def look(self, optimizer):
        alive.extend(graph() is not None for graph in graphs)
        return step(self, optimizer)

    loop = Loop(SMALL, ADAMW, "torch")
    monkeypatch.setattr(torch.amp.GradScaler, "scale", watched)
    monkeypatch.setattr(torch.amp.GradScaler, "step", look)
    loop.step()
    assert alive == [False, False]


def test_nets_have_the_parameters_that_goals_are_set_for():
    assert [(len(net.shapes()), *limits.values()) for net, limits in NETS.values()] == [
        (10, 0.40, 0.35, 0.50, 0.50, 0.9, 0.5, 0.5, 1.3, 1.3),
        (62, 0.40, 0.40, 0.40, 0.40, 0.6, 0.4, 0.4, 1.0, 1.1),
        (148, 0.36, 0.36, 0.36, 0.36),
        (1000, None, None),
        (6, 0.60, 0.60),
    ]
    calls = list(KINDS)
    assert [list(limits) for _, limits in real_loops.GOALS] == [
        *(calls, calls, calls[:4], list(SCHEDULED), list(SCHEDULED)),
    ]


@pytest.mark.parametrize("name", ["conv net", "perceptron 500x32, batch 64"])
def test_every_parameter_is_trained(name):
    loop = Loop(NETS[name][0], ADAMW, "torch")
    before = [parameter.detach().clone() for parameter in loop._parameters]
    loop.step()
    assert all(bool(p.grad.isfinite().all() and p.grad.any()) for p in loop._parameters)
    pairs = zip(loop._parameters, before, strict=True)
    assert not any(torch.equal(parameter, first) for parameter, first in pairs)


@pytest.mark.parametrize("optimizer", [ADAMW, FUSED_ADAMW])
def test_loops_take_turns_and_are_judged_by_the_ratio_of_their_rounds(monkeypatch, optimizer):
    turns = []
    plain = Loop.timed

    def timed(self):
        turns.append(self.contender.provider)
        plain(self)
        seconds = {"torch": 8e-6, OURS: 2e-6}[turns[-1]]
        return seconds if len(turns) > 4 else 1.0

    monkeypatch.setattr(Loop, "timed", timed)
    measured = real_loops.measure(SMALL, optimizer, on(), {ADAMW: 0.3})
    rounds = turns[4:]
    assert rounds[:4] == ["torch", OURS, OURS, "torch"]
    assert [(row.subject, row.call, row.side) for row in measured.rows] == [
        ("loops", optimizer, "torch"),
        ("loops", optimizer, "ampfast"),
    ]
    theirs, ours = measured.rows
    assert (theirs.host_us.p50, ours.host_us.p50) == pytest.approx((8.0, 2.0))
    assert (theirs.vs_torch, ours.vs_torch) == (None, pytest.approx(4.0))
    assert (ours.tensors, ours.elements, ours.dtype) == (4, 2 * 33 * 32, "bfloat16")
    assert min(ours.parts_us) > 0
    assert 0 < ours.share < 1
    if optimizer == FUSED_ADAMW:
        assert measured.goals == []
        return
    (goal,) = measured.goals
    assert (goal.limit, goal.ratio.p50, goal.verdict) == (0.3, pytest.approx(0.25), "met")


def test_parts_are_of_the_timed_rounds_only():
    loop = Loop(SMALL, ADAMW, "torch")
    warm_up, timed = real_loops.Step(9, 9, 9, 27), real_loops.Step(1000, 2000, 3000, 60_000)
    loop.steps = [*5 * [warm_up], *3 * [timed]]
    row = Row("loops", "a", "b", "c", "torch", ms=Spread(1, 1, 1), rounds=3)
    row = real_loops._with_parts(row, loop)
    assert (row.parts_us, row.share) == ((1.0, 2.0, 3.0), 0.1)


@pytest.mark.parametrize("wrong_from", [1, 2 * real_loops.PARITY_STEPS])
def test_a_scaler_that_trains_otherwise_is_not_reported(monkeypatch, wrong_from):
    steps = []
    plain = ampfast.GradScaler.step

    def step(self, optimizer):
        steps.append(1)
        if len(steps) >= wrong_from:
            optimizer.param_groups[0]["params"][0].grad[0] *= 1.5
        return plain(self, optimizer)

    monkeypatch.setattr(ampfast.GradScaler, "step", step)
    when = "step 0" if wrong_from == 1 else "after it was timed"
    with pytest.raises(AssertionError, match=f"perceptron 2x32, batch 64, AdamW, {when}"):
        real_loops.measure(SMALL, ADAMW, on(), {})
    assert wrong_from > 1 or len(steps) == 1, "it was timed"


def test_loops_that_skip_while_timed_are_not_reported(monkeypatch):
    plain = Loop.step
    monkeypatch.setattr(Loop, "timed", lambda self: plain(self, bad=True).scaler / 1e9)
    with pytest.raises(AssertionError, match="a step was skipped while timed"):
        real_loops.measure(SMALL, ADAMW, on(), {})


def test_parity_sees_a_step_that_is_skipped():
    loop = Loop(SMALL, FUSED_ADAMW, OURS)
    before = [tensor.detach().clone() for tensor in loop.state()]
    loop.step(bad=True)
    assert loop.state()[0] == real_loops.SCALE / 2
    assert all(map(torch.equal, loop.state()[2:], before[2:]))
