"""The scaler's own limit of gradient norms, decided where `unscale_` or `step` reads gradients."""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.comparison import assert_same, started
from support.gradients import parameter_with, sgd_with
from support.models import grads_in
from support.steps import host_reads

import ampfast
from ampfast import GradScaler, Sigmas, StepGuard

INF = math.inf
LIMITS = pytest.mark.parametrize("limit", [10.0, Sigmas(6, window=8)], ids=str)


def plain(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.1)


def fused(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": plain,
    "fused": fused,
    "fused momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "masters": lambda params: ampfast.master_weights_(plain(params)),
    "fused masters": lambda params: ampfast.master_weights_(fused(params)),
}


def spiky(seed: int) -> list[float]:
    """Norms of which a few are large, one is infinite."""
    chance = random.Random(seed)
    return [
        INF if step == 17 else 50.0 if step in (12, 25, 26) else chance.uniform(0.9, 1.1)
        for step in range(30)
    ]


def decided(scaler: Any, optimizer: Any, way: str, limit: Any) -> None:
    """One step by one of the ways that decide alike."""
    if way == "clip":
        scaler.clip_grad_norm_(optimizer, 1e9, skip_above=limit)
    if way == "unscale":
        scaler.unscale_(optimizer)
    if way == "clip by torch":
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9)
    if way == "step and update":
        scaler.step_and_update(optimizer)
        return
    scaler.step(optimizer)
    scaler.update()


def trained(kind: str, way: str, limit: Any, make: Callable[..., Any] = GradScaler) -> list[Any]:
    dtype = torch.bfloat16 if "masters" in kind else torch.float32
    param = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer, seen = KINDS[kind]([param]), []
    scaler = make("cpu") if make is StepGuard else make("cpu", init_scale=8.0)
    if way != "clip":
        scaler.skip_above = limit
    for norm in spiky(1):
        scaler.scale(torch.ones(()))
        param.grad = torch.tensor([norm * scaler.get_scale(), 0.0], dtype=dtype)
        decided(scaler, optimizer, way, limit)
        seen += [param.detach().clone(), scaler.skip_reason(optimizer), scaler.get_scale()]
    stats, history = scaler.stats(), scaler.history()
    seen += [history.grad_norm, history.spiked, scaler.state_dict().get("ampfast")]
    assert history.has_norm.all()
    return [stats.spikes, stats.skipped, scaler.state_dict()["_growth_tracker"], seen]


@LIMITS
@pytest.mark.parametrize("way", ["step", "unscale", "clip by torch", "step and update"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [GradScaler, StepGuard])
def test_spikes_are_skipped_as_by_the_scalers_clip(
    make: Any, kind: str, way: str, limit: Any
) -> None:
    ours, clipped = trained(kind, way, limit, make), trained(kind, "clip", limit, make)
    assert_same(ours, clipped)
    assert ours[:2] == [3, 4]


@pytest.mark.parametrize("limit", [1e6, Sigmas(6, window=2)], ids=str)
def test_the_host_reads_nothing(limit: Any) -> None:
    optimizer = fused([parameter_with(torch.ones(3))])
    scaler = started(GradScaler, skip_above=limit)
    assert host_reads(partial(scaler.step_and_update, optimizer)) == 0


@pytest.mark.parametrize("joint", [False, True])
def test_norms_are_each_optimizers_own_or_joint(joint: bool) -> None:
    scaler = started(GradScaler, skip_above=Sigmas(6, window=2))
    both = [sgd_with(torch.ones(4)), sgd_with(torch.ones(5))]
    for factor in (1.0, 1.1, 1.05, 6.0):
        scaler.scale(torch.ones(()))
        for optimizer, size in zip(both, (1.0, 1.0 if joint else 100.0), strict=True):
            grads_in(optimizer)[0].fill_(8.0 * size * factor)
        if joint:
            scaler.clip_grad_norm_(both, 1.0)
        for optimizer in both:
            scaler.step(optimizer)
        assert [scaler.skip_reason(each) == "spike" for each in both] == [factor == 6.0] * 2
        scaler.update()
    saved = scaler.state_dict()["ampfast"]["norms"]
    sizes = [3.0] if joint else [2.0, 100.0 * 5**0.5]
    assert scaler.history().grad_norm[0].item() == pytest.approx(math.hypot(*sizes))
    for pairs, size in zip(saved, sizes, strict=True):
        norms = [1.1 * size, 1.05 * size]
        assert dict(pairs)["Sigmas"] == pytest.approx([2, 1, 1, 0, *norms])


@pytest.mark.parametrize("make", [plain, fused])
def test_one_more_chance_after_a_step_that_raises(make: Any, monkeypatch: Any) -> None:
    """As with torch: gradients that were only read are still scaled, others are unscaled."""
    param = parameter_with(torch.full((4,), 8.0))
    optimizer, scaler = make([param]), started(GradScaler, skip_above=1e6)
    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scaler.step(optimizer)
    scaler.step(optimizer)
    other = make([again := torch.nn.Parameter(torch.ones(4))])
    again.grad = torch.ones(4)
    other.step()
    assert_same(param.detach(), again.detach())
    assert not hasattr(optimizer, "grad_scale")


def test_limits_come_late_and_are_copied() -> None:
    optimizer, scaler = sgd_with(torch.full((4,), 8.0)), started(GradScaler)
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
    scaler, empty = started(GradScaler, skip_above=1.0), sgd_with(torch.full((1,), INF))
    scaler.step_and_update(empty)
    empty.zero_grad()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(empty)
    assert scaler.step_skipped(empty), "as last checked"
    half = sgd_with(torch.ones(3), torch.ones(3, dtype=torch.float16))
    with pytest.raises(ValueError, match="Attempting to unscale FP16"):
        scaler.unscale_(half)
    assert_same(grads_in(half)[0], torch.ones(3))


def test_hooks_decide_by_a_clip_alone_and_the_scaler_says_so() -> None:
    class Hooked(GradScaler):
        def _unscale_grads_(self, *given: Any) -> Any:
            return super()._unscale_grads_(*given)

    optimizer, scaler = sgd_with(torch.full((4,), 8.0)), started(Hooked, skip_above=1.0)
    for clips, told in ((True, 0), (False, 1), (False, 0)):
        scaler.scale(torch.ones(()))
        grads_in(optimizer)[0].fill_(8.0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if clips:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.skip_reason(optimizer) == ("spike" if clips else None)
        assert sum("skip_above had no" in str(each.message) for each in seen) == told


@pytest.mark.parametrize(("own", "reason"), [(4.0, None), (1.0, "spike")])
def test_an_optimizer_with_a_scale_of_its_own(own: float, reason: str | None) -> None:
    param = parameter_with(torch.full((4,), 16.0))
    before = param.detach().clone()
    optimizer, scaler = fused([param]), started(GradScaler, skip_above=2.0)
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
