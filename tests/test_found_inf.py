"""`found_inf` and `step_skipped` for every optimizer, without a trace of dead ones."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import types
import weakref
from typing import Any

import pytest
import torch
from support import scalers
from support.comparison import assert_same
from support.gradients import parameter_with, sgd_with
from support.optimizers import FUSED, OPTIMIZERS, Legacy
from support.scalers import Scaler

from ampfast import GradScaler


def started(kind: Scaler = GradScaler, **arguments: Any) -> Any:
    return scalers.started(kind, 2.0**16, **arguments)


def optimizer_of(kind: str, *values: float) -> Any:
    return OPTIMIZERS[kind]([parameter_with(torch.tensor([1.0, *values]))])


def plant(optimizer: Any, value: float) -> None:
    optimizer.param_groups[0]["params"][0].grad = torch.tensor([2.0, value])


def step(scaler: Any, *optimizers: Any) -> None:
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def assert_unknown(scaler: GradScaler, optimizer: Any) -> None:
    for ask in (scaler.found_inf, scaler.step_skipped):
        with pytest.raises(LookupError, match="never checked"):
            ask(optimizer)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_tells_about_the_last_step(kind: str, explicit: bool) -> None:
    scaler, optimizer = started(), optimizer_of(kind, 1.0)
    assert_unknown(scaler, optimizer)
    for value in (1.0, math.inf, 2.0, math.nan, -math.inf, 3.0):
        plant(optimizer, value)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        bad = not math.isfinite(value)
        for _ in range(2):
            assert_same(scaler.found_inf(optimizer), torch.tensor(float(bad)))
            assert scaler.step_skipped(optimizer) is bad
            scaler.update()
            plant(optimizer, 1.0)
            scaler.step(optimizer)
            bad = False
        scaler.update()


@pytest.mark.parametrize("kind", ["sgd", *FUSED])
def test_an_answer_once_given_is_never_rewritten(kind: str) -> None:
    scaler, optimizer = started(), optimizer_of(kind, math.inf)
    answers = []
    for value in (math.inf, 1.0, math.nan, 2.0):
        plant(optimizer, value)
        step(scaler, optimizer)
        answers.append(scaler.found_inf(optimizer))
    assert [a.item() for a in answers] == [1.0, 0.0, 1.0, 0.0]
    assert len({a.data_ptr() for a in answers}) == 4
    assert all(a._version == 0 or not a._is_view() for a in answers)


def test_several_optimizers_and_scalers_are_kept_apart() -> None:
    first, second = started(), started()
    good, bad = optimizer_of("sgd"), optimizer_of("fused_adam", math.nan)
    step(first, good, bad)
    assert (first.step_skipped(good), first.step_skipped(bad)) == (False, True)
    assert_unknown(second, good)
    # A step of one optimizer leaves the other's result unchanged.
    step(first, good)
    assert first.step_skipped(bad)


@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_flags_changed_by_the_user_count(kind: str) -> None:
    for before, after in ((math.inf, 0.0), (1.0, 1.0), (1.0, 3.0), (1.0, math.nan)):
        scaler, optimizer = started(), optimizer_of(kind, before)
        scaler.unscale_(optimizer)
        for flag in scaler._found_inf_per_device(optimizer).values():
            flag.fill_(after)
        scaler.step(optimizer)
        assert scaler.found_inf(optimizer).item() == float(after != 0)
        assert scaler.step_skipped(optimizer) is (after != 0)


def test_disabled_scaler() -> None:
    scaler, optimizer = GradScaler("cpu", enabled=False), optimizer_of("sgd", math.inf)
    scaler.step(optimizer)
    assert_same(scaler.found_inf(optimizer), torch.tensor(0.0))
    assert scaler.step_skipped(optimizer) is False


class Unhashable:
    """Equal to everything and unhashable, as a dataclass may be."""

    def __init__(self, value: float) -> None:
        self.param_groups = [{"params": [parameter_with(torch.tensor([value]))]}]

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def step(self) -> None:
        pass


def namespace(value: float) -> types.SimpleNamespace:
    groups = [{"params": [parameter_with(torch.tensor([value]))]}]
    return types.SimpleNamespace(param_groups=groups, step=lambda: None)


@pytest.mark.parametrize("make", [Unhashable, namespace, lambda value: optimizer_of("sgd", value)])
def test_ids_that_come_back_say_nothing(make: Any) -> None:
    scaler = started()
    seen: set[int] = set()
    for _ in range(200):
        optimizer = make(math.inf)
        assert_unknown(scaler, optimizer)
        seen.add(id(optimizer))
        scaler.step(optimizer)
        assert scaler.step_skipped(optimizer)
        scaler.update()
        del optimizer
        if make is not namespace:
            gc.collect(0)
    if make is not namespace:
        assert len(seen) < 200, "no id came back, so this proves nothing"


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_optimizers_and_gradients_are_not_kept_alive(kind: str, update: bool) -> None:
    scaler, optimizer = started(), optimizer_of(kind)
    scaler.step(optimizer)
    assert not scaler.step_skipped(optimizer)
    if update:
        scaler.update()
    parameter = optimizer.param_groups[0]["params"][0]
    dying = [weakref.ref(x) for x in (optimizer, parameter, parameter.grad)]
    del optimizer, parameter
    gc.collect()
    assert [ref() for ref in dying] == [None] * 3


def test_records_follow_no_copy() -> None:
    """A pickled or copied scaler works and has no results of optimizers that it never saw."""
    scaler, optimizer = started(), optimizer_of("sgd", math.inf)
    step(scaler, optimizer)
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.get_scale() == scaler.get_scale()
        fresh = optimizer_of("sgd")
        assert_unknown(twin, fresh)
        twin.scale(torch.ones(()))
        twin.step(fresh)
        assert twin.step_skipped(fresh) is False
    assert scaler.step_skipped(optimizer)


@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_a_step_that_raised_was_checked(kind: str) -> None:
    scaler, optimizer = started(), optimizer_of(kind)
    optimizer.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    assert scaler.found_inf(optimizer).item() == 0.0


@pytest.mark.parametrize("track", [None, "overflow"])
@pytest.mark.parametrize("value", [1.0, math.inf])
def test_unscale_alone_tells_whether_the_step_will_be_taken(value: float, track: Any) -> None:
    scaler, optimizer, other = started(track=track), *(optimizer_of("sgd", value) for _ in "ab")
    scaler.unscale_(optimizer)
    assert scaler.step_skipped(optimizer) == math.isinf(value)
    scaler.clip_grad_norm_(other, 1.0)
    assert scaler.step_skipped(other) == math.isinf(value)


def test_a_fused_step_without_gradients_found_nothing() -> None:
    scaler, optimizer = started(), optimizer_of("fused_adam")
    optimizer.zero_grad()
    scaler.step(optimizer)
    assert scaler.found_inf(optimizer).item() == 0
    assert not scaler.step_skipped(optimizer)
    assert scaler.skip_reason(optimizer) is None


@pytest.mark.parametrize("norm", [1.7e25, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_joint_norm_whose_squares_float32_cannot_hold(norm: float, dtype: torch.dtype) -> None:
    scaler = scalers.started(GradScaler, 1.0)
    optimizers = [sgd_with(torch.tensor([factor * norm], dtype=dtype)) for factor in (3.0, 4.0)]
    for optimizer in optimizers:
        scaler.clip_grad_norm_(optimizer, 1.0)
    step(scaler, *optimizers)
    assert scaler.history().grad_norm.dtype == torch.float32
    assert scaler.history().grad_norm.item() == pytest.approx(5.0 * norm, rel=1e-6, abs=0.0)


class Blind(Legacy):
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> str:
        return "stepped"


def test_the_check_of_a_legacy_optimizer_counts() -> None:
    scaler = started()
    legacy, blind = (kind([parameter_with(torch.tensor(math.inf))]) for kind in (Legacy, Blind))
    for optimizer in (legacy, blind):
        with pytest.warns(FutureWarning):
            scaler.step(optimizer)
    assert scaler.step_skipped(legacy)
    assert_unknown(scaler, blind)  # it checks nothing
