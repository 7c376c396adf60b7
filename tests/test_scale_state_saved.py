"""Checkpoints and copies of scalers with a policy and counters."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from support.scaler_loop import Loop

from ampfast import GradScaler
from ampfast.backends.core import state_layout
from ampfast.loss_scale import Limits, LossScale

POLICY = {"min_scale": 0.25, "max_scale": 64.0, "hysteresis": 3}


def test_checkpoints_keep_the_policy() -> None:
    loop = Loop(**POLICY)
    assert set(loop.scaler.state_dict()) - set(torch.amp.GradScaler("cpu").state_dict()) == {
        "ampfast"
    }
    loop.step(math.inf)
    saved = loop.scaler.state_dict()
    assert saved["ampfast"] == {
        **POLICY,
        "hysteresis_refill": "growth",
        "hysteresis_tracker": 2,
        "norms": [],
    }
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    for started in (False, True):
        resumed = Loop(**POLICY)
        if not started:
            resumed.scaler = GradScaler("cpu", init_scale=1.0, **POLICY)
        resumed.scaler.load_state_dict(saved)
        assert resumed.scaler.state_dict() == saved
        resumed.scaler.scale(torch.zeros(()))
        for _ in range(2):
            resumed.step(math.inf)
        assert resumed.scaler.get_scale() == 4.0  # at the third overflow in total
    torch.amp.GradScaler("cpu").load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:The scale is 0")
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("scale", [0.125, 128.0, 0.0, math.inf, math.nan])
def test_checkpoints_beyond_the_limits(scale: float, started: bool) -> None:
    """They load as a scale that was set, which is left until it comes within."""
    given, loaded = Loop(**POLICY), Loop(**POLICY)
    given.scaler.update(scale)
    if not started:
        loaded.scaler = GradScaler("cpu", init_scale=1.0, **POLICY)
    loaded.scaler.load_state_dict(given.scaler.state_dict())
    loaded.scaler.scale(torch.zeros(()))
    for value in (1.0, 1.0, 1.0, math.inf, math.inf, math.inf):
        scales = torch.tensor([loop.scaler.get_scale() for loop in (given, loaded)])
        assert scales[0].equal(scales[1]) or scales.isnan().all()
        assert loaded.scaler.state_dict()["ampfast"] == given.scaler.state_dict()["ampfast"]
        for loop in (given, loaded):
            loop.step(value)


def test_a_static_checkpoint_is_not_for_limits() -> None:
    scaler = Loop(**POLICY).scaler
    saved = GradScaler("cpu", init_scale=2.0, dynamic=False).state_dict()
    with pytest.raises(ValueError, match="the checkpoint's scale is static, but this scaler"):
        scaler.load_state_dict(saved)
    assert scaler.get_scale() == 8.0


def test_a_static_checkpoint_warns_a_scaler_that_grows(recwarn: pytest.WarningsRecorder) -> None:
    """As a guard's of bfloat16, loaded where a training goes on in float16."""
    static = GradScaler("cpu", init_scale=1.0, dynamic=False)
    torchs = torch.amp.GradScaler("cpu", growth_interval=0).state_dict()
    GradScaler("cpu").load_state_dict({**torchs, "backoff_factor": 1.0})
    static.load_state_dict(static.state_dict())
    scaler = GradScaler("cpu")
    with pytest.raises(ValueError, match="norms of steps taken must be"):
        scaler.load_state_dict({**static.state_dict(), "ampfast": {"norms": [-1.0]}})
    assert not recwarn
    with pytest.warns(UserWarning, match=r"scale never changes, .* stays 1\.0") as caught:
        scaler.load_state_dict(static.state_dict())
    assert caught[0].filename == __file__
    assert scaler.get_growth_interval() == 0
    scaler.load_state_dict(static.state_dict())
    assert not recwarn


@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_a_limit_does_not_move_the_scale_the_wrong_way(backend: str) -> None:
    loop = Loop(backend=backend, growth_interval=1, min_scale=4.0, max_scale=16.0)
    loop.scaler.update(1.0)
    loop.step(math.inf)
    assert loop.scaler.get_scale() == 1.0
    loop.step()
    assert loop.scaler.get_scale() == 2.0
    loop.scaler.update(64.0)
    loop.step()
    assert loop.scaler.get_scale() == 64.0
    loop.step(math.inf)
    assert loop.scaler.get_scale() == 32.0


def test_torchs_checkpoints_refill_the_hysteresis() -> None:
    loop = Loop(**POLICY)
    loop.step(math.inf)
    loop.scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=16.0).state_dict())
    assert loop.scaler.state_dict()["ampfast"]["hysteresis_tracker"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_scale": 0.5}, r"another policy \(min_scale 0\.5 there, 0\.25 here\)"),
        ({"hysteresis_refill": "finite_step"}, "hysteresis_refill 'finite_step' there"),
        ({"hysteresis_tracker": 4}, "must be an int of at most 3, got 4"),
        ({"hysteresis_tracker": "2"}, "got '2'"),
        ({"another": 1}, "must be a dict of min_scale, max_scale"),
        (None, "must be a dict of .* got None"),
    ],
)
def test_checkpoints_of_another_policy(change: dict | None, message: str) -> None:
    loop = Loop(**POLICY)
    loop.step(math.inf)
    before = loop.scaler.state_dict()
    entry = None if change is None else {**before["ampfast"], **change}
    with pytest.raises(ValueError, match=message):
        loop.scaler.load_state_dict({**before, "scale": 1.0, "ampfast": entry})
    assert loop.scaler.state_dict() == before


def entry_of(limits: Limits, tracker: Any) -> dict[str, Any]:
    return {**limits.settings(), "hysteresis_tracker": tracker}


@pytest.mark.parametrize("tracker", [3, 2, 0, -1, -63, 1 - 2**31])
def test_trackers_of_a_checkpoint(tracker: int) -> None:
    limits = Limits(hysteresis=3)
    assert limits.require_loadable(entry_of(limits, tracker)) == tracker


@pytest.mark.parametrize("tracker", [4, -(2**31), True, 1.0, None])
def test_trackers_that_cannot_be(tracker: Any) -> None:
    limits = Limits(hysteresis=3)
    with pytest.raises(ValueError, match="hysteresis_tracker must be an int"):
        limits.require_loadable(entry_of(limits, tracker))


@pytest.mark.parametrize("on_min_scale", ["ignore", "warn", "raise"])
def test_a_new_state_keeps_its_arguments(on_min_scale: str) -> None:
    state = LossScale(Limits(min_scale=1.0, hysteresis=3), on_min_scale)
    assert state.on_min_scale == on_min_scale
    assert state.hysteresis_tracker() == 3


def test_a_checkpoint_has_no_skips_at_the_minimum() -> None:
    scaler = GradScaler("cpu", init_scale=1.0, min_scale=1.0, on_min_scale="raise")
    scaler.scale(torch.ones(()))
    words = scaler._loss_scale.words
    words[[state_layout.STEPS, state_layout.CONSECUTIVE_SKIPS, state_layout.SKIPS_AT_MINIMUM]] = 1
    scaler.load_state_dict(scaler.state_dict())
    assert scaler.stats().steps == 1


def test_a_disabled_scaler_has_no_policy_to_save() -> None:
    assert GradScaler("cpu", enabled=False, min_scale=1.0).state_dict() == {}


def test_a_policys_checkpoint_is_not_for_a_scaler_without() -> None:
    saved = Loop(**POLICY).scaler.state_dict()
    scaler = GradScaler("cpu")
    with pytest.raises(ValueError, match="hysteresis 3 there, 1 here"):
        scaler.load_state_dict(saved)
    assert scaler.get_scale() == 65536.0
    del saved["ampfast"]
    scaler.load_state_dict(saved)
    assert scaler.get_scale() == 8.0


def test_a_dynamic_checkpoint_is_not_for_a_static_scaler() -> None:
    scaler = GradScaler("cpu", dynamic=False, init_scale=4.0)
    with pytest.raises(ValueError, match="dynamic=False, but the checkpoint's scale changes"):
        scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert scaler.get_scale() == 4.0
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", ["pickle", "deepcopy", "copy"])
def test_counters_survive_copies(how: str, inference: bool, backend: str) -> None:
    loop = Loop(**POLICY, on_min_scale="warn", backend=backend)
    for value in (1.0, math.inf, 1.0):
        loop.step(value)
    with torch.inference_mode(inference):
        if how == "pickle":
            pickled = pickle.dumps(loop.scaler)
            assert len(pickled) < 2000, "only the steps that were taken"
            copied = pickle.loads(pickled)
        else:
            copied = getattr(copy, how)(loop.scaler)
    assert copied.stats() == loop.scaler.stats()
    assert copied.history().scale.tolist() == [8.0, 8.0, 8.0]
    other = Loop()
    other.scaler = copied
    copied.scale(torch.zeros(()))
    other.step(math.inf)
    assert copied.stats().steps == 4 and loop.scaler.stats().steps == 3
    assert loop.scaler.state_dict()["ampfast"]["hysteresis_tracker"] == 2
    assert copied.state_dict()["ampfast"]["hysteresis_tracker"] == 1
    copied.load_state_dict(loop.scaler.state_dict())


def test_torchs_pickle_has_counters_from_zero() -> None:
    loop = Loop()
    scaler = GradScaler.__new__(GradScaler)
    scaler.__setstate__(torch.amp.GradScaler("cpu", init_scale=2.0).__getstate__())
    loop.scaler = scaler
    scaler.scale(torch.zeros(()))
    loop.step()
    assert scaler.stats().steps == 1
