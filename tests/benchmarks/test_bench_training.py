"""Benchmark of training steps: published shapes, parity before timing, and goals."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from simulated import CPU, HostQueue, on
from torch import nn

import ampfast
from benchmarks import machine, models, timing, training
from benchmarks.cases import CASES
from benchmarks.harness import Samples
from benchmarks.models import Net
from benchmarks.training import Plan

CUDA = torch.device("cuda")
OURS = ampfast.backends.default_for(CPU)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, rows):
        return self.layers(rows).square().mean()


def tiny(optimizer=torch.optim.AdamW, **options) -> Net:
    return Net("tiny", Tiny, lambda: (torch.randn(5, 3),), optimizer, {"lr": 0.01, **options}, 0)


def test_nets_for_a_gpu_have_the_published_shapes():
    for net, name in zip(models.nets(CUDA)[:2], ("gpt2_124m", "resnet50"), strict=True):
        assert net.name == name
        # Some store a matrix transposed.
        shapes = [sorted(map(sorted, shapes)) for shapes in (net.shapes(), CASES[name].shapes)]
        assert shapes[0] == shapes[1]


def test_nets_for_a_cpu_are_as_many_tensors_and_say_that_they_are_smaller():
    large, small = ({net.name: net.shapes() for net in models.nets(d)} for d in (CUDA, CPU))
    assert [len(shapes) for shapes in large.values()] == [148, 161, 508]
    assert [len(shapes) for shapes in small.values()] == [148, 161, 508]
    for (name, shapes), (other, fewer) in zip(large.items(), small.items(), strict=True):
        assert sum(map(math.prod, fewer)) < sum(map(math.prod, shapes))
        assert "width" in other or name == other


@pytest.mark.parametrize("index", range(3), ids=["gpt2", "resnet50", "dlrm"])
def test_a_net_takes_every_parameter_to_its_loss_and_is_the_same_each_time(index):
    net = models.nets(CPU)[index]
    module, inputs = net.made(CPU)
    torch.manual_seed(1)
    again, same = net.made(CPU)
    for one, other in zip(
        [*module.parameters(), *inputs], [*again.parameters(), *same], strict=True
    ):
        assert torch.equal(one, other)
    loss = module(*inputs)
    assert loss.shape == ()
    loss.backward()
    for parameter in module.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


@pytest.mark.parametrize("queue", [None, HostQueue()], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_each_scaler_and_none_are_timed(fused, clip, queue):
    measured = training.measure(Plan(tiny(), fused, clip), on(queue))
    path = ("fused AdamW" if fused else "AdamW") + (", clip" if clip else "")
    others = [(f"{path} by the scaler", "ampfast")] if clip else []
    timed = [(path, "no scaler"), (path, "torch"), (path, "ampfast"), *others]
    assert [(row.call, row.side) for row in measured.rows] == timed
    for row in measured.rows:
        assert (row.subject, row.case, row.dtype) == ("training", "tiny", "bfloat16")
        assert (row.tensors, row.elements, row.list_bytes) == (4, 26, 104)
        assert (row.over_none is None) is (row.side == "no scaler")
        assert (row.vs_torch is None) is (row.side in ("torch", "no scaler"))
        assert (row.host_us is None) is (queue is None)
        assert row.timer == ("wall" if queue is None else "loop")
    limit = 1.05 if queue is None else 1.02
    assert [goal.limit for goal in measured.goals] == [limit] * len(timed[2:])
    assert measured.notes == []


def test_the_perceptron_is_trained_in_float32_too(monkeypatch):
    monkeypatch.setattr(training, "perceptron", lambda *sizes: tiny(torch.optim.SGD))
    (job,) = training.jobs("mlp", on())
    measured = job.run()
    assert [(row.subject, row.call, row.side) for row in measured.rows] == [
        *(("mlp", "SGD", side) for side in ("no scaler", "torch", "ampfast")),
        ("mlp", "SGD, float32", "no scaler"),
    ]
    assert [row.over_none is None for row in measured.rows] == [True, False, False, False]
    assert measured.goals == []


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_all_of_them_take_the_step_that_one_would_write(fused, clip):
    plan = Plan(tiny(), fused, clip)
    module, inputs = plan.net.made(CPU)
    optimizer = plan.optimizer(list(module.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(*inputs)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), training.MAX_NORM)
        optimizer.step()
    wanted = list(module.parameters())

    for provider in ("none", "torch", OURS):
        for path in plan.paths(provider):
            module, inputs = plan.net.made(CPU)
            lesson = training.Lesson(module, inputs, torch.bfloat16)
            parameters = list(module.parameters())
            scaler = None
            if provider != "none":
                scaler = training.make_scaler(provider, CPU, training.SCALE)
            optimizer = plan.optimizer(parameters)
            student = training.Student(
                *(plan, path, provider, lesson, parameters, optimizer, scaler)
            )
            for _ in range(3):
                student.step()
            # A power of two as the scale changes no bit; the more exact norm does.
            close = 0 if path == plan.path else 1e-5
            for parameter, want in zip(parameters, wanted, strict=True):
                torch.testing.assert_close(parameter, want, rtol=close, atol=close)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_fused_optimizer_is_left_to_clip(monkeypatch, fused):
    asked = []
    plain = ampfast.GradScaler.clip_grad_norm_

    def clip(self, optimizer, max_norm, *, in_place):
        asked.append((max_norm, in_place))
        return plain(self, optimizer, max_norm, in_place=in_place)

    monkeypatch.setattr(ampfast.GradScaler, "clip_grad_norm_", clip)
    plan = Plan(tiny(), fused, True)
    assert plan.optimizer(list(Tiny().parameters())).defaults["fused"] is (True if fused else None)
    module, inputs = plan.net.made(CPU)
    training.assert_parity(plan, training.Lesson(module, inputs, torch.bfloat16), [OURS])
    assert set(asked) == {(training.MAX_NORM, not fused)}


def test_ratios_are_to_the_same_step_without_a_scaler_and_with_torchs(monkeypatch):
    seconds = {"none": 1.0, "torch": 1.5, OURS: 1.25}

    def interleave(contenders, effort, cycle):
        return Samples({c.key: [seconds[c.provider] + ("by" in c.path)] * 3 for c in contenders})

    monkeypatch.setattr(timing, "interleave", interleave)
    measured = training.measure(Plan(tiny(), False, True), on())
    assert [row.over_none for row in measured.rows] == [None, 1.5, 1.25, 2.25]
    assert [row.vs_torch for row in measured.rows] == [None, None, 1.5 / 1.25, 1.5 / 2.25]
    assert [goal.ratio.p50 for goal in measured.goals] == [1.25, 2.25]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("scale", "loss of tiny"),
        ("update", "scale and tracker of tiny"),
        ("step", "parameters of tiny"),
        ("clip_grad_norm_", "not close"),
    ],
)
def test_a_scaler_that_is_wrong_is_not_timed(monkeypatch, wrong, match):
    plain = getattr(ampfast.GradScaler, wrong)

    def broken(self, *arguments, **options):
        if wrong == "clip_grad_norm_":
            return plain(self, arguments[0], 1.01 * arguments[1], **options)
        if wrong == "step":
            with torch.no_grad():
                arguments[0].param_groups[0]["params"][-1].add_(1e-6)
        result = plain(self, *arguments, **options)
        if wrong == "update":
            self._growth_tracker.add_(1)
        return result * 1.0001 if wrong == "scale" else result

    monkeypatch.setattr(ampfast.GradScaler, wrong, broken)
    monkeypatch.setattr(timing, "interleave", lambda *arguments: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match=match):
        training.measure(Plan(tiny(torch.optim.SGD), False, True), on())


def test_the_comparison_includes_an_infinity(monkeypatch):
    found = []
    plain = ampfast.GradScaler.step

    def step(self, optimizer):
        result = plain(self, optimizer)
        found.append(self.step_skipped(optimizer))
        return result

    monkeypatch.setattr(ampfast.GradScaler, "step", step)
    module, inputs = tiny().made(CPU)
    lesson = training.Lesson(module, inputs, torch.bfloat16)
    training.assert_parity(Plan(tiny(), False, False), lesson, [OURS])
    assert found == [step == training.BAD_STEP for step in range(training.PARITY_STEPS)]


@pytest.mark.parametrize(
    ("spoil", "match"), [("scaler", "a step was skipped"), ("weight", "parameters overflowed")]
)
def test_steps_that_were_skipped_while_timed_are_not_reported(monkeypatch, spoil, match):
    plain = timing.interleave

    def interleave(contenders, *arguments, **options):
        samples = plain(contenders, *arguments, **options)
        student = contenders[-1].call.__self__
        if spoil == "scaler":
            student.scaler._scale.mul_(0.5)
        else:
            student.parameters[1].data.fill_(math.nan)
        return samples

    monkeypatch.setattr(timing, "interleave", interleave)
    with pytest.raises(AssertionError, match=match):
        training.measure(Plan(tiny(), False, False), on())


def test_jobs_are_made_without_a_net_and_one_that_does_not_fit_is_not_built(monkeypatch):
    monkeypatch.setattr(nn.Module, "__init__", lambda self: pytest.fail("was built"))
    jobs = training.jobs("training", on())
    assert len({job.label for job in jobs}) == len(jobs) == 12
    monkeypatch.undo()
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(Net, "made", lambda self, device: pytest.fail("was built"))
    with pytest.raises(MemoryError, match="are available"):
        jobs[0].run()


def test_a_net_is_freed_after_its_measurement(monkeypatch):
    nets = []
    plain = Net.made

    def made(self, device):
        module, inputs = plain(self, device)
        nets.append(weakref.ref(module))
        return module, inputs

    monkeypatch.setattr(Net, "made", made)
    training.measure(Plan(tiny(), False, True), on())
    gc.collect()
    assert [net() for net in nets] == [None]


def test_the_clip_has_something_to_do():
    plan = Plan(tiny(), False, True)
    module, inputs = plan.net.made(CPU)
    module(*inputs).backward()
    assert nn.utils.get_total_norm([p.grad for p in module.parameters()]) > training.MAX_NORM
