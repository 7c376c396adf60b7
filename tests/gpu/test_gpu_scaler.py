"""Training loops on a GPU: bits of torch's scaler, clipping, spikes, and norms by parameter."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from typing import Any

import pytest
import torch
from gpu_support import Twin, no_syncs, skip_without
from support.comparison import FLOATS, TorchScaler, assert_same
from support.gradients import make_gradient, sgd_with
from support.models import assert_clipped, assert_norm, exact_norm, grads_in
from support.optimizers import OPTIMIZERS

import ampfast
from ampfast import GradScaler, Percentile, Sigmas, ZScore

pytestmark = pytest.mark.gpu

BAD = (math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("seed", range(4))
def test_random_programs(any_backend: str, device: torch.device, kind: str, seed: int) -> None:
    """Clipping, overflows, states saved and loaded, separate and fused updates."""
    skip_without(kind, device)
    chance = random.Random(f"{kind} {seed}")
    # Gradients that torch's fused kernels take in one optimizer on a GPU.
    arguments: Any = {
        "dtypes": (torch.float32, torch.float64),
        "optimizers": chance.choice((1, 1, 2, 6)),
    }
    settings = {
        "init_scale": chance.choice((2.0**10, 3.0)),
        "growth_factor": chance.choice((2.0, 1.1)),
        "growth_interval": chance.choice((1, 3)),
    }
    scalers = (GradScaler(backend=any_backend, **settings), TorchScaler(**settings))
    ours, theirs = (Twin(scaler, kind, device, **arguments) for scaler in scalers)
    for iteration in range(12):
        bad = chance.choice(BAD) if chance.random() < 0.3 else None
        bad_at = chance.randrange(len(ours.optimizers))
        clips, anew, together = (chance.random() < 0.3 for _ in range(3))
        reload = chance.random() < 0.15
        for twin in (ours, theirs):
            for o in range(len(twin.optimizers)):
                twin.feed(iteration, bad if o == bad_at else None, o, anew)
            for o in range(len(twin.optimizers) - together):
                twin.step("unscale" if clips else "step", o)
            if together:
                twin.step("together")
            else:
                twin.scaler.update()
            if reload:
                twin.scaler.load_state_dict(copy.deepcopy(twin.scaler.state_dict()))
        # Read together, since torch waits for the device at other places.
        assert_same(ours.observe(), theirs.observe(), f"iteration {iteration}")


@pytest.mark.parametrize("way", ["step", "together"])
@pytest.mark.parametrize("kind", ["quiet", "quiet_fused"])
@pytest.mark.parametrize("loss_on", ["gpu", "cpu"])
@pytest.mark.parametrize("places", ["gpu", "gpu cpu", "cpu gpu"])
def test_all_dtypes_in_all_places(
    any_backend: str, device: torch.device, places: str, loss_on: str, kind: str, way: str
) -> None:
    """Gradients and flags alone: torch's own steps read flags on the CPU before they arrive."""
    on = {"gpu": device, "cpu": torch.device("cpu")}
    scaler = GradScaler(backend=any_backend, init_scale=2.0**8, allow_fp16=True)
    # torch's op takes no bfloat16 on a GPU.
    dtypes = [d for d in FLOATS if any_backend != "aten" or d is not torch.bfloat16]
    arguments: Any = {"places": [on[place] for place in places.split()], "loss_on": on[loss_on]}
    ours = Twin(scaler, kind, device, dtypes=dtypes, **arguments)
    scale = 2.0**8
    for iteration, bad in enumerate((None, None, math.inf, None, math.nan, -math.inf, None)):
        ours.feed(iteration, bad, anew=iteration % 2 == 0)
        # Scales are powers of two, so products are exact.
        expected = [g * (scale if kind == "quiet_fused" else 1) for g in ours.unscaled(iteration)]
        ours.iterate(way)
        if bad is None:
            assert_same([p.grad for p in ours.params[0]], expected, f"iteration {iteration}")
        assert scaler.step_skipped(ours.optimizers[0]) is (bad is not None), iteration
        scale = scale if bad is None else scale / 2
        assert scaler.get_scale() == scale
    assert ours.optimizers[0].steps == (7 if kind == "quiet_fused" else 4)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("above", [20.0, Sigmas(6.0, 2)], ids=str)
def test_spikes(backend: str, device: torch.device, above: Any, fused: bool, clips: bool) -> None:
    param = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = torch.optim.Adam([param], fused=fused)
    scaler = GradScaler(init_scale=8.0, backend=backend)
    scaler.skip_above = above
    scaler.scale(torch.ones((), device=device))
    reasons = []
    for size in (1.0, 1.1, 50.0, math.inf, 1.0):
        param.grad = torch.full_like(param, 8.0 * size)
        if clips:
            scaler.clip_grad_norm_(optimizer, 1.0)
        before = param.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.skip_reason(optimizer))
        assert torch.equal(before, param) == (reasons[-1] is not None)
    assert reasons == [None, None, "spike", "overflow", None]
    assert (scaler.stats().spikes, scaler.get_scale()) == (1, 4.0)


@pytest.mark.parametrize("order", [2.0, math.inf, 3.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_and_gradients(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    order: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the scaler's method, and of torch's function where it is patched."""
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    ours, patched = (
        sgd_with(*(make_gradient("long", dtype, seed).to(device) for seed in range(5)))
        for _ in range(2)
    )
    before = [grad.to("cpu", copy=True) for grad in grads_in(ours)]
    scaler = GradScaler(init_scale=3.0, backend=backend, allow_fp16=True)
    scaler.scale(torch.ones((), device=device))
    norm = scaler.clip_grad_norm_(ours, 0.5, order)
    assert norm.device == device
    exact = exact_norm(before, 3.0, order)
    if order == 2.0:
        assert_norm(norm.cpu(), exact)
    else:
        assert norm.item() == pytest.approx(exact, rel=max(torch.finfo(dtype).eps, 1e-12))
    assert_clipped([g.cpu() for g in grads_in(ours)], before, 3.0, norm.cpu(), 0.5)

    if order == 3.0:
        return  # torch's own sum
    scaler.unscale_(patched)
    with ampfast.patch(clip_grad_norm=True):
        by_name = torch.nn.utils.clip_grad_norm_(patched.param_groups[0]["params"], 0.5, order)
    assert by_name.dtype is dtype and by_name.device == device
    eps = torch.finfo(dtype if dtype.itemsize < 4 else torch.float32).eps
    torch.testing.assert_close(by_name, norm.to(dtype), rtol=2 * eps, atol=0)
    torch.testing.assert_close(grads_in(patched), grads_in(ours), rtol=4 * eps, atol=0)


@pytest.mark.parametrize("way", ["step", "clip", "fused"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_by_parameter(
    backend: str, device: torch.device, dtype: torch.dtype, way: str
) -> None:
    grads = [make_gradient("long", dtype, seed) for seed in range(5)]
    params = [torch.nn.Parameter(torch.zeros_like(grad, device=device)) for grad in grads]
    optimizer = torch.optim.SGD(params, lr=0.1, fused=way == "fused")
    scaler = GradScaler(init_scale=4.0, track="norms", backend=backend, allow_fp16=True)
    scaler.scale(torch.ones((), device=device))
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(device, copy=True)
    if way == "clip":
        scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()
    last = sorted(each.last for each in scaler.grad_norms().parameters)
    assert last == pytest.approx(sorted(exact_norm([grad], 4.0) for grad in grads), rel=1e-5)


@pytest.mark.parametrize("limit", [Percentile(50, 3), ZScore(2.0, warmup=2)], ids=str)
def test_limits_that_follow_are_those_of_a_cpu(
    backend: str, device: torch.device, limit: Any
) -> None:
    """And behind the first two clips nothing waits."""
    clipped = []
    for place in (device, torch.device("cpu")):
        param = torch.nn.Parameter(torch.zeros(1000, device=place))
        optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
        scaler = GradScaler(
            place.type, init_scale=8.0, backend=backend if place == device else "cpu"
        )
        scaler.scale(torch.ones((), device=place))
        for step, size in enumerate((1.0, 1.25, 0.75, math.inf, 50.0, 1.0, 2.0)):
            param.grad = torch.full_like(param, 8.0 * size)
            with no_syncs() if step > 1 and place == device else contextlib.nullcontext():
                scaler.clip_grad_norm_(optimizer, limit)
                scaler.step(optimizer)
                scaler.update()
        clipped.append(param.detach().cpu())
    torch.testing.assert_close(*clipped, rtol=1e-6, atol=0)
