"""Scale policies, counters and history on a device, against the model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_support import flag, kernels_of, no_syncs
from support.kernel_calls import grads_of, run_check
from support.scale_model import (
    FACTORS,
    POLICIES,
    ScaleModel,
    assert_state,
    conclude,
    propose,
    random_peaks,
    random_steps,
)

from ampfast import GradScaler
from ampfast.backends.core import Update
from ampfast.loss_scale import LossScale

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", POLICIES)
def test_random_steps(backend: str, device: torch.device, policy: str) -> None:
    kernels = kernels_of(backend, device)
    model = ScaleModel(3.0, 1, FACTORS, POLICIES[policy])
    kept = LossScale(model.limits)
    words = kept.words_on(device)
    scale, tracker = flag(model.scale, device), torch.full((), 1, dtype=torch.int32, device=device)
    finite = grads_of([torch.ones(3, device=device)])
    infinite = grads_of([torch.full((3,), math.inf, device=device)])
    peaks = random_peaks(1100, model.limits)
    for turn, (found, norm) in enumerate(random_steps(1100, len(policy), spikes=True)):
        peak = peaks[turn]
        riding = turn % 2 == 0 and peak is None
        norm = None if riding else norm
        given = None if norm is None else flag(norm, device)
        overflows = riding and found == 1
        flags = [] if overflows else [flag(found, device)]
        update = Update(scale, tracker, flags, *FACTORS, words, given)
        propose(kept, update, peak)
        if riding:
            ending = kernels.ending(update)
            run_check(kernels, infinite if overflows else finite, ending=ending)
        else:
            kernels.update(update)
        conclude(kept)
        model.update(found, norm, peak or 0.0)
    assert (scale.item(), tracker.item()) == (model.scale, model.tracker)
    assert_state(kept, model)


class Loop:
    """Fused optimizer whose gradient is given by step, without a host sync."""

    def __init__(self, backend: str, device: torch.device, **arguments: Any) -> None:
        self.param = torch.nn.Parameter(torch.zeros(3, device=device))
        self.param.grad = torch.ones(3, device=device)
        self.optimizer = torch.optim.Adam([self.param], fused=True, capturable=True)
        self.scaler = GradScaler(backend=backend, **arguments)
        self.scaler.scale(torch.zeros((), device=device))

    def step(self, value: float, together: bool = False) -> None:
        self.param.grad.fill_(value)
        self.run(together)

    def run(self, together: bool) -> None:
        if together:
            self.scaler.step_and_update(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


@pytest.mark.parametrize("together", [False, True])
def test_counters_of_a_captured_step(backend: str, device: torch.device, together: bool) -> None:
    loop = Loop(backend, device, init_scale=8.0, growth_interval=3, min_scale=0.5, hysteresis=2)
    model = ScaleModel(8.0, 0, FACTORS._replace(growth=2.0, backoff=0.5), POLICY)
    for _ in range(2):
        loop.step(1.0, together)
        model.update(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.run(together)
    for found, _ in random_steps(60, seed=8):
        loop.param.grad.fill_(math.inf if found else 1.0)
        graph.replay()
        model.update(found)
    assert loop.scaler.get_scale() == model.scale
    assert_state(loop.scaler._loss_scale, model)
    assert loop.scaler.stats().skipped == model.skipped


POLICY = POLICIES["hysteresis"].__class__(min_scale=0.5, hysteresis=2)


@pytest.mark.parametrize("together", [False, True])
def test_the_minimum_is_checked_without_waiting(
    backend: str, device: torch.device, together: bool
) -> None:
    loop = Loop(backend, device, init_scale=1.0, min_scale=1.0, on_min_scale="raise")
    loop.step(1.0, together)
    torch.cuda.synchronize()
    # Its outcome is pending after the update, and known before the next.
    with no_syncs():
        loop.step(math.inf, together)
    torch.cuda.synchronize()
    with no_syncs(), pytest.raises(FloatingPointError, match="1 step was skipped"):
        loop.step(math.inf, together)
    with pytest.raises(FloatingPointError, match="2 steps in a row were skipped"):
        loop.scaler.stats()


def test_reading_is_refused_under_capture(backend: str, device: torch.device) -> None:
    loop = Loop(backend, device)
    loop.step(1.0)
    errors = []
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        loop.param.grad.fill_(2.0)
        for read in (loop.scaler.stats, loop.scaler.history):
            with pytest.raises(RuntimeError, match="after the replay") as error:
                read()
            errors.append(error)
    assert len(errors) == 2
    assert loop.scaler.stats().steps == 1


def test_one_sync_for_statistics_and_history(backend: str, device: torch.device) -> None:
    loop = Loop(backend, device)
    loop.step(1.0)
    for read in (loop.scaler.stats, loop.scaler.history):
        with torch.profiler.profile() as profile:
            read()
        waits = [e for e in profile.events() if "Synchronize" in e.name and "cuda" in e.name]
        # The profiler waits once at its end.
        assert len([e for e in waits if e.name == "cudaStreamSynchronize"]) == 1
