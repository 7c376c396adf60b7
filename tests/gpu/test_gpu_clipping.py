"""Clipping on a GPU: bits of the CPU's kernels where required, torch's norm, no host sync."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from gpu_support import flag, kernels_of, no_syncs
from support.clipping_reference import assert_clipped, assert_norm, exact_norm, grads_of
from support.comparison import FLOATS, assert_same
from support.gradients import make_gradient, sgd_with
from support.scale_model import Rule, random_norms
from support.twins import side

import ampfast
from ampfast import GradScaler, Sigmas
from ampfast.backends import cpu
from ampfast.backends.core import Clip

pytestmark = pytest.mark.gpu


def scaler_on(device: torch.device, backend: str, scale: float) -> GradScaler:
    scaler = GradScaler("cuda", init_scale=scale, backend=backend, allow_fp16=True)
    scaler.scale(torch.ones((), device=device))
    return scaler


@pytest.mark.parametrize("largest", [False, True])
def test_the_coefficient_is_that_of_the_cpu(
    backend: str, device: torch.device, largest: bool
) -> None:
    kernels = kernels_of(backend, device)
    for rows in (
        [(25.0, 4.0)],
        [(1 / 3, 0.5), (1e-7, 3e-4), (1e9, 3e4), (0.0, 0.0), (7.0, 2.0)],
        [(math.inf, math.inf), (math.nan, math.nan)],
    ):
        for limit in (0.0, 1e-3, 1.0, math.inf):
            for dtype in (torch.float32, torch.float64):
                written = []
                for place, each in (("cpu", cpu), (device, kernels)):
                    norm = torch.zeros((), dtype=dtype, device=place)
                    coefficient = torch.zeros((), dtype=torch.float64, device=place)
                    scale, divisor = (torch.full((), 3.0, device=place) for _ in range(2))
                    sums = torch.tensor(rows, dtype=torch.float64, device=place)
                    each.clip(Clip(sums, limit, largest, norm, coefficient, scale, divisor))
                    written.append([norm.cpu(), coefficient.cpu(), divisor.cpu()])
                assert_same(written[1], written[0], f"{rows} {limit}")


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("above", [20.0, Sigmas(6.0, 2)], ids=str)
def test_spikes(backend: str, device: torch.device, above: Any, fused: bool, clips: bool) -> None:
    param = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = torch.optim.Adam([param], fused=fused)
    scaler = scaler_on(device, backend, 8.0)
    scaler.skip_above = above
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


def test_spikes_follow_the_rule(backend: str, device: torch.device) -> None:
    rule, kernels = Rule(Sigmas(2.0, 5)), kernels_of(backend, device)
    words = rule.words().to(device)
    for norm in random_norms(300, seed=2):
        rows = torch.tensor([[norm * norm, norm]], dtype=torch.float64, device=device)
        written, coefficient = torch.zeros((), device=device), torch.zeros_like(rows[0, 0])
        found = torch.zeros((), device=device)
        kernels.clip(Clip(rows, 1.0, True, written, coefficient, None, None, found, 2.0, words))
        assert found.item() == rule.flag(norm)
    rule.assert_are(words.cpu())
    assert rule.restarts


def test_a_lasting_change_is_told_without_a_wait(backend: str, device: torch.device) -> None:
    param = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = torch.optim.Adam([param], fused=True)
    scaler = scaler_on(device, backend, 8.0)
    with pytest.warns(UserWarning, match="Sigmas: 1 step was skipped") as told:
        for turn in range(200):
            param.grad = torch.full_like(param, 8.0 if turn < 2 else 80.0)
            with no_syncs() if turn >= 2 else contextlib.nullcontext():
                scaler.clip_grad_norm_(optimizer, 1.0, skip_above=Sigmas(6.0, 2))
                scaler.step(optimizer)
                scaler.update()
            torch.cuda.synchronize()
    # torch tells of its sync debug mode, too.
    assert sum("Sigmas: " in str(each.message) for each in told) == 1
    assert scaler.stats().spikes == 1


@pytest.mark.parametrize("order", [2.0, math.inf, 3.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_and_gradients(
    backend: str, device: torch.device, dtype: torch.dtype, order: float
) -> None:
    optimizer = sgd_with(*(make_gradient("long", dtype, seed).to(device) for seed in range(5)))
    before = [grad.cpu() for grad in grads_of(optimizer)]
    scaler = scaler_on(device, backend, 3.0)
    exact = exact_norm(before, 3.0, order)
    norm = scaler.clip_grad_norm_(optimizer, 0.5, order)
    assert norm.device.type == "cuda"
    if order == 2.0:
        assert_norm(norm.cpu(), exact)
    else:
        assert norm.item() == pytest.approx(exact, rel=max(torch.finfo(dtype).eps, 1e-12))
    assert_clipped([g.cpu() for g in grads_of(optimizer)], before, 3.0, norm.cpu(), 0.5)


@pytest.mark.parametrize("above", [None, 1e6, Sigmas(1e6, 2)], ids=str)
@pytest.mark.parametrize("in_place", [True, False])
def test_nothing_waits(backend: str, device: torch.device, in_place: bool, above: Any) -> None:
    run: Any = side(GradScaler, "fused_adam", device="cuda", init_scale=64.0, backend=backend)
    run.model.to(device)
    inputs = torch.randn(5, 8, device=device)
    for turn in range(3):
        run.optimizer.zero_grad()
        run.scaler.scale(run.model(inputs).square().mean()).backward()
        torch.cuda.synchronize()
        with no_syncs() if turn == 2 else contextlib.nullcontext():
            run.scaler.clip_grad_norm_(run.optimizer, 0.1, in_place=in_place, skip_above=above)
            run.scaler.step(run.optimizer)
            run.scaler.update()
    assert not run.scaler.step_skipped(run.optimizer)


@pytest.mark.parametrize("limit", [0.5, 1e4, math.inf])
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_by_torchs_name(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    order: float,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Patched: as our own clipping."""
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    ours, own = (
        sgd_with(*(make_gradient("long", dtype, seed).to(device) for seed in range(5)))
        for _ in range(2)
    )
    scaler, other = scaler_on(device, backend, 4.0), scaler_on(device, backend, 4.0)
    scaler.unscale_(ours)
    params = ours.param_groups[0]["params"]
    with ampfast.patch(clip_grad_norm=True):
        norm = torch.nn.utils.clip_grad_norm_(params[::-1], limit, order)
    expected = other.clip_grad_norm_(own, limit, order)
    assert norm.dtype is dtype and norm.device == device
    eps = torch.finfo(dtype if dtype.itemsize < 4 else torch.float32).eps
    torch.testing.assert_close(norm, expected.to(dtype), rtol=2 * eps, atol=0)
    if order != 2.0:
        # Sums of squares depend on the order of the list.
        assert_same(grads_of(ours), grads_of(own))
    torch.testing.assert_close(grads_of(ours), grads_of(own), rtol=4 * eps, atol=0)


def test_nothing_waits_by_torchs_name(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    run: Any = side(GradScaler, "fused_adam", device="cuda", init_scale=64.0, backend=backend)
    run.model.to(device)
    inputs = torch.randn(5, 8, device=device)
    with ampfast.patch(clip_grad_norm=True):
        for turn in range(3):
            run.optimizer.zero_grad()
            run.scaler.scale(run.model(inputs).square().mean()).backward()
            torch.cuda.synchronize()
            with no_syncs() if turn == 2 else contextlib.nullcontext():
                run.scaler.unscale_(run.optimizer)
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
                torch.nn.utils.clip_grad_norm_(list(run.model.parameters())[:1], 0.1)
                run.scaler.step(run.optimizer)
                run.scaler.update()
    assert not run.scaler.step_skipped(run.optimizer)


def test_the_same_bits_every_time(backend: str, device: torch.device) -> None:
    grads = [make_gradient("long", torch.float32, seed).to(device) for seed in range(20)]
    seen = []
    for _ in range(10):
        optimizer = sgd_with(*(grad.clone() for grad in grads))
        norm = scaler_on(device, backend, 3.0).clip_grad_norm_(optimizer, 0.5)
        seen.append([norm, *grads_of(optimizer)])
    for other in seen[1:]:
        assert_same(other, seen[0])


def test_a_scale_on_the_device_is_read_there(backend: str, device: torch.device) -> None:
    scaler = scaler_on(device, backend, 4.0)
    optimizer = sgd_with(torch.full((4,), 8.0, device=device))
    scaler._scale.copy_(flag(8.0, device))
    assert scaler.grad_norm(optimizer).item() == 2.0
