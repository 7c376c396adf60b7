"""Limits by norms: steps that are skipped, clips that follow the norms of steps, their histories.

The rules are compared with models in plain Python: that of Sigmas, and those of two papers.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
import re
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import pretend_capture
from support.comparison import Hooked, assert_same, started
from support.gradients import parameter_with, sgd_with
from support.models import SPIKE, Rule, float32, grads_in, random_norms
from support.steps import Training, adamw, host_reads, take_step
from torch import Tensor
from torch.distributed import checkpoint

import ampfast
from ampfast import GradScaler, Percentile, Sigmas, StepGuard, ZScore

INF = math.inf
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "aten"])
WINDOW = 4

fused = partial(adamw, fused=True)
KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": adamw,
    "fused": fused,
    "fused momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "masters": lambda params: ampfast.master_weights_(adamw(params)),
    "fused masters": lambda params: ampfast.master_weights_(fused(params)),
}


class Loop(Training):
    """Its gradients are clipped, and each step is as the reason of its skip says."""

    def __init__(self, make: str = "plain", count: int = 1, **options: Any) -> None:
        options = {"init_scale": 8.0, "growth_interval": 3, **options}
        super().__init__(GradScaler("cpu", **options), KINDS[make], count)

    def clip(self, norm: float, above: Any, *more: Any, which: int = 0, **options: Any) -> Tensor:
        self.backward(norm, first=which)
        optimizer = self.optimizers[which]
        return self.scaler.clip_grad_norm_(optimizer, 1.0, *more, skip_above=above, **options)

    def clipped(self, norm: float, *args: Any, which: int = 0, **options: Any) -> str | None:
        """Reason of the skip of a clipped step; None for one that is taken."""
        self.clip(norm, *args, which=which, **options)
        return self.finish(which)[0]

    def run(self, norms: Sequence[float], limit: Any = None, which: int = 0) -> list[str | None]:
        limit = limit or Sigmas(2.0, WINDOW)
        return [self.clipped(norm, limit, which=which) for norm in norms]

    def finish(self, *which: int) -> list[str | None]:
        """Reasons of the skips of these optimizers' steps, or of all."""
        places = which or range(len(self.params))
        optimizers = [self.optimizers[place] for place in places]
        before = [self.params[place].detach().clone() for place in places]
        moves = [bool(self.params[place].grad.any()) for place in places]
        states = [copy.deepcopy(each.state_dict()["state"]) for each in optimizers]
        take_step(self.scaler, *optimizers, way=self.way)
        reasons = [self.scaler.skip_reason(each) for each in optimizers]
        for number, (optimizer, reason) in enumerate(zip(optimizers, reasons, strict=True)):
            skipped = reason is not None
            assert self.scaler.step_skipped(optimizer) == skipped
            assert self.scaler.found_inf(optimizer).item() == float(skipped)
            if moves[number]:
                assert torch.equal(before[number], self.params[places[number]]) == skipped
            if skipped and states[number]:
                assert_same(optimizer.state_dict()["state"], states[number])
        return reasons

    def now(self) -> tuple[float, int]:
        return self.scaler.get_scale(), self.scaler.stats().growth_tracker


PROGRAM = [
    *((1.0, None, 8.0, 1), (1.5, None, 8.0, 2), (50.0, "spike", 8.0, 2), (20.0, None, 16.0, 0)),
    *((INF, "nonfinite", 8.0, 0), (2.0, None, 8.0, 1), (21.0, "spike", 8.0, 1)),
    *((math.nan, "nonfinite", 4.0, 0), (30.0, "spike", 4.0, 0), (1.0, None, 4.0, 1)),
]


@pytest.mark.parametrize("way", ["step", "together"])
@pytest.mark.parametrize("order", [2.0, INF, 3.0])
@pytest.mark.parametrize(
    ("make", "in_place"),
    [("plain", True), *itertools.product(("fused", "fused momentum"), (True, False))],
)
@BACKENDS
def test_a_spike_is_skipped_and_leaves_the_scale(
    backend: str, make: str, order: float, in_place: bool, way: str
) -> None:
    loop = Loop(make, backend=backend)
    loop.way = way
    # Norms of the other orders are smaller.
    shrink = {2.0: 1.0, INF: 0.8, 3.0: (0.6**3 + 0.8**3) ** (1 / 3)}[order]
    above = 20.5 * shrink
    for norm, reason, *state in PROGRAM:
        found = loop.clipped(norm, above, order, in_place=in_place)
        assert (found, *loop.now()) == (reason, *state)
    assert loop.scaler.stats().spikes == 3


RULES_OF_SPIKES = [
    1.2,
    0.0,
    Sigmas(2.0, 4),
    Sigmas(0.0, 2),
    Sigmas(6.0, 128),
    Sigmas(3.0, 5, patience=1),
]
RULES_OF_SPIKES += [Sigmas(1.0, 7, patience=9)]


@pytest.mark.filterwarnings("ignore:The gradient norm stayed above")
@pytest.mark.parametrize("limit", RULES_OF_SPIKES, ids=str)
@BACKENDS
def test_steps_follow_the_rule(backend: str, limit: float | Sigmas) -> None:
    loop, rule = Loop("fused", backend=backend), Rule(limit)
    reasons = []
    for norm in random_norms(400, seed=5):
        # A new one in each step, as loops are written.
        total = loop.clip(norm, copy.copy(limit)).item()
        (reason,) = loop.finish()
        overflows = not math.isfinite(loop.param.grad.sum())
        expected = 1.0 if overflows else rule.flag(total)
        assert reason == {0.0: None, 1.0: "nonfinite", SPIKE: "spike"}[expected]
        reasons.append(reason)
    assert set(reasons) == {None, "nonfinite", "spike"}
    if isinstance(limit, Sigmas):
        norms = words_in(loop.scaler)["Sigmas"][4:]
        assert norms[-limit.window :] == rule.taken[-limit.window :]
        assert rule.restarts or rule.patience > 9


@BACKENDS
def test_an_infinite_norm_of_finite_gradients_is_a_spike_at_any_time(backend: str) -> None:
    """It takes no patience, and none makes it usual."""
    loop = Loop("plain", backend=backend, init_scale=1.0, growth_interval=100)
    limit, reasons = Sigmas(2.0, 4, patience=1), []
    for norm in (1.0, 1.1, 0.9, 1.0, 3.5e38, 50.0, 3.5e38, 50.0):
        assert math.isinf(loop.clip(norm, limit)) == (norm > 50)
        reasons += loop.finish()
    assert reasons == [None] * 4 + ["spike"] * 3 + [None]


@pytest.mark.parametrize("above", [20.0, None])
@pytest.mark.parametrize("order", [2.0, 3.0])
@pytest.mark.parametrize(("make", "in_place"), [("plain", True), ("fused", True), ("fused", False)])
def test_optimizers_clipped_together_are_skipped_together(
    make: str, in_place: bool, order: float, above: float | None
) -> None:
    loop, joint = Loop(make, 2, growth_interval=1), []
    for norms, reason in (
        *(((1.0, 1.0), None), ((40.0, 1.0), "spike"), ((INF, 1.0), "nonfinite")),
        *(((1.0, math.nan), "nonfinite"), ((1.0, 40.0), "spike"), ((1.0, 1.0), None)),
    ):
        loop.backward(*norms)
        options: Any = {"skip_above": above, "in_place": in_place}
        norm = loop.scaler.clip_grad_norm_(loop.optimizers, 1.0, order, **options)
        joint.append(math.hypot(*norms) if order == 2 else norm.item())
        assert norm.item() == pytest.approx(joint[-1], nan_ok=True)
        flags = [loop.scaler._found_inf_per_device(each) for each in loop.optimizers]
        assert len({flag.data_ptr() for each in flags for flag in each.values()}) == 2
        reasons = [reason if above or reason == "nonfinite" else None] * 2
        skipped = [loop.scaler.step_skipped(each) for each in loop.optimizers]
        assert skipped == [each is not None for each in reasons]
        assert loop.finish() == reasons
    grown = (2, 8.0) if above else (0, 32.0)
    assert (loop.scaler.stats().spikes, loop.scaler.get_scale()) == grown
    assert loop.scaler.history().grad_norm.tolist() == pytest.approx(joint, nan_ok=True)


def test_a_spike_beside_a_step_and_beside_an_overflow() -> None:
    loop = Loop(count=2)
    for norms, reasons, after in (
        ((1.0, 50.0), [None, "spike"], (8.0, 0)),
        ((INF, 50.0), ["nonfinite", "spike"], (4.0, 0)),
        ((1.0, 1.0), [None, None], (4.0, 1)),
    ):
        for which, norm in enumerate(norms):
            loop.clip(norm, 20.0, which=which)
        assert (loop.finish(), loop.now()) == (reasons, after)
    assert loop.scaler.history().spiked.tolist() == [True, False, False]


# Limits of other patience, norms, and what becomes of each: "." a step, "s" a spike, "r" one that
# is taken as the new usual, with a warning.
REASONS = {".": None, "s": "spike", "r": None}
USUAL = [1.0, 1.1, 1.0, 1.1]
TURNS: list[tuple[int, list[float], str]] = [
    *((1, [*USUAL, 4.0, 4.0], "....sr"), (50, [4.0] * 3 + [40.0] * 5, "...sssss")),
    (6, [40.0] * 2, "sr"),
]


@BACKENDS
def test_a_training_goes_on(backend: str) -> None:
    loop, skips = Loop(backend=backend, growth_interval=10**6), 0
    for patience, norms, events in TURNS:
        steps = "1 step was" if patience == 1 else f"{patience} steps in a row were"
        for norm, event in zip(norms, events, strict=True):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                assert loop.clipped(norm, Sigmas(6.0, 4, patience)) == REASONS[event]
            skips = skips + 1 if REASONS[event] else 0
            assert loop.scaler.stats().consecutive_skips == skips
            assert [record.filename for record in told] == [__file__] * (event == "r")
            for record in told:
                assert f"ampfast.Sigmas: {steps} skipped" in str(record.message)
                assert "new usual" in str(record.message)


# The limit of the scaler, decided where `unscale_` or `step` reads gradients


def spiky(seed: int) -> list[float]:
    """Norms of which a few are large, one is infinite."""
    chance = random.Random(seed)
    return [
        INF if step == 17 else 50.0 if step in (12, 25, 26) else chance.uniform(0.9, 1.1)
        for step in range(30)
    ]


def trained(kind: str, way: str, limit: Any, make: Callable[..., Any] = GradScaler) -> list[Any]:
    dtype = torch.bfloat16 if "masters" in kind else torch.float32
    param = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer, seen = KINDS[kind]([param]), []
    scaler = make("cpu") if make is StepGuard else make("cpu", init_scale=8.0)
    if way != "own clip":
        scaler.skip_above = limit
    for norm in spiky(1):
        scaler.scale(torch.ones(()))
        param.grad = torch.tensor([norm * scaler.get_scale(), 0.0], dtype=dtype)
        if way == "own clip":
            scaler.clip_grad_norm_(optimizer, 1e9, skip_above=limit)
        elif way == "torch's clip":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([param], 1e9)
        take_step(scaler, optimizer, way=way)
        seen += [param.detach().clone(), scaler.skip_reason(optimizer), scaler.get_scale()]
    stats, history = scaler.stats(), scaler.history()
    seen += [history.grad_norm, history.spiked, scaler.state_dict().get("ampfast")]
    assert history.has_norm.all()
    return [stats.spikes, stats.skipped, scaler.state_dict()["_growth_tracker"], seen]


@pytest.mark.parametrize("limit", [10.0, Sigmas(6, window=8)], ids=str)
@pytest.mark.parametrize("way", ["step", "unscale", "torch's clip", "together"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [GradScaler, StepGuard])
def test_spikes_are_skipped_as_by_the_scalers_clip(
    make: Any, kind: str, way: str, limit: Any
) -> None:
    ours, clipped = trained(kind, way, limit, make), trained(kind, "own clip", limit, make)
    assert_same(ours, clipped)
    assert ours[:2] == [3, 4]


@pytest.mark.parametrize("make", [adamw, fused])
def test_one_more_chance_after_a_step_that_raises(make: Any, monkeypatch: Any) -> None:
    """As with torch: gradients that were only read are still scaled, others are unscaled.

    Their norm counts once.
    """
    param = parameter_with(torch.full((4,), 8.0))
    optimizer, scaler = make([param]), started(skip_above=Sigmas(6))
    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "step", lambda: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                scaler.step(optimizer)
    scaler.step(optimizer)
    [[(_, words)]] = scaler.state_dict()["ampfast"]["norms"]
    assert words[0] == 1, "the number of norms"
    other = make([again := torch.nn.Parameter(torch.ones(4))])
    again.grad = torch.ones(4)
    other.step()
    assert_same(param.detach(), again.detach())
    assert not hasattr(optimizer, "grad_scale")


def test_limits_come_late_and_are_copied() -> None:
    optimizer, scaler = sgd_with(torch.full((4,), 8.0)), started()
    scaler.step(optimizer)
    scaler.update()
    scaler.skip_above = 0.1
    for each in (scaler, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert each.skip_above == 0.1
        each.scale(torch.ones(()))
        grads_in(optimizer)[0].fill_(8.0)
        each.step(optimizer)
        assert each.skip_reason(optimizer) == "spike"
    # An argument takes its place.
    scaler.update()
    scaler.clip_grad_norm_(optimizer, 1.0, skip_above=1e3)
    assert scaler.skip_reason(optimizer) is None


def test_what_has_no_limit_to_compare() -> None:
    optimizer = sgd_with(torch.full((4,), 8.0))
    [param] = optimizer.param_groups[0]["params"]
    scaler, before = GradScaler("cpu", enabled=False, skip_above=0.1), param.detach().clone()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, param)
    scaler, empty = started(skip_above=1.0), sgd_with(torch.full((1,), INF))
    scaler.step_and_update(empty)
    empty.zero_grad()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(empty)
    assert scaler.step_skipped(empty), "as last checked"


def test_hooks_decide_by_a_clip_alone_and_the_scaler_says_so() -> None:
    optimizer, scaler = sgd_with(torch.full((4,), 8.0)), started(Hooked, skip_above=1.0)
    for clips, told in ((True, 0), (False, 1), (False, 0)):
        scaler.scale(torch.ones(()))
        grads_in(optimizer)[0].fill_(8.0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if clips:
                scaler.clip_grad_norm_(optimizer, 1.0)
            else:
                scaler.grad_norm(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.skip_reason(optimizer) == ("spike" if clips else None)
        assert sum("skip_above had no" in str(each.message) for each in seen) == told


@pytest.mark.parametrize(("own", "reason"), [(4.0, None), (1.0, "spike")])
def test_an_optimizer_with_a_scale_of_its_own(own: float, reason: str | None) -> None:
    param = parameter_with(torch.full((4,), 16.0))
    before = param.detach().clone()
    optimizer, scaler = fused([param]), started(skip_above=2.0)
    optimizer.grad_scale = torch.tensor(own)
    scaler.step(optimizer)
    assert scaler.skip_reason(optimizer) == reason
    assert torch.equal(param, before) is (reason is not None)


@pytest.mark.parametrize("kind", ["cpu", "aten", "launched"])
@pytest.mark.parametrize("scale", [2.0**-130, 0.0, INF])
@pytest.mark.parametrize("grad", [2.0**-140, 0.0, 1.0])
def test_measuring_decides_as_a_fused_step_alone(
    grad: float, scale: float, kind: str, request: pytest.FixtureRequest
) -> None:
    """On the quotients, which the optimizer takes, and not on products."""
    backend = None if kind == "launched" else kind
    if backend is None:
        request.getfixturevalue("launcher")
    found = []
    for options in ({}, {"track": "norms"}, {"skip_above": 1e38}):
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
        scaler = GradScaler("cpu", scale, backend=backend, **options)
        scaler.scale(torch.ones(()))
        param.grad = torch.full((2,), grad)
        scaler.step(optimizer)
        found.append([scaler.skip_reason(optimizer), param.detach()])
    assert_same(found[1:], found[:1] * 2)


# Limits of clips that follow the norms of steps

RULES = [Percentile(10, window=8), Percentile(75.5, window=50), Percentile(100, 3)]
RULES += [ZScore(warmup=5), ZScore(1.5, alpha=0.8, warmup=2)]
BY_RULE = pytest.mark.parametrize("rule", RULES, ids=str)
EVERY_RULE = pytest.mark.parametrize("rule", [*RULES, Sigmas(6.0, WINDOW, patience=3)], ids=str)

BY_SGD: dict[str, Any] = {
    "plain": lambda params: torch.optim.SGD(params, lr=1.0),
    "fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
    "masters": lambda params: ampfast.master_weights_(torch.optim.SGD(params, lr=1.0)),
}


class Model:
    """The limits of the papers, in float64; norms of steps that are skipped are not given."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.norms: list[float] = []
        self.mean = self.variance = 0.0

    def limit(self, norm: float) -> float:
        self.norms.append(norm)
        if isinstance(self.rule, Percentile):
            return float(np.percentile(self.norms[-self.rule.window :], self.rule.percentile))
        limit, warmup, alpha = INF, self.rule.warmup, self.rule.alpha
        if len(self.norms) > warmup:
            z = (norm - self.mean) / self.variance**0.5
            if z > self.rule.zscore:
                limit = self.mean + self.rule.zscore**2 / z * self.variance**0.5
            norm = min(norm, limit)
            self.mean = alpha * self.mean + (1 - alpha) * norm
            self.variance = alpha * self.variance + (1 - alpha) * (norm - self.mean) ** 2
        elif len(self.norms) == warmup:
            self.mean, self.variance = np.mean(self.norms), np.var(self.norms)
        return limit


def norms_of(seed: int, count: int = 60) -> list[float]:
    """Norms of steps, of which a few are large, 0 or infinite."""
    chance = random.Random(seed)
    unusual = {17: 0.0, 23: INF, 31: 40.0, 32: 0.01, 33: 40.0, 50: math.nan}
    return [unusual.get(step, chance.lognormvariate(0, 0.3)) for step in range(count)]


def moved(scaler: Any, optimizer: Any, norm: float, rule: Any, **options: Any) -> float:
    """What a step moves the weight by, of a gradient of this norm."""
    [param] = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        param.zero_()
    scaler.scale(torch.ones(()))
    param.grad = torch.tensor([norm * scaler.get_scale(), 0.0], dtype=param.dtype)
    if isinstance(rule, Sigmas):
        options, rule = {"skip_above": rule}, 1e9
    found = scaler.clip_grad_norm_(optimizer, rule, **options)
    assert float(found) == pytest.approx(norm, rel=1e-6, nan_ok=True)
    take_step(scaler, optimizer)
    return -float(param.detach()[0])


def check(scaler: Any, optimizer: Any, rule: Any, norms: list[float], **options: Any) -> int:
    """Number of the norms that are clipped."""
    model, clips = Model(rule), 0
    for norm in norms:
        found = moved(scaler, optimizer, float32(norm), rule, **options)
        if norm == 0 or not math.isfinite(norm):
            assert found == 0
            continue
        limit = model.limit(float32(norm))
        clips += norm > limit
        expected = norm if norm <= limit else norm * limit / (norm + 1e-6)
        assert found == pytest.approx(expected, rel=2e-6)
    return clips


@pytest.mark.parametrize("kind", [*BY_SGD, "deferred", "launched", "guarded", "disabled"])
@BY_RULE
def test_limits_of_the_papers(rule: Any, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "launched":
        request.getfixturevalue("launcher")
    make = BY_SGD.get(kind, BY_SGD["fused" if kind in ("deferred", "launched") else "plain"])
    optimizer = make([torch.nn.Parameter(torch.zeros(2))])
    scaler, in_place = started(growth_interval=7), kind != "deferred"
    if kind in ("guarded", "disabled"):
        scaler = StepGuard("cpu") if kind == "guarded" else GradScaler("cpu", enabled=False)
    # A disabled one takes infinite norms, too.
    norms = norms_of(3)[: 15 if kind == "disabled" else None]
    clips = check(scaler, optimizer, rule, norms, in_place=in_place)
    assert clips >= (0 if rule == Percentile(100, 3) or kind == "disabled" else 2)


@pytest.mark.parametrize("rule", [ZScore(), Percentile(100)], ids=str)
@pytest.mark.parametrize("norm", [1e-50, 1e-9, 1e-6, 1.1, 1e60])
def test_a_float64_norm_within_the_limit_clips_nothing(rule: Any, norm: float) -> None:
    """Also where it is above its value in float32."""
    for factor in (1 - 1e-9, 1.0, 1 + 1e-9):
        scaler = started()
        optimizer = sgd_with(torch.tensor([norm * factor * 8], dtype=torch.float64))
        scaler.clip_grad_norm_(optimizer, rule)
        grad = optimizer.param_groups[0]["params"][0].grad
        assert grad.item() == norm * factor * 8 * 0.125


@BY_RULE
def test_a_norm_that_overflows_makes_finite_gradients_0(rule: Any) -> None:
    """As with a limit that is a number, also before any norm is known."""
    for steps in (0, 20):
        scaler, optimizer = started(GradScaler, 1.0), sgd_with(torch.ones(2))
        [param] = optimizer.param_groups[0]["params"]
        for _ in range(steps):
            moved(scaler, optimizer, 1.0, rule)
        before = param.detach().clone()
        param.grad = torch.full((2,), 3e38)
        assert scaler.clip_grad_norm_(optimizer, rule).isinf()
        scaler.step(optimizer)
        scaler.update()
        assert_same(param.detach(), before)
        assert moved(scaler, optimizer, 0.5, rule) > 0


def words_in(scaler: Any, which: int = 0) -> dict[str, list[float]]:
    """What a checkpoint has of an optimizer, by the name of the rule."""
    return dict(scaler.state_dict()["ampfast"]["norms"][which])


def test_a_joint_clip_takes_the_norms_of_the_first() -> None:
    rule, scaler = Percentile(50, window=4), started()
    both = [sgd_with(torch.ones(2)), sgd_with(torch.ones(2))]
    for norm in (1.0, 2.0):
        for optimizer, size in zip(both, (norm, 100 * norm), strict=True):
            moved(scaler, optimizer, size, rule)
    for grad, norm in zip(grads_in(*both), (3.0, 4.0), strict=True):
        grad.copy_(torch.tensor([norm * scaler.get_scale(), 0.0]))
    assert scaler.clip_grad_norm_(both, rule) == 5.0
    assert words_in(scaler)["Percentile"] == [3, 0, 0, 0, 1, 2, 5]
    assert words_in(scaler, 1)["Percentile"] == [2, 0, 0, 0, 100, 200]


def test_another_window_keeps_the_last_norms_and_spikes_do_not_join() -> None:
    scaler, optimizer = started(), sgd_with(torch.ones(2))
    for norm, rule in (
        *((1.0, Percentile(window=4)), (2.0, ZScore(warmup=2)), (3.0, Percentile(window=4))),
        *((4.0, Percentile(window=4)), (5.0, Percentile(window=3)), (6.0, Percentile(window=9))),
    ):
        moved(scaler, optimizer, norm, rule)
        assert moved(scaler, optimizer, 50.0, rule, skip_above=20.0) == 0
    percentile, zscore = words_in(scaler).values()
    assert percentile == [4, 0, 0, 0, 3, 4, 5, 6] and zscore == [1, 2, 0, 0]


@BY_RULE
def test_loaded_norms_of_all_rules_go_to_the_same_optimizer(rule: Any) -> None:
    """The one that had its place."""
    scaler, both = started(), [sgd_with(torch.ones(2)), sgd_with(torch.ones(2))]
    for optimizer in both:
        moved(scaler, optimizer, 1.0, rule, skip_above=Sigmas())
    scaler.load_state_dict(scaler.state_dict())
    moved(scaler, both[1], 1.0, rule, skip_above=Sigmas())
    for which, count in enumerate((1, 2)):
        assert [words[0] for words in words_in(scaler, which).values()] == [count, count]


@EVERY_RULE
def test_a_captured_limit_takes_loaded_norms_in_its_memory(rule: Any, monkeypatch: Any) -> None:
    scaler, both = started(), [sgd_with(torch.ones(2)), sgd_with(torch.ones(2))]
    given = {"max_norm": 1e9, "skip_above": rule} if rule not in RULES else {"max_norm": rule}
    for optimizer in both:
        moved(scaler, optimizer, 1.0, rule)
    with monkeypatch.context() as patched:
        pretend_capture(patched)
        scaler.clip_grad_norm_(both[1], **given)
    state = scaler.state_dict()
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    scaler.update()
    pretend_capture(monkeypatch)
    with pytest.raises(RuntimeError, match=f"norms of {type(rule).__name__}, which every replay"):
        scaler.clip_grad_norm_(sgd_with(torch.ones(2)), **given)
    scaler.clip_grad_norm_(both[1], **given)


@BY_RULE
def test_steps_that_a_hook_skips_do_not_join(rule: Any) -> None:
    def vetoed(*args: Any) -> Any:
        return {device: flag.fill_(veto) for device, flag in original(*args).items()}

    scaler, optimizer = started(), sgd_with(torch.ones(2))
    original, scaler._unscale_grads_ = scaler._unscale_grads_, vetoed
    for veto in (0.0, 1.0, 1.0, 0.0):
        found = moved(scaler, optimizer, 1.0, rule, skip_above=Sigmas())
        assert (found == 0) is (veto == 1) is scaler.step_skipped(optimizer)
    assert [words[0] for words in words_in(scaler).values()] == [2, 2]


def test_a_lasting_change_is_told_once_by_zscore() -> None:
    scaler, optimizer = started(), sgd_with(torch.ones(2))
    rule, usual = ZScore(), norms_of(8, 16) * 10
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for norm in usual + [50 * norm for norm in usual[:99] + usual[:1] + usual]:
            moved(scaler, optimizer, norm, rule)
            assert len(told) == (words_in(scaler)["ZScore"][3] >= 100)
    assert [each.filename for each in told] == [__file__]
    assert "clipped 100 steps in a row" in str(told[0].message)
    assert "Percentile" in str(told[0].message)


# What is kept


def kept(way: str, scaler: Any, other: Any, run: Callable[..., Any]) -> Any:
    """A scaler that goes on with what is kept of another."""
    if way in ("copy", "deepcopy"):
        return getattr(copy, way)(scaler)
    if way == "pickle":
        return pickle.loads(pickle.dumps(scaler))
    if way == "checkpoint later":
        run(other, [3.0, 2.0])
    with torch.device("meta"):  # as while a large model is made
        other[0].load_state_dict(pickle.loads(pickle.dumps(scaler.state_dict())))
    return other[0]


@pytest.mark.filterwarnings("ignore:The gradient norm stayed above")
@pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy", "checkpoint", "checkpoint later"])
@EVERY_RULE
def test_what_is_kept(rule: Any, way: str) -> None:
    """A run of spikes goes on, too."""

    def fresh() -> tuple[Any, Any]:
        return started(), BY_SGD["plain"]([torch.nn.Parameter(torch.zeros(2))])

    def run(side: tuple[Any, Any], norms: list[float]) -> list[float]:
        return [moved(*side, norm, rule) for norm in norms]

    norms, every = norms_of(6, 30), 13
    if isinstance(rule, Sigmas):
        norms, every = [*USUAL, *[9.0] * 3, 1.05, *[9.0] * 4, 8.0, 8.7, 9.1, 50.0], 1
    expected = run(fresh(), norms)
    if isinstance(rule, Sigmas):
        spikes = [number for number, each in enumerate(expected) if each == 0]
        assert spikes == [4, 5, 6, 8, 9, 10, 15]
    for end in range(1, len(norms), every):
        side, other = fresh(), fresh()
        run(side, norms[:end])
        if isinstance(rule, Sigmas) and end == 6:
            assert words_in(side[0])["Sigmas"] == [4, 2, 3, 0, *torch.tensor(USUAL).tolist()]
        again = kept(way, side[0], other, run)
        assert again.state_dict() == side[0].state_dict()
        for each in ((again, other[1]), side):
            assert run(each, norms[end:]) == pytest.approx(expected[end:], nan_ok=True)


STAGE = torch.tensor([1.0, 1.1, 1.0, 1.1, 1.0]).tolist()


@pytest.mark.parametrize("how", ["state_dict", "pickle", "distributed"])
def test_norms_are_saved_in_the_order_of_the_first_clips(how: str, tmp_path: Path) -> None:
    loop = Loop(count=3, max_scale=8.0)
    for which, factor in ((1, 1000.0), (0, 1.0), (1, 1000.0)):
        loop.run([factor * norm for norm in STAGE], which=which)
    other = Loop(count=3, max_scale=8.0)
    if how == "pickle":
        other.scaler = pickle.loads(pickle.dumps(loop.scaler))
    elif how == "distributed":
        checkpoint.save({"scaler": loop.scaler}, checkpoint_id=tmp_path)
        checkpoint.load({"scaler": other.scaler}, checkpoint_id=tmp_path)
    else:
        other.scaler.load_state_dict(loop.scaler.state_dict())
    assert other.run([1e6], which=1) == ["spike"]
    assert other.run([1000.0], which=2) == ["spike"]
    other.scaler.load_state_dict(other.scaler.state_dict())
    assert other.run([1050.0], which=1) == [None]
    assert other.run([1000.0], which=2) == ["spike"]
    assert other.run([1000.0], which=0) == [None]  # the checkpoint had no third ones


def test_checkpoints_with_other_norms_or_none() -> None:
    loop = Loop()
    loop.clipped(1.0, 20.0)
    without = loop.scaler.state_dict()
    assert set(without) == set(torch.amp.GradScaler("cpu").state_dict()), "only rules add to it"
    norms = [9.0] * 1000 + [2.0] * 24
    saved = {"norms": [[("Sigmas", [1024.0, 0.0, 0.0, 0.0, *norms])]]}
    loop.scaler.load_state_dict({**without, "ampfast": saved})
    assert loop.run([0.0, 9.0, 2.0]) == [None, "spike", None]
    assert words_in(loop.scaler)["Sigmas"][4:] == [2.0] * WINDOW
    loop.scaler.load_state_dict(without)
    assert words_in(loop.scaler)["Sigmas"] == [0, 0, 2, 0]


WORDS = [2.0, 0.0, 0.0, 0.0, 1.0, 1.5]


@pytest.mark.parametrize(
    "damaged",
    [
        *(None, 3, [3.0], [[WORDS]], [[("Sigma", WORDS)]], [[("ZScore", WORDS, 1)]]),
        *([[("ZScore", words)]] for words in (None, 1.0, [], WORDS[:3], [2, *WORDS[1:]])),
        *([[("Sigmas", [word, *WORDS[1:]])]] for word in (-1.0, "1", True)),
        *([[("Percentile", [*WORDS, word])]] for word in (-1.0, INF, math.nan, "1", 3)),
    ],
    ids=lambda damaged: str(damaged)[:60],
)
def test_damaged_checkpoints_load_nothing(damaged: Any) -> None:
    scaler, optimizer = started(), sgd_with(torch.ones(2))
    moved(scaler, optimizer, 1.0, ZScore())
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="norms must be lists of pairs"):
        scaler.load_state_dict({**before, "scale": 2.0, "ampfast": {"norms": damaged}})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("rule", [*RULES, 1e6, Sigmas(6, window=2)], ids=str)
def test_the_host_reads_nothing(rule: Any) -> None:
    scaler, optimizer = started(), fused([parameter_with(torch.ones(3))])
    if rule not in RULES:
        scaler.skip_above, rule = rule, 1.0
    moved_by = partial(scaler.clip_grad_norm_, optimizer, rule)
    moved_by()
    take_step(scaler, optimizer)
    assert host_reads(partial(take_step, scaler, optimizer, way="together")) == 0
    assert host_reads(moved_by) == 0


# Bad input

WRONG: list[tuple[Any, str, Any, type[Exception]]] = [
    *itertools.product([Percentile], ["percentile"], [-1, 101, math.nan], [ValueError]),
    *itertools.product([Percentile], ["percentile", "window"], ["1", None], [TypeError]),
    *itertools.product([Percentile], ["window"], [2, 1025], [ValueError]),
    *itertools.product([ZScore], ["zscore"], [0, -1.0, INF, math.nan], [ValueError]),
    *itertools.product([ZScore], ["alpha"], [0, 1, math.nan], [ValueError]),
    *itertools.product([ZScore], ["warmup"], [1, 2**31], [ValueError]),
    *itertools.product([ZScore], ["zscore", "alpha", "warmup"], ["1", True], [TypeError]),
    *itertools.product([Sigmas], ["sigmas"], [-1.0, math.nan], [ValueError]),
    *itertools.product([Sigmas], ["window"], [1, 1025], [ValueError]),
    *itertools.product([Sigmas], ["patience"], [0, 2**31], [ValueError]),
    *itertools.product([Sigmas], ["window", "patience"], [2.0, True], [TypeError]),
    (Sigmas, "sigmas", "6", TypeError),
]


@pytest.mark.parametrize(("make", "name", "value", "error"), WRONG)
def test_arguments_are_checked(make: Any, name: str, value: Any, error: Any) -> None:
    got = type(value).__name__ if error is TypeError else re.escape(str(value))
    with pytest.raises(error, match=f"{name} must be .*, got {got}"):
        make(**{name: value})


NUMBER = r"a Python number or ampfast\.Sigmas\(6\) \(.* are for max_norm\), got"


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (math.nan, ValueError, "at least 0, got nan"),
        (-1, ValueError, "at least 0, got"),
        (Percentile(), TypeError, f"{NUMBER} Percentile"),
        ("20", TypeError, f"{NUMBER} str"),
        (True, TypeError, f"{NUMBER} bool"),
        (torch.tensor(2.0), TypeError, f"{NUMBER} Tensor"),
    ],
)
def test_bad_limits(given: Any, error: type[Exception], text: str) -> None:
    loop = Loop()
    calls = [partial(loop.clip, 1.0, given), partial(setattr, loop.scaler, "skip_above", given)]
    calls += [partial(Loop, skip_above=given), partial(StepGuard, "cpu", skip_above=given)]
    for call in calls:
        with pytest.raises(error, match=f"skip_above must be {text}"):
            call()
    assert loop.scaler.skip_above is None


def test_a_clip_that_is_refused_changes_nothing() -> None:
    loop = Loop(growth_interval=10**6)
    loop.run(USUAL)
    before = words_in(loop.scaler)
    for above, options, text in (
        (-1, {}, "skip_above must be"),
        (Sigmas(2.0, 2), {"in_place": False}, "in_place=False needs an optimizer"),
    ):
        with pytest.raises(ValueError, match=text):
            loop.clip(1.0, above, **options)
        assert words_in(loop.scaler) == before
    assert loop.clipped(50.0, Sigmas(2.0, WINDOW)) == "spike"


def test_limits_at_their_bounds() -> None:
    with pytest.raises(ValueError, match="sigmas must be at least 0"):
        Sigmas(-1e-9)
    loop = Loop()
    assert loop.clipped(1.0, Fraction(1, 2)) == "spike"
    assert loop.clipped(1.0, 10**400) is None
    assert Loop().clipped(1.0, Sigmas(Fraction(13, 2)), 3.0) is None
    assert loop.clipped(1.0, 0) == loop.clipped(0.7, 0.6) == "spike"
    assert loop.clipped(1.0, Sigmas(0.0, 1024)) is None
    assert repr(Sigmas(Fraction(1, 2))) == "Sigmas(sigmas=0.5, window=128, patience=None)"
    loop = Loop(enabled=False)
    assert (loop.clipped(50.0, 20.0), loop.scaler.stats().spikes) == (None, 0)
