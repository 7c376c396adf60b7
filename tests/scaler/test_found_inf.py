"""`found_inf` and `step_skipped` for every optimizer, without a trace of dead ones."""

from __future__ import annotations

import gc
import math
import types
from typing import Any

import pytest
import torch
from support.comparison import assert_same, started
from support.gradients import parameter_with
from support.optimizers import KINDS, OPTIMIZERS
from support.steps import take_step

from ampfast import GradScaler
from ampfast.report import ScalerStats


def optimizer_of(kind: str, value: float = 1.0) -> Any:
    return KINDS[kind]([parameter_with(torch.tensor([1.0, value]))])


def assert_unknown(scaler: GradScaler, optimizer: Any) -> None:
    for ask in (scaler.found_inf, scaler.step_skipped):
        with pytest.raises(LookupError, match="never checked"):
            ask(optimizer)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "legacy"])
def test_tells_about_the_last_step(kind: str, explicit: bool) -> None:
    scaler, optimizer, answers = started(), optimizer_of(kind), []
    assert_unknown(scaler, optimizer)
    for value in (1.0, math.inf, 2.0, math.nan, -math.inf, 3.0):
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([2.0, value])
        is_bad = not math.isfinite(value)
        if explicit:
            scaler.unscale_(optimizer)
            assert scaler.step_skipped(optimizer) is is_bad
        scaler.step(optimizer)
        assert scaler.step_skipped(optimizer) is is_bad
        scaler.update()
        assert scaler.step_skipped(optimizer) is is_bad
        answers.append(scaler.found_inf(optimizer))
    # None was rewritten.
    assert_same(answers, [torch.tensor(value) for value in (0.0, 1.0, 0.0, 1.0, 1.0, 0.0)])


def test_several_optimizers_and_scalers_are_kept_apart() -> None:
    first, second = started(), started()
    good, bad = optimizer_of("sgd"), optimizer_of("fused_adam", math.nan)
    take_step(first, good, bad)
    assert (first.step_skipped(good), first.step_skipped(bad)) == (False, True)
    assert_unknown(second, good)
    # A step of one optimizer leaves the other's result unchanged.
    take_step(first, good)
    assert first.step_skipped(bad)
    first.found_inf(good).fill_(1.0)  # a copy
    take_step(first, good)
    assert first.stats().skipped == 1
    bad.zero_grad()
    first.step(bad)
    assert first.skip_reason(bad) is None, "without gradients"
    first._scale = first._scale.to("meta")
    assert first.found_inf(good).device.type == "meta"


def test_disabled_scaler() -> None:
    scaler, optimizer = GradScaler("cpu", enabled=False), optimizer_of("sgd", math.inf)
    scaler.step(optimizer)
    assert_same(scaler.found_inf(optimizer), torch.tensor(0.0))
    assert scaler.step_skipped(optimizer) is False
    assert scaler.stats() == ScalerStats(0, 0, 0, 0, 0, 1.0, 0, 0)


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
    """Object that takes no weak reference."""
    return types.SimpleNamespace(**vars(Unhashable(value)), step=lambda: None)


@pytest.mark.parametrize("make", [Unhashable, namespace, lambda value: optimizer_of("sgd", value)])
def test_ids_that_come_back_say_nothing(make: Any) -> None:
    scaler, good = started(), make(1.0)
    seen: set[int] = set()
    for _ in range(200):
        optimizer = make(math.inf)
        assert_unknown(scaler, optimizer)
        seen.add(id(optimizer))
        scaler.step(good)
        scaler.step(optimizer)
        scaler.update(2.0**16)
        assert (scaler.step_skipped(good), scaler.step_skipped(optimizer)) == (False, True)
        del optimizer
        if make is not namespace:
            gc.collect(0)
    if make is not namespace:
        assert len(seen) < 200, "no id came back, so this proves nothing"
