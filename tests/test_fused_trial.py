"""Trials of torch's fused optimizers, and what is done where one fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ampfast
from ampfast import fused_trial, optimizers
from ampfast.optimizers import divides_by_itself

KINDS = {
    torch.optim.Adagrad: "_fused_adagrad_",
    torch.optim.Adam: "_fused_adam_",
    torch.optim.AdamW: "_fused_adamw_",
    torch.optim.SGD: "_fused_sgd_",
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_warnings_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_warned", set())
    monkeypatch.setattr(fused_trial, "_faults", {})


def without(operator: Any, *names: str) -> Callable[..., Any]:
    """A fused operator that ignores arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **{**kwargs, **dict.fromkeys(names)})

    return call


def no_skip(operator: Any) -> Callable[..., Any]:
    return without(operator, "found_inf")


def no_division(operator: Any) -> Callable[..., Any]:
    return without(operator, "grad_scale")


def no_step(operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def ones(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(64, dtype=dtype))


@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_torchs_are_right_on_a_cpu(kind: Any, dtype: torch.dtype) -> None:
    assert fused_trial.fault_of(kind, dtype, CPU) is None


@EACH_KIND
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (no_skip, "does not skip where found_inf is 1"),
        (no_division, "does not divide by grad_scale"),
        (no_step, "computes other values than torch's unfused one"),
    ],
)
def test_a_kernel_that_ignores_what_it_is_told(
    kind: Any, fault: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scaler divides and skips by itself and says so once; sync_free_ refuses."""
    param, trusted = ones(), ones()
    optimizer, before = kind([param], lr=0.5, fused=True), kind([trusted], lr=0.5, fused=True)
    if not hasattr(before, "_step_supports_amp_scaling"):
        pytest.skip("to a scaler, the fused Adagrad of this torch is a plain optimizer")
    assert divides_by_itself(before)
    monkeypatch.setattr(torch, KINDS[kind], fault(getattr(torch, KINDS[kind])))
    scaler = ampfast.GradScaler("cpu", 1024.0)
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each, p in ((optimizer, param), (before, trusted)):
            scaler.scale((p * torch.inf).sum()).backward()
            scaler.step(each)
            found.append(p.tolist() == [1.0] * 64 and scaler.step_skipped(each))
            scaler.update()
    assert found == [True, True]
    (warning,) = caught
    assert words in str(warning.message) and warning.filename == __file__
    with pytest.raises(ValueError, match=f"{words}, for parameter 0 of group 0, a torch.float32"):
        ampfast.sync_free_(kind([ones()]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_16_bit_optimizer_moves_or_is_refused(kind: Any, dtype: torch.dtype) -> None:
    """torch 2.13's fused SGD leaves 16-bit parameters on a CPU where they are."""
    param = torch.nn.Parameter(torch.ones(40, dtype=dtype))
    try:
        optimizer = ampfast.sync_free_(kind([param], lr=0.5))
    except ValueError as error:
        assert f"torch's fused {kind.__name__} computes other values" in str(error)
        optimizer = kind([param], lr=0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert int((param != 1).sum()) == 40


def test_what_cannot_be_tried_is_left_to_its_step() -> None:
    assert divides_by_itself(torch.optim.Adam([torch.ones(2, device="meta")], fused=True))


def test_a_step_that_was_replaced_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: seen.append(self))
    assert divides_by_itself(torch.optim.SGD([ones()], fused=True))
    assert seen == []
