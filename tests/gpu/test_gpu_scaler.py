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
from runner import BACKENDS
from support.comparison import FLOATS, TorchScaler, assert_same
from support.gradients import make_gradient, parameter_with
from support.models import assert_clipped, assert_norm, exact_norm
from support.optimizers import OPTIMIZERS

from ampfast import GradScaler, Percentile, Sigmas, ZScore

BAD = (math.inf, -math.inf, math.nan)


every_backend = pytest.mark.parametrize("backend", [*BACKENDS, "aten"], indirect=True)


@every_backend
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("seed", range(4))
def test_random_programs(backend: str, device: torch.device, kind: str, seed: int) -> None:
    """Clipping, overflows, states saved and loaded, separate and fused updates."""
    skip_without(kind, OPTIMIZERS[kind], device)
    chance = random.Random(f"{kind} {seed}")
    # Gradients that torch's fused kernels take in one optimizer on a GPU.
    dtypes, optimizers = (torch.float32, torch.float64), chance.choice((1, 1, 2, 6))
    settings = {
        "init_scale": chance.choice((2.0**10, 3.0)),
        "growth_factor": chance.choice((2.0, 1.1)),
        "growth_interval": chance.choice((1, 3)),
    }
    scalers = (GradScaler(backend=backend, **settings), TorchScaler(**settings))
    ours, theirs = (
        Twin(scaler, kind, device, dtypes=dtypes, optimizers=optimizers) for scaler in scalers
    )
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


@every_backend
@pytest.mark.parametrize("way", ["step", "together"])
@pytest.mark.parametrize("kind", ["quiet", "quiet_fused"])
@pytest.mark.parametrize("loss_on", ["gpu", "cpu"])
@pytest.mark.parametrize("places", ["gpu", "gpu cpu", "cpu gpu"])
def test_all_dtypes_in_all_places(
    backend: str, device: torch.device, places: str, loss_on: str, kind: str, way: str
) -> None:
    """Gradients and flags alone: torch's own steps read flags on the CPU before they arrive."""
    on = {"gpu": device, "cpu": torch.device("cpu")}
    scaler = GradScaler(backend=backend, init_scale=2.0**8, allow_fp16=True)
    # torch's op takes no bfloat16 on a GPU.
    dtypes = [d for d in FLOATS if backend != "aten" or d is not torch.bfloat16]
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


# By way: order of a clip, if there is one.
WAYS = {"step": None, "fused": None, "clip": 2.0, "largest": math.inf, "cubes": 3.0}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_by_parameter_and_clips(
    backend: str, device: torch.device, dtype: torch.dtype, way: str
) -> None:
    grads = [make_gradient("long", dtype, seed) for seed in range(5)]
    params = [parameter_with(grad.to(device, copy=True)) for grad in grads]
    optimizer = torch.optim.SGD(params, lr=0.1, fused=way == "fused")
    scaler = GradScaler(init_scale=3.0, track="norms", backend=backend, allow_fp16=True)
    scaler.scale(torch.ones((), device=device))
    if (order := WAYS[way]) is not None:
        norm, exact = scaler.clip_grad_norm_(optimizer, 0.5, order), exact_norm(grads, 3.0, order)
        assert norm.device == device
        if order == 2.0:
            assert_norm(norm.cpu(), exact)
        else:
            assert norm.item() == pytest.approx(exact, rel=max(torch.finfo(dtype).eps, 1e-12))
        assert_clipped([p.grad.cpu() for p in params], grads, 3.0, norm.cpu(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    last = sorted(each.last for each in scaler.grad_norms().parameters)
    assert last == pytest.approx(sorted(exact_norm([grad], 3.0) for grad in grads), rel=1e-5)


SIZES = (1.0, 1.25, 0.75, math.inf, 50.0, 1.0, 1.5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("above", [None, 20.0, Sigmas(6.0, 2)], ids=str)
@pytest.mark.parametrize("limit", [None, 1.0, Percentile(50, 3), ZScore(2.0, warmup=2)], ids=str)
def test_clips_and_spikes_are_those_of_a_cpu(
    backend: str, device: torch.device, limit: Any, above: Any, fused: bool
) -> None:
    """And behind the first two steps nothing waits, if the optimizer is fused."""
    trained = []
    for place, on in ((device, backend), (torch.device("cpu"), "cpu")):
        param = torch.nn.Parameter(torch.zeros(4, device=place))
        optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
        scaler = GradScaler(place.type, init_scale=8.0, backend=on, skip_above=above)
        for step, size in enumerate(SIZES):
            param.grad = scaler.scale(torch.full_like(param, size))
            waits = place != device or not fused or step < 2
            with contextlib.nullcontext() if waits else no_syncs():
                if limit is not None:
                    scaler.clip_grad_norm_(optimizer, limit)
                scaler.step(optimizer)
                scaler.update()
            reasons = {math.inf: "nonfinite", 50.0: None if above is None else "spike"}
            assert scaler.skip_reason(optimizer) == reasons.get(size), f"step {step}"
        assert (scaler.stats().spikes, scaler.get_scale()) == (above is not None, 4.0)
        trained.append(param.detach().cpu())
    torch.testing.assert_close(*trained, rtol=1e-6, atol=0)
