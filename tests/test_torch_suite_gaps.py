"""Faults missed by torch's own test suite for the class, and caught here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.gradients import parameter_with, plant
from support.processes import threads
from support.random_programs import draw_program, first_difference
from support.scalers import Scaler, TorchScaler
from support.twins import Side, side

from ampfast import GradScaler

OptState = torch.amp.grad_scaler.OptState
INF = math.inf


def _with_gradients(scaler_type: Scaler, optimizer: str = "sgd", **arguments: Any) -> Side:
    one = side(scaler_type, optimizer, **arguments)
    one.scaler.scale(one.loss(0)).backward()
    return one


# Requirements


def asks_for_the_exact_inverse(scaler_type: Scaler) -> None:
    # Chosen so that one ulp shows: not powers of two, with products that round both ways.
    values = np.float32([1.0, 3.0, 1.1, 7.7e-5, 12345.678, -0.3])
    for scale in (3.0, 1000.3, 65535.0, 0.7):
        one = _with_gradients(scaler_type, init_scale=scale)
        gradient = one.model[2].bias.grad
        inverse = np.float32(1.0 / np.float64(np.float32(scale)))
        for value in values:
            gradient.fill_(float(value))
            one.scaler.unscale_(one.optimizer)
            assert gradient[0].item() == float(value * inverse), (scale, value)
            one.scaler.update()


def asks_for_a_reset_tracker(scaler_type: Scaler) -> None:
    one = side(scaler_type, init_scale=64.0, growth_interval=3)
    trackers, scales = [], []
    for seed, bad in enumerate([None, None, INF, None, None, None]):
        one.train(seed, bad)
        trackers.append(one.scaler._get_growth_tracker())
        scales.append(one.scaler.get_scale())
    assert trackers == [1, 2, 0, 1, 2, 0]
    assert scales == [64.0, 64.0, 32.0, 32.0, 32.0, 64.0]


def asks_for_every_optimizer(scaler_type: Scaler) -> None:
    for bad in range(3):
        scaler = scaler_type("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        gradients = [plant(torch.ones(2), "last", INF if i == bad else 1.0) for i in range(3)]
        optimizers = [torch.optim.SGD([parameter_with(g)], lr=1.0) for g in gradients]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0, f"optimizer {bad} of 3 overflowed"


def asks_for_one_unscale(scaler_type: Scaler) -> None:
    one = _with_gradients(scaler_type, init_scale=8.0)
    one.scaler.unscale_(one.optimizer)
    kept = one.model[2].bias.grad.clone()
    with pytest.raises(RuntimeError, match="has already been called on this optimizer"):
        one.scaler.unscale_(one.optimizer)
    assert torch.equal(one.model[2].bias.grad, kept)


def asks_for_one_step(scaler_type: Scaler) -> None:
    for optimizer in ("sgd", "fused_adam"):
        one = _with_gradients(scaler_type, optimizer, init_scale=8.0)
        one.scaler.step(one.optimizer)
        kept = one.model[2].bias.detach().clone()
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            one.scaler.step(one.optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step"):
            one.scaler.unscale_(one.optimizer)
        assert torch.equal(one.model[2].bias.detach(), kept)


def asks_to_refuse_half(scaler_type: Scaler) -> None:
    for call in ("unscale_", "step"):
        one = _with_gradients(scaler_type, init_scale=8.0)
        half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        half.grad = torch.ones(2, dtype=torch.float16)
        one.optimizer.add_param_group({"params": [half]})
        kept = one.model[0].weight.grad.clone()
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
            getattr(one.scaler, call)(one.optimizer)
        assert torch.equal(one.model[0].weight.grad, kept)


def asks_to_take_a_new_scale(scaler_type: Scaler) -> None:
    one = side(scaler_type, init_scale=8.0, growth_interval=1)
    for new in (3.0, torch.tensor(5.0), torch.tensor(6.0, dtype=torch.float64)):
        one.scaler.scale(one.loss(0)).backward()
        one.scaler.step(one.optimizer)
        one.scaler.update(new)
        assert one.scaler.get_scale() == float(new)
        assert one.scaler.scale(torch.ones(())).item() == float(new)


def asks_for_the_value_of_step(scaler_type: Scaler) -> None:
    for optimizer in ("sgd", "fused_sgd"):
        one = _with_gradients(scaler_type, optimizer, init_scale=8.0)
        assert one.scaler.step(one.optimizer, lambda: 4.5) == 4.5


def asks_for_the_container(scaler_type: Scaler) -> None:
    scaler = scaler_type("cpu", init_scale=8.0)
    one = torch.ones(())
    assert type(scaler.scale([one, one])) is list
    assert type(scaler.scale((one, one))) is tuple
    nested = scaler.scale([one, (one, [one])])
    assert [type(nested), type(nested[1]), type(nested[1][1])] == [list, tuple, list]
    assert type(scaler.scale(iter([one]))) is map


# The same faults, planted


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


GAPS: list[tuple[Callable[[Scaler], None], Callable[[Scaler], Scaler]]] = [
    (asks_for_the_exact_inverse, inverse_one_ulp_off),
    (asks_for_a_reset_tracker, tracker_kept_on_a_skip),
    (asks_for_every_optimizer, update_counts_the_last_optimizer),
    (asks_for_one_unscale, second_unscale_accepted),
    (asks_for_one_step, second_step_accepted),
    (asks_to_refuse_half, half_accepted),
    (asks_to_take_a_new_scale, new_scale_ignored),
    (asks_for_the_value_of_step, value_of_step_lost),
    (asks_for_the_container, container_changed),
]
IDS = [mutant.__name__ for _, mutant in GAPS]


@pytest.mark.parametrize(("asks", "mutant"), GAPS, ids=IDS)
def test_the_gap_is_closed(
    asks: Callable[[Scaler], None], mutant: Callable[[Scaler], Scaler]
) -> None:
    asks(GradScaler)
    asks(TorchScaler)
    for base in (GradScaler, TorchScaler):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            asks(mutant(base))


@pytest.mark.sweep
@pytest.mark.parametrize("mutant", [mutant for _, mutant in GAPS], ids=IDS)
def test_random_programs_notice_the_fault(mutant: Callable[[Scaler], Scaler]) -> None:
    sides = (mutant(GradScaler), TorchScaler, {})
    with threads(1):
        for seed in range(120):
            plan, program = draw_program(seed)
            if first_difference(plan, program, sides) is not None:
                return
    pytest.fail("120 random programs did not notice it")
