"""Faults that torch's own test suite for the class misses, and random programs notice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.processes import threads
from support.random_programs import draw_program, first_difference
from support.scalers import Scaler, TorchScaler

from ampfast import GradScaler

OptState = torch.amp.grad_scaler.OptState
INF = math.inf


def inverse_one_ulp_off(base: Scaler) -> Scaler:
    class Mutant(base):  # type: ignore[misc, valid-type]
        def _unscale_grads_(self, optimizer: Any, inv: Any, found: Any, allow: bool) -> Any:
            off = torch.nextafter(inv, torch.full_like(inv, INF)) if inv != 1 else inv
            return super()._unscale_grads_(optimizer, off, found, allow)

    return Mutant


def tracker_kept_on_a_skip(base: Scaler) -> Scaler:
    class Mutant(base):  # type: ignore[misc, valid-type]
        def update(self, new_scale: Any = None) -> None:
            tracker, scale = self._get_growth_tracker(), self.get_scale()
            super().update(new_scale)
            if self._growth_tracker is not None and self.get_scale() < scale:
                self._growth_tracker.fill_(tracker)

    return Mutant


def update_counts_the_last_optimizer(base: Scaler) -> Scaler:
    class Mutant(base):  # type: ignore[misc, valid-type]
        def update(self, new_scale: Any = None) -> None:
            for key in list(self._per_optimizer_states)[:-1]:
                del self._per_optimizer_states[key]
            super().update(new_scale)

    return Mutant


def second_unscale_accepted(base: Scaler) -> Scaler:
    class Mutant(base):  # type: ignore[misc, valid-type]
        def unscale_(self, optimizer: Any) -> None:
            if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
                self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
            super().unscale_(optimizer)

    return Mutant


def second_step_accepted(base: Scaler) -> Scaler:
    class Mutant(base):  # type: ignore[misc, valid-type]
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
                self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
            return super().step(optimizer, *args, **kwargs)

    return Mutant


def half_accepted(base: Scaler) -> Scaler:
    class Mutant(base):  # type: ignore[misc, valid-type]
        def _unscale_grads_(self, optimizer: Any, inv: Any, found: Any, allow: bool) -> Any:
            return super()._unscale_grads_(optimizer, inv, found, True)

    return Mutant


def new_scale_ignored(base: Scaler) -> Scaler:
    class Mutant(base):  # type: ignore[misc, valid-type]
        def update(self, new_scale: Any = None) -> None:
            super().update()

    return Mutant


def value_of_step_lost(base: Scaler) -> Scaler:
    class Mutant(base):  # type: ignore[misc, valid-type]
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            super().step(optimizer, *args, **kwargs)

    return Mutant


def container_changed(base: Scaler) -> Scaler:
    class Mutant(base):  # type: ignore[misc, valid-type]
        def scale(self, outputs: Any) -> Any:
            scaled = super().scale(outputs)
            return list(scaled) if isinstance(scaled, tuple) else scaled

    return Mutant


FAULTS: list[Callable[[Scaler], Scaler]] = [
    *(inverse_one_ulp_off, tracker_kept_on_a_skip, update_counts_the_last_optimizer),
    *(second_unscale_accepted, second_step_accepted, half_accepted, new_scale_ignored),
    *(value_of_step_lost, container_changed),
]


@pytest.mark.parametrize("base", [GradScaler, TorchScaler], ids=["ours", "torch"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_random_programs_notice_the_fault(fault: Callable[[Scaler], Scaler], base: Scaler) -> None:
    sides = (fault(base), TorchScaler, {})
    with threads(1):
        for seed in range(120):
            plan, program = draw_program(seed)
            if first_difference(plan, program, sides) is not None:
                return
    pytest.fail("120 random programs did not notice it")
