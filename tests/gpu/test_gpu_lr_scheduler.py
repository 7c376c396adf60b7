"""`LateScheduler` on a GPU: the schedule advances while the device is still busy."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from gpu_support import no_syncs
from support.optimizers import OPTIMIZERS

from ampfast import GradScaler, LateScheduler

pytestmark = pytest.mark.gpu

# Long enough for the host to queue the rest.
A_WHILE = 400_000_000
SKIPPED = (0, 3, 4, 7)
STEPS = 10


def parameter_on(device: torch.device) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(1000, device=device))
    parameter.grad = torch.ones(1000, device=device)
    return parameter


def scheduled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> Any:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return LateScheduler(schedule, scaler, optimizer)


@pytest.mark.parametrize("kind", ["fused_adam", "fused_adamw"])
def test_nothing_waits_for_the_step(kind: str, device: torch.device, backend: str) -> None:
    parameter = parameter_on(device)
    optimizer, scaler = OPTIMIZERS[kind]([parameter]), GradScaler(backend=backend)
    scheduler, loss = scheduled(scaler, optimizer), torch.ones((), device=device)
    scaler.scale(loss)
    ran, not_waited_for = 0, set()
    for step in range(STEPS):
        parameter.grad.fill_(math.inf if step in SKIPPED else 1.0)
        # The first two allocate and compile.
        is_warm = step > 1
        if is_warm:
            torch.cuda.synchronize()
            torch.cuda._sleep(A_WHILE)
        with no_syncs() if is_warm else contextlib.nullcontext():
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        if is_warm and not torch.cuda.current_stream().query():
            not_waited_for.add(step in SKIPPED)
        assert scheduler.last_epoch == ran
        ran += step not in SKIPPED
    # A busy host may be late itself, but not each time.
    assert not_waited_for == {False, True}, "the host waits for steps"
    scheduler.flush()
    assert scheduler.last_epoch == ran == STEPS - len(SKIPPED)


@pytest.mark.parametrize("kind", ["adam", "fused_adam"])
def test_no_timing_decides(kind: str, device: torch.device, backend: str) -> None:
    """With a slow device and with a fast one."""
    seen = []
    for lags in (False, True):
        parameter = parameter_on(device)
        optimizer, scaler = OPTIMIZERS[kind]([parameter]), GradScaler(backend=backend)
        scheduler, loss = scheduled(scaler, optimizer), torch.ones((), device=device)
        epochs = []
        for step in range(STEPS):
            scaler.scale(loss)
            parameter.grad.fill_(math.inf if step in SKIPPED else 1.0)
            if lags:
                torch.cuda._sleep(A_WHILE // 10)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if not lags:
                torch.cuda.synchronize()
            epochs.append(scheduler.last_epoch)
        seen.append(epochs)
    assert seen[0] == seen[1] == [sum(s not in SKIPPED for s in range(i)) for i in range(STEPS)]


def test_after_a_replay(device: torch.device, backend: str) -> None:
    """A captured step writes its flag where the next replay does."""
    parameter = parameter_on(device)
    optimizer = torch.optim.Adam([parameter], fused=True, capturable=True)
    scaler = GradScaler(backend=backend)
    scheduler, loss = scheduled(scaler, optimizer), torch.ones((), device=device)

    def step() -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        with pytest.raises(RuntimeError, match="call it after the replay"):
            scheduler.step()
    for iteration in range(STEPS):
        parameter.grad.fill_(math.inf if iteration in SKIPPED else 1.0)
        graph.replay()
        scheduler.step()
    scheduler.flush()
    assert scheduler.last_epoch == STEPS - len(SKIPPED)


def test_a_default_device(device: torch.device, backend: str) -> None:
    """The host's copy of the flag is on the host."""
    parameter = parameter_on(device)
    optimizer, scaler = OPTIMIZERS["fused_adam"]([parameter]), GradScaler(backend=backend)
    scheduler = scheduled(scaler, optimizer)
    scaler.scale(torch.ones((), device=device))
    torch.set_default_device(device)
    try:
        scaler.step(optimizer)
        scheduler.step()
    finally:
        torch.set_default_device(None)
    scheduler.flush()
    assert scheduler.last_epoch == 1
