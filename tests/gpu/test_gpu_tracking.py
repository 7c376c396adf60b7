"""Marks and health on a GPU: their cost, and replayed steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_support import Quiet, QuietFused, no_syncs
from tracing import counted, why_profiler_is_blind

from ampfast import GradScaler

pytestmark = pytest.mark.gpu


def looped(backend: str, device: torch.device, make: Any, track: str | None) -> tuple[Any, Any]:
    """Scaler and iteration over gradients with fixed memory."""
    scaler = GradScaler(backend=backend, track=track)
    loss = torch.ones((), device=device)
    params = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (5, 70_003, 4096)]
    for param in params:
        param.grad = torch.full_like(param, 64.0)
    optimizer = make(params)

    def iteration() -> None:
        scaler.scale(loss)
        scaler.step_and_update(optimizer)

    for _ in range(3):
        iteration()
    return scaler, iteration


@pytest.mark.parametrize("make", [Quiet, QuietFused])
def test_launches(backend: str, device: torch.device, make: Any) -> None:
    if reason := why_profiler_is_blind():
        pytest.skip(reason)
    plain, tracked = (
        counted(looped(backend, device, make, track)[1]) for track in (None, "overflow")
    )
    for kind in ("kernels", "syncs", "copies"):
        assert len(getattr(plain, kind)) == len(getattr(tracked, kind)), (kind, plain, tracked)


def test_nothing_waits_before_the_report(backend: str, device: torch.device) -> None:
    scaler, iteration = looped(backend, device, QuietFused, "overflow")
    with no_syncs():
        iteration()
    assert scaler.overflow_report().step is None


def test_replayed_steps_are_marked(backend: str, device: torch.device) -> None:
    scaler = GradScaler(backend=backend, track="overflow", init_scale=8.0)
    param = torch.nn.Parameter(torch.ones(1000, device=device))
    values = torch.ones(1000, device=device)
    loss = torch.ones((), device=device)
    param.grad = torch.ones_like(param)
    optimizer: Any = torch.optim.Adam([param], fused=True, capturable=True)

    def iteration() -> None:
        scaler.scale(loss)
        param.grad.copy_(values)
        scaler.step(optimizer)
        scaler.update()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            iteration()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
        with pytest.raises(RuntimeError, match="ask after the replay"):
            scaler.overflow_report()
    done = int(scaler.stats().steps)
    for step, value in enumerate((1.0, math.inf, 2.0**-20, math.nan, math.inf), start=done):
        values[7] = value
        graph.replay()
        report = scaler.overflow_report()
        if not math.isfinite(value):
            kind = "nan" if math.isnan(value) else "inf"
            assert [(p.step, p.kind) for p in report.parameters] == [(step, kind)]
    [total] = scaler.overflow_report().totals
    assert (total.infinities, total.nans) == (2, 1)


def test_state_required_before_a_capture(backend: str, device: torch.device) -> None:
    scaler, _ = looped(backend, device, QuietFused, "overflow")
    param = torch.nn.Parameter(torch.ones(10, device=device))
    param.grad = torch.ones_like(param)
    other: Any = QuietFused([param])
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="run one iteration without capturing"),
        torch.cuda.graph(graph),
    ):
        scaler.step(other)


def test_health_is_that_of_the_same_gradients_on_a_cpu(backend: str, device: torch.device) -> None:
    values = torch.randn(70_003, generator=torch.Generator().manual_seed(0)) * 2.0**-12
    values[:3] = torch.tensor([0.0, math.inf, 1e6])
    found = []
    for where in (device, torch.device("cpu")):
        scaler = GradScaler(where.type, backend=backend if where is device else None)
        scaler.scale(torch.ones((), device=where))
        params = [torch.nn.Parameter(torch.zeros(values.numel(), device=where)) for _ in range(2)]
        params[0].grad = values.to(where)
        params[1].grad = values.flip(0).to(where)
        found.append(scaler.health(torch.optim.SGD(params)))
    assert found[0] == found[1]
