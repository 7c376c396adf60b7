"""Limits of a clip that follow the norms of steps, beside float64 models of the papers' rules."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import pretend_capture
from support.comparison import assert_same, started
from support.gradients import sgd_with
from support.models import float32
from support.steps import host_reads

import ampfast
from ampfast import GradScaler, Percentile, Sigmas, StepGuard, ZScore

INF = math.inf

RULES = [Percentile(10, window=8), Percentile(75.5, window=50), Percentile(100, 3)]
RULES += [ZScore(warmup=5), ZScore(1.5, alpha=0.8, warmup=2)]
BY_RULE = pytest.mark.parametrize("rule", RULES, ids=str)

OPTIMIZERS: dict[str, Any] = {
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


def clipped(scaler: Any, optimizer: Any, norm: float, rule: Any, **options: Any) -> float:
    """What a step moves the weight by, of a gradient of this norm."""
    [param] = optimizer.param_groups[0]["params"]
    before = param.detach().double().clone()
    scaler.scale(torch.ones(()))
    param.grad = torch.tensor([norm * scaler.get_scale(), 0.0], dtype=param.dtype)
    found = scaler.clip_grad_norm_(optimizer, rule, **options)
    assert float(found) == pytest.approx(norm, rel=1e-6, nan_ok=True)
    scaler.step(optimizer)
    scaler.update()
    return float((before - param.detach().double())[0])


def check(scaler: Any, optimizer: Any, rule: Any, norms: list[float], **options: Any) -> int:
    """Number of the norms that are clipped."""
    [param] = optimizer.param_groups[0]["params"]
    model, clips = Model(rule), 0
    for norm in norms:
        with torch.no_grad():
            param.zero_()
        moved = clipped(scaler, optimizer, float32(norm), rule, **options)
        if norm == 0 or not math.isfinite(norm):
            assert moved == 0
            continue
        limit = model.limit(float32(norm))
        clips += norm > limit
        expected = norm if norm <= limit else norm * limit / (norm + 1e-6)
        assert moved == pytest.approx(expected, rel=2e-6)
    return clips


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "deferred", "launched"])
@BY_RULE
def test_limits_of_the_papers(rule: Any, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "launched":
        request.getfixturevalue("launcher")
    make = OPTIMIZERS.get(kind, OPTIMIZERS["fused"])
    optimizer = make([torch.nn.Parameter(torch.zeros(2))])
    scaler, in_place = started(GradScaler, growth_interval=7), kind != "deferred"
    clips = check(scaler, optimizer, rule, norms_of(3), in_place=in_place)
    assert clips >= (0 if rule == Percentile(100, 3) else 2)


@BY_RULE
def test_a_guard_and_a_disabled_scaler_clip_alike(rule: Any) -> None:
    for scaler in (StepGuard("cpu"), GradScaler("cpu", enabled=False)):
        optimizer = OPTIMIZERS["plain"]([torch.nn.Parameter(torch.zeros(2))])
        check(scaler, optimizer, rule, norms_of(4)[:15])


@pytest.mark.parametrize("rule", [ZScore(), Percentile(100)], ids=str)
@pytest.mark.parametrize("norm", [1e-50, 1e-9, 1e-6, 1.1, 1e60])
def test_a_float64_norm_within_the_limit_clips_nothing(rule: Any, norm: float) -> None:
    """Also where it is above its value in float32."""
    for factor in (1 - 1e-9, 1.0, 1 + 1e-9):
        scaler = started(GradScaler)
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
            clipped(scaler, optimizer, 1.0, rule)
        before = param.detach().clone()
        param.grad = torch.full((2,), 3e38)
        assert scaler.clip_grad_norm_(optimizer, rule).isinf()
        scaler.step(optimizer)
        scaler.update()
        assert_same(param.detach(), before)
        assert clipped(scaler, optimizer, 0.5, rule) > 0


def test_every_optimizer_has_its_own_norms_and_a_joint_clip_the_firsts() -> None:
    rule, scaler = Percentile(50, window=4), started(GradScaler)
    optimizers = [sgd_with(torch.ones(1)), sgd_with(torch.ones(1))]
    for norm in (1.0, 2.0):
        for optimizer, size in zip(optimizers, (norm, 100 * norm), strict=True):
            optimizer.param_groups[0]["params"][0].grad = torch.tensor([8.0 * size])
            scaler.clip_grad_norm_(optimizer, rule)
            scaler.step(optimizer)
        scaler.update()
    saved = scaler.state_dict()["ampfast"]["norms"]
    header = [2.0, 0.0, 0.0, 0.0]
    for pairs, norms in zip(saved, ([1.0, 2.0], [100.0, 200.0]), strict=True):
        assert pairs == [("Percentile", header + norms)]
    for optimizer, norm in zip(optimizers, (3.0, 4.0), strict=True):
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([8.0 * norm])
    assert scaler.clip_grad_norm_(optimizers, rule) == 5.0
    [(_, words)], _ = scaler.state_dict()["ampfast"]["norms"]
    assert words == [3.0, 0.0, 0.0, 0.0, 1.0, 2.0, 5.0]


def words_in(scaler: Any, which: int = 0) -> dict[str, list[float]]:
    """What a checkpoint has of an optimizer, by the name of the rule."""
    return dict(scaler.state_dict()["ampfast"]["norms"][which])


def test_another_window_keeps_the_last_norms_and_spikes_do_not_join() -> None:
    scaler, optimizer = started(GradScaler), sgd_with(torch.ones(2))
    for norm, rule in (
        *((1.0, Percentile(window=4)), (2.0, ZScore(warmup=2)), (3.0, Percentile(window=4))),
        *((4.0, Percentile(window=4)), (5.0, Percentile(window=3)), (6.0, Percentile(window=9))),
    ):
        clipped(scaler, optimizer, norm, rule)
        assert clipped(scaler, optimizer, 50.0, rule, skip_above=20.0) == 0
    percentile, zscore = words_in(scaler).values()
    assert percentile == [4, 0, 0, 0, 3, 4, 5, 6] and zscore == [1, 2, 0, 0]


@BY_RULE
def test_loaded_norms_of_all_rules_go_to_the_same_optimizer(rule: Any) -> None:
    """The one that clips first after loading, whatever it had."""
    scaler, both = started(GradScaler), [sgd_with(torch.ones(2)), sgd_with(torch.ones(2))]
    for optimizer in both:
        clipped(scaler, optimizer, 1.0, rule, skip_above=Sigmas())
    scaler.load_state_dict(scaler.state_dict())
    clipped(scaler, both[1], 1.0, rule, skip_above=Sigmas())
    for which, count in enumerate((2, 1)):
        assert [words[0] for words in words_in(scaler, which).values()] == [count, count]


@BY_RULE
def test_a_captured_limit_takes_loaded_norms_in_its_memory(rule: Any, monkeypatch: Any) -> None:
    scaler, both = started(GradScaler), [sgd_with(torch.ones(2)), sgd_with(torch.ones(2))]
    for optimizer in both:
        clipped(scaler, optimizer, 1.0, rule)
    with monkeypatch.context() as patched:
        pretend_capture(patched)
        scaler.clip_grad_norm_(both[1], rule)
    state = scaler.state_dict()
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    scaler.update()
    pretend_capture(monkeypatch)
    with pytest.raises(RuntimeError, match=f"norms of {type(rule).__name__}, which every replay"):
        scaler.clip_grad_norm_(both[0], rule)
    scaler.clip_grad_norm_(both[1], rule)


class Vetoes(GradScaler):
    """Skips the steps that `veto` names, by a hook."""

    veto = 0.0

    def _unscale_grads_(self, *args: Any) -> Any:
        flags = super()._unscale_grads_(*args)
        return {device: flag.fill_(self.veto) for device, flag in flags.items()}


@BY_RULE
def test_steps_that_a_hook_skips_do_not_join(rule: Any) -> None:
    scaler, optimizer = started(Vetoes), sgd_with(torch.ones(2))
    for scaler.veto in (0.0, 1.0, 1.0, 0.0):
        moved = clipped(scaler, optimizer, 1.0, rule, skip_above=Sigmas())
        assert (moved == 0) is (scaler.veto == 1) is scaler.step_skipped(optimizer)
    assert [words[0] for words in words_in(scaler).values()] == [2, 2]


def test_a_lasting_change_is_told_once_by_zscore() -> None:
    scaler, optimizer = started(GradScaler), sgd_with(torch.ones(2))
    rule, usual = ZScore(), norms_of(8, 16) * 10
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for norm in usual + [50 * norm for norm in usual[:99] + usual[:1] + usual]:
            clipped(scaler, optimizer, norm, rule)
            assert len(told) == (words_in(scaler)["ZScore"][3] >= 100)
    assert [each.filename for each in told] == [__file__]
    assert "clipped 100 steps in a row" in str(told[0].message)
    assert "Percentile" in str(told[0].message)


@BY_RULE
def test_checkpoints_and_copies_go_on(rule: Any) -> None:
    norms = norms_of(6, 30)
    saved: list[Any] = []
    optimizer = OPTIMIZERS["plain"]([torch.nn.Parameter(torch.zeros(2))])

    def run(scaler: Any, first: int) -> list[float]:
        moved = []
        for step in range(first, 30):
            if step == 14 and not saved:
                saved[:] = copy.deepcopy(scaler.state_dict()), *copies(scaler)
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].zero_()
            moved.append(clipped(scaler, optimizer, norms[step], rule))
        return moved

    def copies(scaler: Any) -> list[Any]:
        return [copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))]

    whole = run(ran := started(GradScaler), 0)
    state, *again = saved
    assert ran.state_dict() != state
    for scaler in (ran, started(GradScaler)):
        with torch.device("meta"):  # as while a large model is made
            scaler.load_state_dict(state)
        again.append(scaler)
    for scaler in again:
        assert scaler.state_dict() == state
        assert run(scaler, 14) == pytest.approx(whole[14:], nan_ok=True)


WORDS = [2.0, 0.0, 0.0, 0.0, 1.0, 1.5]


@pytest.mark.parametrize(
    "damaged",
    [
        *(None, 3, [3.0], [[WORDS]], [[("Sigma", WORDS)]], [[("ZScore", WORDS, 1)]]),
        *([[("ZScore", words)]] for words in (None, 1.0, [], WORDS[:3], [2, *WORDS[1:]])),
        *([[("Sigmas", [word, *WORDS[1:]])]] for word in (-1.0, 2.5, 1e300, "1", True)),
        *([[("Percentile", [*WORDS, word])]] for word in (-1.0, INF, math.nan, "1", 3)),
    ],
    ids=lambda damaged: str(damaged)[:60],
)
def test_damaged_checkpoints_load_nothing(damaged: Any) -> None:
    scaler, optimizer = started(GradScaler), sgd_with(torch.ones(2))
    clipped(scaler, optimizer, 1.0, ZScore())
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="norms must be lists of pairs"):
        scaler.load_state_dict({**before, "scale": 2.0, "ampfast": {"norms": damaged}})
    assert scaler.state_dict() == before


@BY_RULE
def test_the_host_reads_nothing(rule: Any) -> None:
    scaler, optimizer = started(GradScaler), sgd_with(torch.ones(2))
    clipped(scaler, optimizer, 1.0, rule)
    assert host_reads(lambda: scaler.clip_grad_norm_(optimizer, rule)) == 0


WRONG = [
    *itertools.product([Percentile], ["percentile"], [-1, 101, math.nan], [ValueError]),
    *itertools.product([Percentile], ["percentile", "window"], ["1", None], [TypeError]),
    *itertools.product([Percentile], ["window"], [2, 1025], [ValueError]),
    *itertools.product([ZScore], ["zscore"], [0, -1.0, INF, math.nan], [ValueError]),
    *itertools.product([ZScore], ["alpha"], [0, 1, math.nan], [ValueError]),
    *itertools.product([ZScore], ["warmup"], [1, 2**31], [ValueError]),
    *itertools.product([ZScore], ["zscore", "alpha", "warmup"], ["1", True], [TypeError]),
]


@pytest.mark.parametrize(("make", "name", "value", "error"), WRONG)
def test_arguments_are_checked(make: Any, name: str, value: Any, error: Any) -> None:
    with pytest.raises(error, match=f"{name} must be"):
        make(**{name: value})
