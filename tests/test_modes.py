"""Flags written by hand, and torch's modes: inference, fake tensors, changed defaults."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from support.gradients import parameter_with, six
from support.outcomes import agree, outcome
from support.scalers import Scaler, started

from ampfast import GradScaler
from ampfast.capture import refuse_capture

CPU = torch.device("cpu")


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
        scaler, p, seen = started(scaler_type, 3.0), six(3), []
        optimizer = types.SimpleNamespace(param_groups=[{"params": [p]}], step=lambda: "stepped")
        scaler.unscale_(optimizer)
        for call in (lambda: scaler.step(optimizer), scaler.update):
            copies = {k: f.clone() if torch.is_tensor(f) else f for k, f in flags.items()}
            scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = copies
            result = outcome(call)
            # The texts name different ops.
            seen.append([result.value, type(result.error).__name__])
        return [seen, scaler._scale, scaler._growth_tracker]

    agree(use)


# Modes


@pytest.mark.parametrize("fused", [False, True])
def test_inside_inference_mode(fused: bool) -> None:
    def use(scaler_type: Scaler) -> Any:
        with torch.inference_mode():
            scaler, p = started(scaler_type, 3.0), six(3)
            optimizer = torch.optim.Adam([p], lr=0.1, fused=fused)
            for _ in range(2):
                scaler.step(optimizer)
                scaler.update()
        return [p.grad.clone(), p.detach().clone(), scaler.get_scale()]

    agree(use)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_on_fake_tensors(call: str) -> None:
    """Memory estimators train on tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def use(scaler_type: Scaler) -> Any:
        with FakeTensorMode():
            scaler, p = started(scaler_type, 3.0), six(3)
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
            scaler, p = started(scaler_type, 3.0), parameter_with(torch.full((3,), 6.0))
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
        scaler, p = started(scaler_type, 3.0), six(3)
        with torch.device("meta"):
            scaler.unscale_(torch.optim.SGD([p], lr=0.1))
            scaler.update()
        return [p.grad, scaler._scale, scaler.get_scale()]

    agree(use)


def test_reports_under_another_default_device() -> None:
    scaler, p = started(GradScaler, 8.0), six(3)
    scaler._track = "overflow"
    optimizer = torch.optim.SGD([p], lr=0.1)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert len(scaler.history()) == 0
            assert scaler.health(optimizer).parameters[0].elements == p.numel()
            norm = scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.stats().scale == 8.0
            history = scaler.history()
            assert history.grad_norm.dtype == torch.float32
            assert history.grad_norm.item() == norm.item()
            assert scaler.overflow_report().step is None
            copied = copy.deepcopy(scaler)
        assert copied.stats() == scaler.stats()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_refusal_under_capture_does_not_break_compiled_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: 1 / 0)

    def double(value: torch.Tensor) -> torch.Tensor:
        refuse_capture("this", "do that")
        return value * 2

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    assert compiled(torch.ones(())).item() == 2.0


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_inside_a_function_transform(transform: str) -> None:
    """There a plain gradient may be wrapped, which torch's op handles."""

    def use(scaler_type: Scaler) -> Any:
        scaler, captured = started(scaler_type, 3.0), six(3)
        wrapped = torch.ones(2, 3)
        kinds = []

        def unscale(values: torch.Tensor) -> torch.Tensor:
            inner = torch.nn.Parameter(torch.zeros(3))
            inner.grad = (values * 6).detach()
            optimizer = types.SimpleNamespace(param_groups=[{"params": [captured, inner]}])
            scaler._per_optimizer_states.clear()
            scaler.unscale_(optimizer)
            kinds.append(type(inner.grad).__name__)
            return (values * inner.grad).sum()

        result = outcome(lambda: getattr(torch.func, transform)(unscale)(wrapped))
        return [kinds, result.value, type(result.error).__name__, captured.grad]

    agree(use)


def test_subclasses_are_left_to_torchs_own_op() -> None:
    """A gradient that overrides torch's functions sees the op, as in torch."""
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
    started(GradScaler, 3.0).unscale_(types.SimpleNamespace(param_groups=[{"params": [p]}]))
    assert "_amp_foreach_non_finite_check_and_unscale_" in seen
