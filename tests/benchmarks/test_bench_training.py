"""Training: the scaler's own time in loops, and whole steps; comparison before timing."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from simulated import CPU, HostQueue, on
from torch import nn

import ampfast
from ampfast import distributed
from benchmarks import loops, machine, nets, timing, training
from benchmarks.cases import CASES, GradCase
from benchmarks.loops import FEATURES, GROUP, GUARD, SCHEDULED, Kind, Lesson, Loop, Step
from benchmarks.results import Row, Spread

OURS = ampfast.backends.default_for(CPU)
SMALL = nets.perceptron(2, 8, 4)
KINDS = {kind.call(SMALL): kind for kind in (Kind(), Kind(fused=True), *SCHEDULED, *FEATURES)}
CUDA = torch.device("cuda")


def loop_of(kind, provider, net=SMALL):
    return Loop(net, kind, provider, Lesson.of(net, CPU))


@pytest.mark.parametrize("skips", ["torch", OURS, None])
def test_a_scale_that_a_policy_moves_is_no_skip(monkeypatch, skips):
    plain = Loop.timed

    def timed(loop):
        if loop.key[-1] == skips:
            loop.step(bad=True)
        seconds = plain(loop)
        if loop.key[-1] == OURS and skips is None:
            loop.scaler.update(loop.scaler.get_scale() * 2.0)
        return seconds

    monkeypatch.setattr(Loop, "timed", timed)
    monkeypatch.setattr(loops, "_assert_same", lambda *given: None)
    with pytest.raises(AssertionError, match="a step was skipped") if skips else nullcontext():
        loops.measure(SMALL, KINDS["AdamW, LogMax"], on())


@pytest.mark.parametrize("kind", [Kind(), Kind(fused=True), *SCHEDULED])
def test_each_part_has_the_scalers_time_and_nothing_else(monkeypatch, kind):
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
        *((torch.Tensor, "backward", 70_000), (Lesson, "loss", 900_000)),
        (torch.optim.lr_scheduler.LambdaLR, "step", 4_000_000),
    ):
        slow(owner, name, nanoseconds)
    loop = loop_of(kind, "torch")
    for _ in range(2):
        assert loop.step() == Step(10, 200, 3, 975_213)
    assert loop.timed() == 213e-9
    assert loop.step(bad=True).scaler == 213
    assert len(loop.steps) == 1


@pytest.mark.parametrize("call", KINDS)
def test_loops_are_timed_with_what_their_call_names(monkeypatch, call):
    kind, given, reduced = KINDS[call], [], []
    plain, reduce = ampfast.GradScaler.__init__, distributed.Group.all_reduce_

    def init(self, *args, **options):
        given.append(options)
        plain(self, *args, **options)

    monkeypatch.setattr(ampfast.GradScaler, "__init__", init)
    monkeypatch.setattr(
        distributed.Group, "all_reduce_", lambda *args: (reduced.append(1), reduce(*args))[1]
    )
    theirs, ours = loops.measure(SMALL, kind, on()).rows
    assert (theirs.call, theirs.side, ours.call, ours.side) == (call, "torch", call, "ampfast")
    assert (theirs.vs_torch is None, ours.vs_torch > 0) == (True, True)
    assert (ours.subject, ours.dtype, ours.tensors, ours.elements) == ("loops", "bfloat16", 4, 144)
    assert min(ours.parts_us) > 0 and 0 < ours.share < 1 and ours.ms is None
    for options in given:
        assert kind.options.items() <= options.items()
    assert bool(reduced) is (kind.feature == GROUP) and not dist.is_initialized()
    if kind.feature == GROUP:
        assert len(reduced) >= loops.PARITY_STEPS + ours.rounds
        return
    loop = loop_of(kind, OURS)
    assert isinstance(loop.scaler, ampfast.StepGuard) is (kind.feature == GUARD)
    assert bool(loop.optimizer.param_groups[0]["fused"]) is kind.fused
    loop.step()
    lr = 1e-4 * (0.9999 if kind.schedule else 1)
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(lr, rel=1e-9)


def test_loops_take_turns_and_rows_have_the_ratio_of_their_rounds(monkeypatch):
    turns = []

    def timed(self):
        turns.append(self.provider)
        self.steps.append(Step(1000, 2000, 3000, 60_000) if len(turns) > 4 else Step(9, 9, 9, 27))
        return {"torch": 8e-6, OURS: 2e-6}[self.provider] if len(turns) > 4 else 1.0

    monkeypatch.setattr(Loop, "timed", timed)
    theirs, ours = loops.measure(SMALL, Kind(), on()).rows
    assert turns[4:8] == ["torch", OURS, OURS, "torch"]
    assert (theirs.host_us.p50, ours.host_us.p50) == pytest.approx((8.0, 2.0))
    assert ours.vs_torch == pytest.approx(4.0)
    # Without the warm-up.
    assert (ours.parts_us, ours.share) == ((1.0, 2.0, 3.0), 0.1)
    loop = loop_of(Kind(), "torch")
    loop.steps = [*5 * [Step(9, 9, 9, 27)], *3 * [Step(1000, 2000, 3000, 60_000)]]
    row = Row("loops", "a", "b", "c", "torch", ms=Spread(1, 1, 1), rounds=3)
    assert loops._with_parts(row, loop, GradCase("a", ())).parts_us == (1.0, 2.0, 3.0)


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

    loop = loop_of(Kind(), "torch")
    monkeypatch.setattr(torch.amp.GradScaler, "scale", watched)
    monkeypatch.setattr(torch.amp.GradScaler, "step", look)
    loop.step()
    assert alive == [False, False]


def other_step(plain, self, optimizer):
    with torch.no_grad():
        optimizer.param_groups[0]["params"][-1].add_(1e-6)
    return plain(self, optimizer)


def misses_infinities(plain, self, optimizer):
    for each in optimizer.param_groups[0]["params"]:
        each.grad.nan_to_num_(posinf=1.0)
    return plain(self, optimizer)


def counts_twice(plain, self):
    plain(self)
    self._growth_tracker.add_(1)


def other_limit(plain, self, optimizer, limit, **more):
    return plain(self, optimizer, 1.01 * limit, **more)


def other_loss(plain, self, loss):
    return plain(self, loss) * 1.0001


WRONG = [
    *[("scale", other_loss, "loss of"), ("update", counts_twice, "scale and tracker of")],
    *[("step", other_step, "parameters of"), ("step", misses_infinities, "step 2")],
]
SCALED = [(kind, *each) for kind in (Kind(), SCHEDULED[1]) for each in WRONG]
CLIPPED = [(Kind(clip=True), *e) for e in (*WRONG[:3], ("clip_grad_norm_", other_limit, "close"))]


@pytest.mark.parametrize(("kind", "name", "spoil", "told"), [*SCALED, *CLIPPED])
def test_a_scaler_that_is_wrong_is_not_timed(monkeypatch, kind, name, spoil, told):
    plain = getattr(ampfast.GradScaler, name)
    monkeypatch.setattr(ampfast.GradScaler, name, lambda *a, **k: spoil(plain, *a, **k))
    for module in (timing, loops):
        monkeypatch.setattr(module, "interleave", lambda *a, **k: pytest.fail("was timed"))
    net = nets.Net("net", SMALL.build, SMALL.inputs, torch.optim.SGD, {"lr": 1.0})
    with pytest.raises(AssertionError, match=told):
        training.measure(net, kind, on()) if kind.clip else loops.measure(SMALL, kind, on())


@pytest.mark.parametrize("kind", [kind for kind in FEATURES if not kind.follows_torch])
def test_a_feature_that_trains_otherwise_is_not_timed(monkeypatch, kind):
    plain = ampfast.GradScaler.step
    monkeypatch.setattr(ampfast.GradScaler, "step", lambda *a: other_step(plain, *a))
    with pytest.raises(AssertionError, match=r"parameters of perceptron 2x8.*, step 0"):
        loops.measure(SMALL, kind, on())
    monkeypatch.undo()
    monkeypatch.setattr(loops, "SCALE", 3 * 2.0**14)
    with pytest.raises(AssertionError, match=r"the scale 49152\.0 is no power of two"):
        loops.measure(SMALL, Kind(), on())


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ("skip", "a step was skipped while timed"),
        ("gradient", "parameters of .*, after it was timed"),
    ],
)
def test_loops_that_go_wrong_while_timed_are_not_reported(monkeypatch, spoil, told):
    plain = Loop.step

    def timed(self):
        if spoil == "gradient" and self.provider == OURS:
            self.parameters[0].data[0] += 1
        return plain(self, bad=spoil == "skip").scaler / 1e9

    monkeypatch.setattr(Loop, "timed", timed)
    with pytest.raises(AssertionError, match=told):
        loops.measure(SMALL, Kind(), on())


@pytest.mark.parametrize("queue", [None, HostQueue()], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_whole_steps_are_timed_with_each_scaler_and_none(monkeypatch, fused, clip, queue):
    asked = []
    plain = ampfast.GradScaler.clip_grad_norm_

    def clip_grad_norm_(self, optimizer, max_norm, *, in_place):
        asked.append((max_norm, in_place))
        return plain(self, optimizer, max_norm, in_place=in_place)

    seconds = {"none": 1.0, "torch": 1.5, OURS: 1.25}

    def interleave(contenders, *rest, **more):
        found = {}
        for contender in contenders:
            contender.call(0)
            found[contender.key] = 3 * [seconds[contender.provider] + ("by" in contender.path)]
        return found

    monkeypatch.setattr(ampfast.GradScaler, "clip_grad_norm_", clip_grad_norm_)
    monkeypatch.setattr(timing, "interleave", interleave)
    rows = training.measure(SMALL, Kind(fused, clip), on(queue)).rows
    path = ("fused AdamW" if fused else "AdamW") + (", clip" if clip else "")
    sides = [(path, "no scaler"), (path, "torch"), (path, "ampfast")]
    sides += [(f"{path} by the scaler", "ampfast")] if clip else []
    assert [(row.call, row.side) for row in rows] == sides
    assert [row.over_none for row in rows] == [None, 1.5, 1.25, 2.25][: len(sides)]
    assert [row.vs_torch for row in rows] == [None, None, 1.2, 1.5 / 2.25][: len(sides)]
    for row in rows:
        assert (row.subject, row.dtype, row.tensors) == ("training", "bfloat16", 4)
        assert (row.elements, row.list_bytes, row.ms.p50 >= 1000) == (144, 576, True)
        assert (row.host_us is None) is (queue is None)
        assert row.timer == ("wall" if queue is None else "loop")
    # A fused optimizer is left to clip.
    assert set(asked) == ({(loops.MAX_NORM, not fused)} if clip else set())


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_all_sides_take_the_step_that_one_would_write(fused, clip):
    module, inputs = SMALL.made(CPU)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=fused)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(*inputs)
        loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(module.parameters(), loops.MAX_NORM)
            assert norm > loops.MAX_NORM, "else the clip has nothing to do"
        optimizer.step()
    for provider in ("none", "torch", OURS):
        for by_scaler in (False, True)[: 1 + (clip and provider == OURS)]:
            loop = loop_of(Kind(fused, clip, by_scaler), provider)
            for _ in range(3):
                loop.step()
            # A power of two as the scale changes no bit; the more exact norm does.
            close = 1e-5 if by_scaler else 0
            for parameter, want in zip(loop.parameters, module.parameters(), strict=True):
                torch.testing.assert_close(parameter, want, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("spoil", "told"), [("scaler", "a step was skipped"), ("weight", "parameters overflowed")]
)
def test_steps_that_go_wrong_while_timed_are_not_reported(monkeypatch, spoil, told):
    plain = timing.interleave

    def interleave(contenders, *arguments, **options):
        samples = plain(contenders, *arguments, **options)
        loop = contenders[-1].call.__self__
        if spoil == "scaler":
            loop.scaler._scale.mul_(0.5)
        else:
            loop.parameters[1].data.fill_(math.nan)
        return samples

    monkeypatch.setattr(timing, "interleave", interleave)
    with pytest.raises(AssertionError, match=told):
        training.measure(SMALL, Kind(), on())


def test_nets_for_a_gpu_have_the_published_shapes_and_those_for_a_cpu_as_many():
    large, small = nets.nets(CUDA), nets.nets(CPU)
    for net, name in zip(large, ("gpt2_124m", "resnet50"), strict=False):
        # Some store a matrix transposed.
        shapes = [sorted(map(sorted, shapes)) for shapes in (net.shapes(), CASES[name].shapes)]
        assert shapes[0] == shapes[1]
    for of_gpu, of_cpu, count in zip(large, small, (148, 161, 508), strict=True):
        assert len(of_gpu.shapes()) == len(of_cpu.shapes()) == count
        elements = [sum(map(math.prod, net.shapes())) for net in (of_gpu, of_cpu)]
        assert elements[0] > elements[1]
        assert "width" in of_cpu.name or of_gpu.name == of_cpu.name
    counts = [(len(net.shapes()), len(kinds)) for net, kinds in loops.LOOPS]
    assert counts == [(10, 9), (62, 9), (148, 4), (1000, 2), (6, 2)]
    assert (len(loops.jobs(on())), loops.jobs(on(HostQueue()))) == (26, [])


@pytest.mark.parametrize("net", [*nets.nets(CPU), nets.conv_net()], ids=lambda net: net.name)
def test_a_net_takes_every_parameter_to_its_loss_and_is_the_same_each_time(net):
    module, inputs = net.made(CPU)
    torch.manual_seed(1)
    again, same = net.made(CPU)
    for one, other in zip(
        [*module.parameters(), *inputs], [*again.parameters(), *same], strict=True
    ):
        assert torch.equal(one, other)
    module(*inputs).backward()
    assert all(bool(p.grad.isfinite().all() and p.grad.any()) for p in module.parameters())


def test_a_net_that_does_not_fit_is_not_built_and_is_freed(monkeypatch):
    made = []
    plain = nets.Net.made

    def watched(self, device):
        module, inputs = plain(self, device)
        made.append(weakref.ref(module))
        return module, inputs

    monkeypatch.setattr(nets.Net, "made", watched)
    training.measure(SMALL, Kind(clip=True), on())
    gc.collect()
    assert [module() for module in made] == [None]
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(nets.Net, "made", lambda *arguments: pytest.fail("was built"))
    jobs = training.jobs(on())
    assert len({job.label for job in jobs}) == len(jobs) == 12
    with pytest.raises(MemoryError, match="are available"):
        jobs[0].run()
