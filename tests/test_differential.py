"""Random programs of scaler operations on torch's scaler and on ours, and faults they notice."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.processes import threads
from support.random_programs import VARIANTS, draw_program, explain, first_difference, variant_of
from support.scalers import Scaler, TorchScaler

from ampfast import GradScaler

# AMPFAST_FUZZ sets the number of programs; AMPFAST_FUZZ_FROM the first seed.
PROGRAMS = int(os.environ.get("AMPFAST_FUZZ", "300"))
FIRST = int(os.environ.get("AMPFAST_FUZZ_FROM", "0"))
BATCH = 25


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> Iterator[None]:
    """Keeps torch's own objects out of the collections that programs trigger."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("start", range(FIRST, FIRST + PROGRAMS, BATCH))
def test_random_programs_agree(start: int) -> None:
    """Both worlds stay equal bit for bit after every operation."""
    for seed in range(start, min(start + BATCH, FIRST + PROGRAMS)):
        # The tensors are small: a second thread mostly adds waiting, so few programs use it.
        with threads(2 if seed % 20 == 0 else 1):
            plan, program = draw_program(seed)
            watch = seed % 4 != 0
            found = first_difference(plan, program, VARIANTS[variant_of(seed)], watch=watch)
            if found is not None:
                pytest.fail(explain(seed, found, watch), pytrace=False)


def test_tracking_changes_nothing() -> None:
    ours, theirs, _ = VARIANTS["plain"]
    for seed in range(FIRST, FIRST + PROGRAMS // 15):
        plan, program = draw_program(seed)
        with threads(1):
            sides = ours, theirs, {"track": "overflow"}
            found = first_difference(plan, program, sides, watch=seed % 4 != 0)
        assert found is None, f"seed {seed}: {found}"


# Faults that torch's own test suite for the class misses

READY = torch.amp.grad_scaler.OptState.READY


def inverse_one_ulp_off(call: Any, self: Any, optimizer: Any, inverse: Any, *more: Any) -> Any:
    off = torch.nextafter(inverse, torch.full_like(inverse, torch.inf))
    return call(optimizer, off if inverse != 1 else inverse, *more)


def tracker_kept_on_a_skip(call: Any, self: Any, new_scale: Any = None) -> None:
    tracker, scale = self._get_growth_tracker(), self.get_scale()
    call(new_scale)
    if self._growth_tracker is not None and self.get_scale() < scale:
        self._growth_tracker.fill_(tracker)


def update_counts_the_last_optimizer(call: Any, self: Any, new_scale: Any = None) -> None:
    for key in list(self._per_optimizer_states)[:-1]:
        del self._per_optimizer_states[key]
    call(new_scale)


def accepted_again(call: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if self._per_optimizer_states[id(optimizer)]["stage"] is not READY:
        self._per_optimizer_states[id(optimizer)]["stage"] = READY
    return call(optimizer, *args, **kwargs)


def value_lost(call: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    call(*args, **kwargs)


def container_changed(call: Any, self: Any, outputs: Any) -> Any:
    scaled = call(outputs)
    return list(scaled) if isinstance(scaled, tuple) else scaled


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "inverse one ulp off": ("_unscale_grads_", inverse_one_ulp_off),
    "tracker kept on a skip": ("update", tracker_kept_on_a_skip),
    "update counts the last optimizer": ("update", update_counts_the_last_optimizer),
    "second unscale_ accepted": ("unscale_", accepted_again),
    "second step accepted": ("step", accepted_again),
    "half accepted": ("_unscale_grads_", lambda call, self, *args: call(*args[:-1], True)),
    "new scale ignored": ("update", lambda call, self, new_scale=None: call()),
    "value of step lost": ("step", value_lost),
    "container changed": ("scale", container_changed),
}


@pytest.mark.parametrize("base", [GradScaler, TorchScaler], ids=["ours", "torch"])
@pytest.mark.parametrize("fault", FAULTS)
def test_random_programs_notice_the_fault(fault: str, base: Scaler) -> None:
    name, body = FAULTS[fault]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = getattr(base, name).__get__(self)
        return body(original, self, *args, **kwargs)

    sides = type("Mutant", (base,), {name: method}), TorchScaler, {}
    with threads(1):
        for seed in range(120):
            if first_difference(*draw_program(seed), sides) is not None:
                return
    pytest.fail("120 random programs did not notice it")
