"""Flags written by hand, and torch's modes: inference, fake tensors, other defaults."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from support import TorchScaler, agree, outcome, parameter_with

from ampfast import GradScaler

Scaler = type[TorchScaler]
CPU = torch.device("cpu")


def started(scaler_type: Scaler) -> TorchScaler:
    scaler = scaler_type("cpu", init_scale=3.0)
    scaler.scale(torch.ones(()))
    return scaler


def six(*shape: int) -> torch.nn.Parameter:
    """A parameter whose gradient is 6 everywhere, so that unscaling leaves 2."""
    return parameter_with(torch.full(shape, 6.0))


# Records written by hand

RECORDS: dict[str, dict[Any, Any]] = {
    "double": {CPU: torch.tensor(1.0, dtype=torch.float64)},
    "bool": {CPU: torch.tensor(True)},
    "one element": {CPU: torch.tensor([1.0])},
    "two elements": {CPU: torch.tensor([1.0, 0.0])},
    "number": {CPU: 1.0},
    "text key": {"cpu": torch.tensor(1.0)},
    "two devices": {"a": torch.tensor(1.0), "b": torch.tensor(0.0)},
    "nan": {CPU: torch.tensor(float("nan"))},
}


@pytest.mark.parametrize("flags", RECORDS.values(), ids=RECORDS)
def test_flags_written_by_hand(flags: dict[Any, Any]) -> None:
    def use(scaler_type: Scaler) -> Any:
        scaler, p, seen = started(scaler_type), six(3), []
        optimizer = types.SimpleNamespace(param_groups=[{"params": [p]}], step=lambda: "stepped")
        scaler.unscale_(optimizer)
        for call in (lambda: scaler.step(optimizer), scaler.update):
            copies = {k: f.clone() if torch.is_tensor(f) else f for k, f in flags.items()}
            scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = copies
            told = outcome(call)
            # The texts name the ops that were reached.
            seen.append([told.value, type(told.error).__name__])
        return [seen, scaler._scale, scaler._growth_tracker]

    agree(use)


# Modes


@pytest.mark.parametrize("fused", [False, True])
def test_inside_inference_mode(fused: bool) -> None:
    def use(scaler_type: Scaler) -> Any:
        with torch.inference_mode():
            scaler, p = started(scaler_type), six(3)
            optimizer = torch.optim.Adam([p], lr=0.1, fused=fused)
            for _ in range(2):
                scaler.step(optimizer)
                scaler.update()
        return [p.grad.clone(), p.detach().clone(), scaler.get_scale()]

    agree(use)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_on_fake_tensors(call: str) -> None:
    """Memory estimators run a training step on tensors that have no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def use(scaler_type: Scaler) -> Any:
        with FakeTensorMode():
            scaler, p = started(scaler_type), six(3)
            optimizer = torch.optim.Adam([p], lr=0.1, fused=True)
            getattr(scaler, call)(optimizer)
            flags = scaler._found_inf_per_device(optimizer)
            kinds = [type(flag).__name__ for flag in flags.values()]
            scaler.update()
            return [kinds, type(scaler._scale).__name__, scaler._scale.shape]

    assert agree(use).error is None


def test_under_another_default_dtype() -> None:
    def use(scaler_type: Scaler) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            scaler, p = started(scaler_type), parameter_with(torch.full((3,), 6.0))
            scaler.step(torch.optim.SGD([p], lr=0.1))
            flags = [
                list(r["found_inf_per_device"].values())
                for r in scaler._per_optimizer_states.values()
            ]
            scaler.update()
            return [p.grad, flags, scaler._scale, scaler._growth_tracker]
        finally:
            torch.set_default_dtype(torch.float32)

    agree(use)


def test_under_another_default_device() -> None:
    def use(scaler_type: Scaler) -> Any:
        scaler, p = started(scaler_type), six(3)
        with torch.device("meta"):
            scaler.unscale_(torch.optim.SGD([p], lr=0.1))
            scaler.update()
        return [p.grad, scaler._scale, scaler.get_scale()]

    agree(use)


def test_subclasses_are_left_to_torchs_own_op() -> None:
    """A gradient that overrides torch's functions sees the op, as with torch."""
    seen: list[str] = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, kinds, args, kwargs or {})

    p = torch.ones(3).as_subclass(Watching).requires_grad_()
    p.grad = torch.full((3,), 6.0).as_subclass(Watching)
    started(GradScaler).unscale_(types.SimpleNamespace(param_groups=[{"params": [p]}]))
    assert "_amp_foreach_non_finite_check_and_unscale_" in seen
