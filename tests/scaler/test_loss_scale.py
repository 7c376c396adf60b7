"""Limits of the scale, counters, history and checkpoints, against a model in plain Python."""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from support.comparison import started
from support.gradients import sgd_with
from support.launchers import compiled
from support.models import (
    FACTORS,
    LIMITS,
    Factors,
    ScaleModel,
    assert_state,
    float32,
    random_steps,
    update_of,
)
from support.steps import Training, adamw, through_file

from ampfast import GradScaler
from ampfast.backends import aten, cpu
from ampfast.backends.core import SPIKE_BOUND
from ampfast.scaler.loss_scale import LossScale


def training(fused: bool = False, **arguments: Any) -> Training:
    arguments = {"init_scale": 8.0, "growth_interval": 3, **arguments}
    return Training(GradScaler("cpu", **arguments), partial(adamw, fused=fused))


@pytest.mark.parametrize("start", [3.0, 0.01, 1e5])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("backend", ["cpu", "aten", "aten elsewhere"])
def test_random_steps(backend: str, limits: str, start: float, monkeypatch: Any) -> None:
    """Flags that are no spike count as overflows; elsewhere, torch's ops write the state."""
    if backend == "aten elsewhere":
        monkeypatch.setattr(aten, "_is_on_host", lambda tensor: False)
    model = ScaleModel(float32(start), 1, FACTORS, LIMITS[limits])
    kept = LossScale(model.limits)
    scale = torch.tensor(model.scale)
    tracker = torch.tensor(model.tracker, dtype=torch.int32)
    for flag, norm in random_steps(1100, seed=len(limits), spikes=True):
        found = SPIKE_BOUND if flag == 1 and model.steps % 2 else flag
        update = update_of(kept, scale, tracker, found, norm)
        assert cpu.update(update) if backend == "cpu" else aten.update(update, model.limits, True)
        model.update(found, norm)
        assert (scale.item(), tracker.item()) == (model.scale, model.tracker)
        if model.steps % 17 == 16:
            model.scale = 6.0
            scale.fill_(model.scale)
    assert model.growths
    assert_state(kept, model)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["step", "together"])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_the_scaler_follows_the_model(backend: str, way: str, fused: bool) -> None:
    loop = training(fused, backend=backend, min_scale=0.5, max_scale=30.0, hysteresis=2)
    loop.way = way
    model = ScaleModel(8.0, 0, Factors(2.0, 0.5, 3), LIMITS["all"])
    for found, _ in random_steps(120, seed=4):
        loop.step(math.inf if found else 1.0)
        model.update(found)
        assert loop.scaler.get_scale() == model.scale
    stats = loop.scaler.stats()
    assert stats.scale == model.scale and stats.growth_tracker == model.tracker
    assert [stats.steps, stats.skipped, stats.growths, stats.backoffs] == model.counters()[:4]
    assert stats.consecutive_skips == model.consecutive_skips
    assert_state(loop.scaler._loss_scale, model)


@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_a_scale_that_is_set(backend: str) -> None:
    loop = training(backend=backend, growth_interval=1, max_skips=1)
    loop.scaler.update(2.0)
    assert loop.scaler.get_scale() == 2.0
    assert loop.scaler.stats().steps == 0, "nothing was checked"
    for value, scale in ((math.inf, 32.0), (1.0, 4.0)):
        loop.backward(value)
        loop.scaler.step(loop.optimizer)
        with pytest.raises(FloatingPointError) if value == math.inf else nullcontext():
            loop.scaler.update(scale)
        assert loop.scaler.get_scale() == scale
    loop.scaler.update(scale)
    stats = loop.scaler.stats()
    assert (stats.steps, stats.skipped, stats.growths, stats.backoffs) == (2, 1, 0, 0)
    assert (stats.scale, stats.growth_tracker) == (4.0, 0)
    assert loop.scaler.history().scale.tolist() == [2.0, 32.0]
    assert loop.scaler.history().skipped.tolist() == [True, False]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_norms_of_an_iteration(kind: torch.dtype) -> None:
    """Joint where each is of other gradients and of the same order, also beyond float32 squared."""
    scaler: Any = started(GradScaler, 1.0)
    # GPU kernels square float32 values in float32.
    big = 1e18 if kind is torch.float32 and compiled() else 1e25
    for clips, expected in (
        *(([(1.0, 2.0)], 3.0), ([(1.0, 2.0), (1.0, 2.0)], 5.0)),
        *(([(1.0, math.inf), (1.0, math.inf)], 4.0), ([(big, 2.0), (big, 2.0)], 5 * big)),
        ([(1.0, 2.0), (1.0, math.inf)], None),
    ):
        pairs = zip(clips, (3.0, 4.0), strict=False)
        optimizers = [sgd_with(torch.tensor([size * n], dtype=kind)) for (size, _), n in pairs]
        for optimizer, (_, order) in zip(optimizers, clips, strict=True):
            for _ in range(2):  # the later norm is of the same gradients
                scaler.grad_norm(optimizer)
            scaler.clip_grad_norm_(optimizer, 1e38, order)
            scaler.step(optimizer)
        scaler.update(1.0)
        history = scaler.history()
        assert history.has_norm[-1].item() == (expected is not None)
        if expected is not None:
            assert history.grad_norm[-1].item() == pytest.approx(expected, rel=1e-6)
    for clips, expected in ((False, 5.0), (True, 3.0)):
        if clips:
            scaler.clip_grad_norm_(optimizers[0], 1.0)
        scaler.grad_norm(optimizers)  # not recorded after a clip
        scaler.step_and_update(*optimizers)
        assert scaler.history().grad_norm[-1].item() == expected


def test_a_static_scale() -> None:
    loop = training(dynamic=False, growth_factor=2, growth_interval=1)
    limited = training(min_scale=8.0, max_scale=8.0, growth_interval=1)
    for value in (1.0, math.inf, 1.0, math.nan):
        loop.step(value)
        assert loop.scaler.get_scale() == limited.step(value).scaler.get_scale() == 8.0
    stats = loop.scaler.stats()
    assert (stats.steps, stats.skipped, stats.growths, stats.backoffs) == (4, 2, 0, 0)
    state = loop.scaler.state_dict()
    assert (state["growth_interval"], state["backoff_factor"]) == (0, 1.0)
    assert state["ampfast"] == {"norms": []}

    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(state)
    del state["ampfast"]
    assert theirs.state_dict() == state
    ours = GradScaler("cpu")
    ours.load_state_dict(state)
    assert ours.state_dict() == state


ABOVE, HIGH = "_scale must be above 0 and finite", (math.inf, 1e39, math.nan, 10**400)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_scale": 2.0, "max_scale": 1.0}, ValueError, "must be from min_scale to max_scale"),
        *(({"min_scale": low}, ValueError, f"min{ABOVE}") for low in (0.0, -1.0, 1e-50)),
        *(({"max_scale": high}, ValueError, f"max{ABOVE}") for high in HIGH),
        ({"max_scale": "1"}, TypeError, "max_scale must be a Python number or None, got str"),
        ({"min_scale": True}, TypeError, "min_scale must be a Python number or None, got bool"),
        ({"min_scale": 2.0**17}, ValueError, "init_scale must be from min_scale to max_scale"),
        ({"init_scale": math.nan, "min_scale": 1.0}, ValueError, "init_scale must be from"),
        ({"hysteresis": 0}, ValueError, "hysteresis must be from 1 to 2147483647, got 0"),
        *(({"hysteresis": more}, ValueError, "must be from 1 to") for more in (2**31, 2**70)),
        ({"hysteresis": 1.5}, TypeError, "hysteresis must be an int, got float"),
        ({"hysteresis": True}, TypeError, "hysteresis must be an int, got bool"),
        *(({"allow_fp16": value}, TypeError, "allow_fp16.*(None|int)") for value in (None, 1)),
        ({"backend": "no such thing"}, ValueError, "no such thing"),
        ({"dynamic": None}, TypeError, "dynamic must be a bool, got NoneType"),
        ({"dynamic": False, "min_scale": 1.0}, ValueError, "dynamic=False never changes"),
        ({"dynamic": False, "hysteresis": 2}, ValueError, "dynamic=False never changes"),
    ],
)
@pytest.mark.parametrize("enabled", [False, True])
def test_bad_arguments(arguments: dict, error: type, message: str, enabled: bool) -> None:
    with pytest.raises(error, match=message):
        GradScaler("cpu", enabled=enabled, **arguments)


SETTINGS = {"min_scale": 0.25, "max_scale": Fraction(64), "hysteresis": 3}


def test_checkpoints_keep_the_limits() -> None:
    loop, torchs = training(**SETTINGS), torch.amp.GradScaler("cpu")
    assert set(loop.scaler.state_dict()) - set(torchs.state_dict()) == {"ampfast"}
    saved = loop.step(math.inf).scaler.state_dict()
    also = {"hysteresis_tracker": 2, "norms": []}
    assert saved["ampfast"] == {**SETTINGS, **also}
    saved = through_file(saved)
    for is_started in (False, True):
        resumed = training(**SETTINGS)
        if not is_started:
            resumed.scaler = GradScaler("cpu", init_scale=1.0, **SETTINGS)
        resumed.scaler.load_state_dict(saved)
        assert resumed.scaler.state_dict() == saved
        resumed.scaler.scale(torch.zeros(()))
        assert resumed.step(math.inf, math.inf).scaler.get_scale() == 4.0  # the third overflow
    torchs.load_state_dict(saved)


def test_a_static_checkpoint_warns_a_scaler_that_grows(recwarn: pytest.WarningsRecorder) -> None:
    """As a guard's of bfloat16, loaded where a training goes on in float16."""
    static = GradScaler("cpu", init_scale=1.0, dynamic=False)
    torchs = torch.amp.GradScaler("cpu", growth_interval=0).state_dict()
    GradScaler("cpu").load_state_dict({**torchs, "backoff_factor": 1.0})
    static.load_state_dict(static.state_dict())
    scaler = GradScaler("cpu")
    with pytest.raises(ValueError, match="norms must be lists"):
        scaler.load_state_dict({**static.state_dict(), "ampfast": {"norms": [-1.0]}})
    assert not recwarn
    with pytest.warns(UserWarning, match=r"scale never changes, .* stays 1\.0") as caught:
        scaler.load_state_dict(static.state_dict())
    assert caught[0].filename == __file__
    assert scaler.get_growth_interval() == 0
    scaler.load_state_dict(static.state_dict())
    assert not recwarn


def assert_refused(saved: dict[str, Any], message: str, **arguments: Any) -> GradScaler:
    scaler = training(**arguments).step(math.inf).scaler
    before = scaler.state_dict()
    with pytest.raises((TypeError, ValueError), match=message):
        scaler.load_state_dict(saved)
    assert scaler.state_dict() == before
    return scaler


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"min_scale": 0.5},
            r"other settings \(.*'min_scale': 0\.5,.* there, .*'min_scale': 0\.25,",
        ),
        ({"hysteresis_tracker": 4}, "must be from -2147483647 to 3, got 4"),
        ({"hysteresis_tracker": "2"}, "must be an int, got str"),
        ({"hysteresis_tracker": -(2**31)}, "got -2147483648"),
        ({"another": 1}, "'another': 1"),
        (None, "must be a dict of .* got None"),
    ],
)
def test_checkpoints_of_other_limits(change: dict | None, message: str) -> None:
    saved = training(**SETTINGS).step(math.inf).scaler.state_dict()
    entry = None if change is None else {**saved["ampfast"], **change}
    assert_refused({**saved, "scale": 1.0, "ampfast": entry}, message, **SETTINGS)


def test_checkpoints_of_another_kind_of_scaler() -> None:
    static = GradScaler("cpu", init_scale=2.0, dynamic=False).state_dict()
    with pytest.warns(UserWarning, match=r"scale never changes, .* stays 2\.0"):
        training(**SETTINGS).scaler.load_state_dict(static)
    saved = training(**SETTINGS).scaler.state_dict()
    scaler = assert_refused(
        saved, "'hysteresis': 3} there, .*'hysteresis': 1} here", init_scale=2.0
    )
    del saved["ampfast"]
    scaler.load_state_dict(saved)
    assert scaler.get_scale() == 8.0
    training(**SETTINGS).scaler.load_state_dict(
        {**saved, "ampfast": {"norms": [[("Sigmas", [0.0] * 4)]]}}
    )
    refilled = training(**SETTINGS).step(math.inf).scaler
    refilled.load_state_dict(saved)
    assert refilled.state_dict()["ampfast"]["hysteresis_tracker"] == 3
    message = "scale never changes, but the checkpoint is of .* and changes"
    torchs = torch.amp.GradScaler("cpu").state_dict()
    scaler = assert_refused(torchs, message, dynamic=False, init_scale=4.0)
    for half_static in ({"growth_interval": 0}, {"backoff_factor": 1.0}):
        assert_refused({**torchs, **half_static}, message, dynamic=False)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("how", ["pickle", "deepcopy", "copy"])
def test_counters_survive_copies(how: str, backend: str) -> None:
    loop = training(**SETTINGS, backend=backend).step(1.0, math.inf, 1.0)
    kept, pickled = loop.scaler, pickle.dumps(loop.scaler)
    assert len(pickled) < 2000, "only the steps that were taken"
    loop.scaler = pickle.loads(pickled) if how == "pickle" else getattr(copy, how)(kept)
    assert loop.scaler.stats() == kept.stats()
    assert loop.scaler.history().scale.tolist() == [8.0, 8.0, 8.0]
    loop.scaler.scale(torch.zeros(()))
    loop.step(math.inf)
    for scaler, steps, tracker in ((kept, 3, 2), (loop.scaler, 4, 1)):
        assert scaler.stats().steps == steps
        assert scaler.state_dict()["ampfast"]["hysteresis_tracker"] == tracker
