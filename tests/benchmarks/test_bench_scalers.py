"""Calls of scalers, clips and training: comparison before timing, and rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from simulated import AS_ON_GPU, CPU, ON_CPU, SMALL

import ampfast
from ampfast import distributed
from ampfast.diagnose.find_nonfinite import NonFiniteFinder
from benchmarks import loops, nets, steps, timing, training
from benchmarks.loops import FEATURES, GROUP, SCHEDULED, WITHOUT_SCHEDULE, Kind, Loop
from benchmarks.steps import CLIP, DEFERRED_CLIP, FUSED_STEP, PATHS, STEP

F32, F16 = torch.float32, torch.float16
OURS = ampfast.backends.default_for(CPU)
NET = nets.perceptron(2, 8, 4)
SGD = nets.Net("net", NET.build, NET.inputs, torch.optim.SGD, {"lr": 1.0})
FUSED = PATHS[2:]
KINDS = {kind.call(NET): kind for kind in (*WITHOUT_SCHEDULE, *SCHEDULED, *FEATURES)}


def small(subject, count, paths, names=()):
    return lambda on: steps.small_job(subject, count, paths, on, names).run()


# What is measured, its calls and torch's rows among them.
MEASURED = {
    "steps": (
        lambda on: steps.measure("steps", SMALL, F32, on),
        [STEP, *PATHS[:2], FUSED[0], *FUSED],
    ),
    "steps, 16 bit": (lambda on: steps.measure("steps", SMALL, F16, on), [FUSED[0], *FUSED]),
    "host": (small("host", 10, PATHS[:2]), [STEP, *PATHS[:2]]),
    "aten": (small("aten", 10, (STEP, FUSED_STEP), ["aten"]), 2 * [STEP] + 2 * [FUSED_STEP]),
    "clip": (lambda on: steps.measure("clip", SMALL, F32, on), 2 * [CLIP] + [DEFERRED_CLIP]),
}


@pytest.mark.parametrize("on", [ON_CPU, AS_ON_GPU], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize("what", MEASURED)
def test_calls_are_timed_beside_those_that_they_replace(what, on):
    measure, calls = MEASURED[what]
    rows = measure(on).rows
    assert [row.call for row in rows] == calls
    is_host = what in ("host", "aten")
    for row in rows:
        assert row.subject == what.partition(",")[0]
        assert (row.vs_torch is None) is (row.side == "torch") and row.over_none is None
        assert (row.ms is None) is (row.timer is None) is (row.host_us is not None) is is_host
        if is_host:
            # Microseconds of a call that takes some.
            assert 1 < row.host_us.p50 < 1e5
            assert row.side in ("torch", "ampfast, aten" if what == "aten" else "ampfast")
    is_cold = on is AS_ON_GPU and not is_host
    name = "10x4" if is_host else "small"
    assert {row.case for row in rows} == {f"{name}, cold" if is_cold else name}


def infinite_to_1(plain, self, optimizer):
    for each in optimizer.param_groups[0]["params"]:
        each.grad.nan_to_num_(posinf=1.0)
    return plain(self, optimizer)


def adds(plain, self, optimizer):
    plain(self, optimizer)
    optimizer.param_groups[0]["params"][1].grad[0] += 1


def counts_twice(plain, self):
    plain(self)
    self._growth_tracker.add_(1)


def moves(plain, self, optimizer):
    with torch.no_grad():
        optimizer.param_groups[0]["params"][-1].add_(1e-6)
    return plain(self, optimizer)


def other_limit(plain, self, optimizer, limit, **named):
    return plain(self, optimizer, 1.01 * limit, **named)


COMPARED = MEASURED | {
    "loops": (lambda on: loops.measure(NET, Kind(), on),),
    "loops, fused": (lambda on: loops.measure(NET, SCHEDULED[1], on),),
    "loops, limits": (lambda on: loops.measure(NET, KINDS["AdamW, limits"], on),),
    "training": (lambda on: training.measure(SGD, Kind(clip=True), on),),
}


@pytest.mark.parametrize(
    ("what", "name", "spoil", "told"),
    [
        ("steps", "unscale_", adds, "full step by cpu, small float32, without an inf"),
        ("steps", "unscale_", infinite_to_1, "full step by cpu, small float32, with an inf"),
        ("steps", "update", counts_twice, "full step by cpu, small float32, without an inf"),
        ("aten", "update", counts_twice, "full step by aten, 10x4"),
        ("clip", "clip_grad_norm_", lambda plain, *a, **k: plain(*a, **k) * 1.00001, "the norm is"),
        ("clip", "clip_grad_norm_", other_limit, "not close"),
        *(
            (what, *each)
            for what in ("loops", "loops, fused", "training")
            for each in (
                ("scale", lambda plain, *given: plain(*given) * 1.0001, "loss of"),
                ("update", counts_twice, "scale and tracker of"),
                ("step", moves, "parameters of"),
            )
        ),
        ("loops", "step", infinite_to_1, "step 2"),
        ("loops, limits", "step", moves, "parameters of perceptron 2x8.*, step 0"),
        ("training", "clip_grad_norm_", other_limit, "close"),
    ],
)
def test_a_scaler_that_is_wrong_is_not_timed(monkeypatch, what, name, spoil, told):
    plain = getattr(ampfast.GradScaler, name)
    monkeypatch.setattr(ampfast.GradScaler, name, lambda *a, **k: spoil(plain, *a, **k))
    monkeypatch.setattr(timing, "interleave", lambda *a, **k: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match=told):
        COMPARED[what][0](ON_CPU)


@pytest.mark.parametrize("call", KINDS)
def test_loops_are_timed_with_what_their_call_names(monkeypatch, call):
    reduced, reduce = [], distributed.Group.all_reduce_
    monkeypatch.setattr(
        distributed.Group, "all_reduce_", lambda *args: (reduced.append(1), reduce(*args))[1]
    )
    theirs, ours = loops.measure(NET, KINDS[call], ON_CPU).rows
    assert (theirs.name[3:], ours.name[3:]) == ((call, "torch"), (call, "ampfast"))
    assert (theirs.vs_torch is None, ours.vs_torch > 0) == (True, True)
    assert (ours.subject, ours.dtype, ours.tensors, ours.elements) == ("loops", "bfloat16", 4, 144)
    assert bool(reduced) is (KINDS[call].feature == GROUP) and not dist.is_initialized()


@pytest.mark.parametrize("kind", [Kind(), Kind(fused=True), *SCHEDULED])
def test_a_step_takes_the_scalers_time_and_nothing_else(monkeypatch, kind):
    now = [0]

    def slow(owner, name, nanoseconds):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            now[0] += nanoseconds
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(loops.time, "perf_counter_ns", lambda: now[0])
    for owner, name, nanoseconds in (
        *((torch.optim.AdamW, "step", 5000), (torch.amp.GradScaler, "scale", 10)),
        *((torch.amp.GradScaler, "step", 200), (torch.amp.GradScaler, "update", 3)),
        *((torch.Tensor, "backward", 70_000), (nets.Lesson, "loss", 900_000)),
        (torch.optim.lr_scheduler.LambdaLR, "step", 4_000_000),
    ):
        slow(owner, name, nanoseconds)
    loop = Loop(NET, kind, "torch", NET.lesson(CPU))
    taken = [loop.step(), loop.step()]
    loop.lesson.inputs[0].fill_(math.inf)  # the optimizer is not called
    assert [*taken, loop.step()] == pytest.approx(3 * [213e-9])


@pytest.mark.parametrize("on", [ON_CPU, AS_ON_GPU], ids=["on a CPU", "as on a GPU"])
def test_clipped_steps_are_timed_in_every_way(monkeypatch, on):
    labels = [each.label for each in training.jobs(on)]
    assert len(set(labels)) == len(labels), "rows of one name"
    clipped, besides = training.CLIPPED, training.BESIDES
    rows = training.measure(NET, clipped, on, besides).rows
    by_scaler = [each.call(NET) for each in (training.BY_SCALER, *besides)]
    expected = [*(3 * [clipped.call(NET)]), *by_scaler, "fused AdamW"]
    assert [row.call for row in rows] == expected
    assert len(set(by_scaler)) == 5 and all(row.replaces == expected[0] for row in rows[3:8])
    assert [row.over_none is None for row in rows] == [True, *(8 * [False])]
    assert [row.vs_torch is None for row in rows] == [True, True, *(6 * [False]), True]
    monkeypatch.setattr(NonFiniteFinder, "report", lambda finder: "layers.0")
    with pytest.raises(AssertionError, match=r"layers.0"):
        training.measure(NET, clipped, on, besides)
