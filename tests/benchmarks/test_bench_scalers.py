"""Calls of scalers, clips and master weights: comparison before timing, rows and slopes."""

from __future__ import annotations

import math

import pytest
import torch
from simulated import SMALL, HostQueue, on

import ampfast
from ampfast.find_nonfinite import NonFiniteFinder
from benchmarks import clipping, kernels, machine, master_weights, steps, tables, timing
from benchmarks import watched as watched_steps
from benchmarks.cases import CASES
from benchmarks.clipping import CLIP, DEFERRED_CLIP
from benchmarks.master_weights import CLIPPED_MASTERS, MASTERS
from benchmarks.nets import perceptron
from benchmarks.steps import FUSED_STEP, PATHS, STEP, STEP_AND_UPDATE, TRACKED, UNSCALE, Curve

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SIZE = SMALL.list_bytes(F32)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Shrinks the cache, so that few lists overflow it."""
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 1 << 13)


FUSED = PATHS[2:]
# What is measured, its calls and whether torch's rows are among them.
MEASURED = {
    "steps": (lambda s: steps.measure(SMALL, F32, s), [STEP, *PATHS[:2], FUSED[0], *FUSED]),
    "steps, 16 bit": (lambda s: steps.measure(SMALL, F16, s), [FUSED[0], *FUSED]),
    "host": (lambda s: steps.measure_host(10, PATHS[:2], s), [STEP, *PATHS[:2]]),
    "aten": (lambda s: steps.measure_aten(10, s), 2 * [STEP] + 2 * [FUSED_STEP]),
    "tracking": (
        lambda s: steps.measure_tracking(SMALL, F32, s),
        [each for path, plain in [*TRACKED.items()] for each in (plain, path)],
    ),
    "growth": (lambda s: Curve("tensors", (), 0).measure(20, s), 2 * ["by tensors"]),
    "clip": (lambda s: clipping.measure(SMALL, F32, s), 2 * [CLIP] + [DEFERRED_CLIP]),
    "clip, 16 bit": (lambda s: clipping.measure(SMALL, BF16, s), 2 * [CLIP] + [DEFERRED_CLIP]),
}


@pytest.mark.parametrize("queue", [None, HostQueue()], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize("what", MEASURED)
def test_calls_are_timed_beside_those_that_they_replace(what, queue):
    measure, calls = MEASURED[what]
    measured = measure(on(queue))
    assert [row.call for row in measured.rows] == calls
    is_host = what in ("host", "aten")
    for row in measured.rows:
        assert row.subject == what.partition(",")[0]
        others = row.side == "torch" or what == "tracking"
        assert (row.vs_torch is None) is others
        assert (row.over_none is None) is (row.call not in TRACKED)
        assert (row.host_us is None) is (queue is None and not is_host)
        assert (row.ms is None) is is_host
        if is_host:
            assert row.side in ("torch", "ampfast, aten" if what == "aten" else "ampfast")
        else:
            waits = queue is not None and row.call in (STEP, STEP_AND_UPDATE)
            assert row.timer == ("wall" if queue is None else "waits" if waits else "events")
    cold = "" if queue is None or is_host or what == "growth" else ", cold"
    name = "20x100" if what == "growth" else "10x4" if is_host else "small"
    assert {row.case for row in measured.rows} == {name + cold}


def test_rows_have_bytes_and_sizes():
    rows = clipping.measure(SMALL, F32, on()).rows
    assert [row.bytes // SIZE for row in rows] == [3, 3, 1]
    for curve, sizes in (
        (Curve("tensors", (), 0), (20, 2000)),
        (Curve("elements", (), 0), (1, 20)),
    ):
        rows = curve.measure(20, on()).rows
        assert {(row.tensors, row.elements) for row in rows} == {sizes}
        assert curve.points == {row.side: {20: row.ms.p50} for row in rows}
    host, wall = (steps.measure_host(10, (UNSCALE,), on(q)).rows for q in (HostQueue(), None))
    for row in (*host, *wall):
        # Microseconds of a call that takes some.
        assert 1 < row.host_us.p50 < 1e5


def test_torch_refuses_float16_gradients():
    measured = clipping.measure(SMALL, F16, on())
    assert (measured.rows, len(measured.notes)) == ([], 1)
    assert "float16 gradients are unscaled by fused" in steps.measure(SMALL, F16, on()).notes[0]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_samples_of_clips_in_16_bit_begin_with_the_same_gradients(monkeypatch, dtype):
    seen = []
    make, plain = clipping.make_gradients, timing.interleave
    made = []

    def interleave(contenders, *rest, **settings):
        first = [tensor.clone() for tensor in made[-1]]
        for contender in contenders:
            torch._foreach_mul_(made[-1], 2.0)
            with contender.around():
                seen.append(all(map(torch.equal, made[-1], first)))
            for tensor, before in zip(made[-1], first, strict=True):
                tensor.copy_(before)
        return plain(contenders, *rest, **settings)

    monkeypatch.setattr(clipping, "make_gradients", lambda *a: made.append(make(*a)) or made[-1])
    monkeypatch.setattr(timing, "interleave", interleave)
    clipping.measure(SMALL, dtype, on())
    assert seen == 3 * [dtype is BF16]


def spoiled(monkeypatch, name, spoil):
    """Makes a method of the scaler wrong, by what comes before or after it."""
    plain = getattr(ampfast.GradScaler, name)
    monkeypatch.setattr(ampfast.GradScaler, name, lambda self, *a, **k: spoil(plain, self, *a, **k))
    monkeypatch.setattr(timing, "interleave", lambda *arguments: pytest.fail("was timed"))


def misses_infinities(plain, self, optimizer):
    for each in optimizer.param_groups[0]["params"]:
        each.grad.nan_to_num_(posinf=1.0)
    plain(self, optimizer)


def adds(plain, self, optimizer):
    plain(self, optimizer)
    optimizer.param_groups[0]["params"][1].grad[0] += 1


def counts_twice(plain, self):
    plain(self)
    self._growth_tracker.add_(1)


def more_norm(plain, self, *given, **named):
    return plain(self, *given, **named) * 1.00001


def in_place(plain, self, *given, in_place):
    return plain(self, *given)


def other_limit(plain, self, optimizer, limit, *, in_place):
    return plain(self, optimizer, limit * (1.001 if in_place else 1), in_place=in_place)


def other_divisor(plain, self, optimizer, limit, *, in_place):
    return plain(self, optimizer, limit * (1 if in_place else 1.001), in_place=in_place)


@pytest.mark.parametrize(
    ("what", "name", "spoil", "told"),
    [
        ("steps", "unscale_", adds, "full step by cpu, small float32, without an inf"),
        ("steps", "unscale_", misses_infinities, "full step by cpu, small float32, with an inf"),
        ("steps", "update", counts_twice, "full step by cpu, small float32, without an inf"),
        ("host", "unscale_", adds, "full step by cpu, 10x4 float32, without an infinity"),
        ("growth", "update", counts_twice, r"unscale_ \+ update by cpu, 20x100"),
        ("aten", "update", counts_twice, "full step by aten, 10x4"),
        ("tracking", "update", counts_twice, r"unscale_ \+ update by cpu, small float32"),
        ("tracking", "overflow_report", lambda *a: ampfast.tracking.OverflowReport.of([]), "marks"),
        ("clip", "clip_grad_norm_", more_norm, "the norm is"),
        ("clip", "clip_grad_norm_", in_place, "which are only read"),
        ("clip", "clip_grad_norm_", other_limit, "not close"),
        ("clip", "clip_grad_norm_", other_divisor, "the divisor is"),
    ],
)
def test_a_scaler_that_is_wrong_is_not_timed(monkeypatch, what, name, spoil, told):
    spoiled(monkeypatch, name, spoil)
    with pytest.raises(AssertionError, match=told):
        MEASURED[what][0](on())


@pytest.mark.parametrize("queue", [None, HostQueue()], ids=["on a CPU", "as on a GPU"])
def test_watched_steps_are_timed_beside_others(monkeypatch, queue):
    net = perceptron(2, 8, 4)
    plain, watched = watched_steps.measure(net, on(queue)).rows
    assert [row.call for row in (plain, watched)] == ["AdamW", "AdamW, find_nonfinite"]
    assert plain.over_none is None and watched.over_none > 0
    monkeypatch.setattr(NonFiniteFinder, "_fault_of", lambda *arguments: None)
    with pytest.raises(AssertionError, match=r"layers.0.weight is infinite, and the report"):
        watched_steps.measure(net, on(queue))


@pytest.mark.parametrize("measure", [steps.measure, clipping.measure, kernels.measure])
def test_lists_that_do_not_fit_are_refused_before_they_are_made(monkeypatch, measure):
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1 << 20)
    for module in (kernels, steps, clipping):
        monkeypatch.setattr(module, "make_gradients", lambda *arguments: pytest.fail("was made"))
    with pytest.raises(MemoryError, match="1 MiB are available"):
        measure(CASES["one_64m"], F32, on())


# A line from 100 on; with absolute distances the last two points alone decide.
LINE = {10: 1e9, **{size: 5_000 + 40 * size for size in (100, 1_000, 10_000)}}
BENT = {1: 1.0, 1_000: 1e3, 1_000_000: 1e6, 2_000_000: 3e6}


@pytest.mark.parametrize(
    ("unit", "linear_from", "ns", "least", "most"),
    [("tensors", 100, LINE, 39.99, 40.01), ("elements", 1, BENT, 1.0, 1.3)],
)
def test_slopes_are_of_relative_distances_where_the_line_is_one(unit, linear_from, ns, least, most):
    curve = Curve(unit, (), linear_from)
    curve.points["torch"] = {size: 20 * each / 1e6 for size, each in ns.items()}
    curve.points["ampfast"] = {size: each / 1e6 for size, each in ns.items()}
    theirs, ours = curve.slope().rows
    assert least < ours.ns_each < most
    assert (theirs.vs_torch, ours.vs_torch) == (None, pytest.approx(20))
    assert theirs.ns_each == pytest.approx(20 * ours.ns_each)
    assert ours.case == {"tensors": "100 to 10,000 tensors"}.get(unit, "1 to 2,000,000 elements")
    curve.points = {"ampfast": {10: 1.0, 10**9: 2.0}} if linear_from > 1 else {"ampfast": {1: 1.0}}
    (note,) = curve.slope().notes
    assert note.startswith("growth: no slope of ampfast")


def test_optimizers_and_jobs():
    gradients = [torch.ones(1 << 10, 3), torch.ones(())]
    for parameter in steps.optimizer_over(gradients, fused=True).param_groups[0]["params"]:
        assert parameter.is_leaf and parameter.untyped_storage().nbytes() == 4
    for jobs, count in (
        *((steps.host_jobs, 9), (steps.aten_jobs, 3), (steps.tracking_jobs, 2)),
        *((steps.growth_jobs, 13), (master_weights.jobs, 4)),
    ):
        assert len(jobs(on())) == count
    assert master_weights.jobs(on(HostQueue())) == []


@pytest.mark.parametrize("call", [MASTERS, CLIPPED_MASTERS])
def test_master_weights_are_timed_beside_both_ways_by_hand(monkeypatch, call):
    backward, seen = master_weights.backward, {}

    def watched(side, gradients):
        assert all(each.grad is None for each in side.parameters), "zero_grad"
        backward(side, gradients)
        grads = [each.grad for each in side.parameters]
        assert {each.dtype for each in grads} == {F16}
        # All are kept here, so that no address comes back.
        seen.setdefault(side, []).extend(each for each in grads if each.numel())

    monkeypatch.setattr(master_weights, "backward", watched)
    rows = master_weights.measure(SMALL, call, on()).rows
    assert [row.side for row in rows] == ["torch", "a loop", "ampfast"]
    assert {(row.subject, row.dtype, row.call) for row in rows} == {("masters", "float16", call)}
    assert all(len({each.data_ptr() for each in grads}) == len(grads) for grads in seen.values())
    assert len(seen) == 6, "three sides for parity and three to be timed"
    assert tables.pairs(rows, "masters") == [(rows[0], rows[2])]


@pytest.mark.parametrize("call", [MASTERS, CLIPPED_MASTERS])
@pytest.mark.parametrize(
    ("wrong", "match"),
    [("cast", "master weights of|not close"), ("rounded", "parameters of"), ("scale", "scale")],
)
def test_master_weights_that_are_wrong_are_not_timed(monkeypatch, call, wrong, match):
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
                self.scaler.update(1.0)

    monkeypatch.setattr(master_weights, "Loop", Wrong)
    monkeypatch.setattr(master_weights, "interleave", lambda *a, **k: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match=match):
        master_weights.measure(SMALL, call, on())


def test_master_weights_that_are_skipped_while_timed_are_not_reported(monkeypatch):
    plain, backward = master_weights.interleave, master_weights.backward

    def interleave(contenders, *rest, timer, **settings):
        found = plain(contenders, *rest, timer=timer, **settings)
        monkeypatch.setattr(master_weights, "backward", spoil)
        timer(contenders[0], range(1))
        return found

    def spoil(side, gradients):
        backward(side, gradients)
        side.parameters[0].grad[0, 0] = math.inf

    monkeypatch.setattr(master_weights, "interleave", interleave)
    with pytest.raises(AssertionError, match="by torch: a step was skipped while timed"):
        master_weights.measure(SMALL, MASTERS, on())
