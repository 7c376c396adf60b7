"""Scale policies, counters and history in the kernels, against a model; captured steps."""

from __future__ import annotations

import math

import pytest
import torch
from device_parity import KERNELS, launch
from support.captures import Capturing, assert_replays_are_eager
from support.comparison import TorchScaler
from support.kernels import grads_of, run_check
from support.models import (
    FACTORS,
    POLICIES,
    ScaleModel,
    assert_state,
    conclude,
    propose,
    random_peaks,
    random_steps,
)

from ampfast.backends.core import Update, state_layout
from ampfast.loss_scale import LossScale


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("policy", POLICIES)
def test_random_steps(policy: str) -> None:
    model = ScaleModel(3.0, 1, FACTORS, POLICIES[policy])
    kept = LossScale(model.limits)
    words = kept.words_on(torch.device("cpu"))
    # Near the end of the ring, so that it wraps around.
    ahead = state_layout.RING_STEPS - 20
    words[state_layout.STEPS] = model.steps = ahead
    model.history = [(0.0, 0.0, None, math.nan)] * ahead
    words[state_layout.RING :][: ahead * state_layout.RING_WORDS] = 0
    scale = torch.tensor(model.scale)
    tracker = torch.tensor(model.tracker, dtype=torch.int32)
    peaks = random_peaks(80, model.limits)
    for turn, (found, norm) in enumerate(random_steps(80, len(policy), spikes=True)):
        peak = peaks[turn]
        riding = turn % 2 == 0 and peak is None
        norm = None if riding else norm
        given = None if norm is None else torch.tensor(norm)
        infinite = riding and found == 1
        flags = [] if infinite else [torch.tensor(found)]
        update = Update(scale, tracker, flags, *FACTORS, words, given)
        propose(kept, update, peak)
        if riding:
            ending = KERNELS.ending(update)
            grads = grads_of([torch.full((3,), math.nan if infinite else 1.0)])
            run_check(KERNELS, grads, ending=ending)
            assert ending.applied
        else:
            assert KERNELS.update(update)
        conclude(kept)
        model.update(found, norm, peak or 0.0)
        assert (scale.item(), tracker.item()) == (model.scale, model.tracker)
        if turn % 17 == 16:
            model.scale = 6.0
            scale.fill_(model.scale)
    assert_state(kept, model)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_replays_are_torchs_eager_steps(
    kind: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = Capturing(launch, monkeypatch)
    assert_replays_are_eager(capturing, kind, lambda training: training.step(together), TorchScaler)
