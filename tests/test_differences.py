"""Deliberate differences from torch, each shown with ours and with torch's class."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import BITS, assert_same
from support.one_step import F32_MAX, TINY, both, flags, floats, setup
from support.outcomes import outcome
from support.scalers import TorchScaler

from ampfast import GradScaler, functional


@pytest.mark.parametrize("scale", [TINY, 2.0**-140, 2.0**-149, 0.0])
@pytest.mark.parametrize("values", [(0.0,), (1.0, 0.0), (-0.0, 0.0, 0.0)])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_infinite_inverse_scale(
    optimizer: str, values: tuple[float, ...], scale: float, torch_fails: Any
) -> None:
    ours, theirs = both(optimizer, [floats(*values), floats(2.0)], scale)
    ours.step()
    assert not ours.calls
    assert ours.untouched()
    assert flags(ours) == [1.0]
    ours.scaler.update()
    assert_same(ours.scaler._scale, torch.tensor(scale) * 0.5)
    theirs.step()
    torch_fails("plain optimizer, infinite inverse scale", not theirs.finite())
    assert_same([p.grad for p in ours.parameters], [p.grad for p in theirs.parameters])


def test_infinite_inverse_with_nothing_to_write() -> None:
    empty = [torch.empty(0), torch.empty(3, 0)]
    ours, theirs = both("sgd", empty, TINY)
    for run in (ours, theirs):
        run.step()
        assert len(run.calls) == 1
        assert flags(run) == [0.0]
    # One element among empty tensors is enough.
    ours = setup(GradScaler, "sgd", [torch.empty(0), floats(0.0), torch.empty(3, 0)], TINY)
    ours.step()
    assert not ours.calls


@pytest.mark.parametrize("scale", [0.5, 2.0**-9, 2.0**-13])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_overflow_on_unscaling_to_the_ulp(
    dtype: torch.dtype, sign: int, scale: float, torch_fails: Any
) -> None:
    edge = torch.tensor(torch.finfo(dtype).max * scale, dtype=dtype).view(BITS[dtype])
    skipped = []
    for delta in range(-2, 4):
        gradient = torch.ones(37, dtype=dtype) * scale
        gradient[30] = sign * (edge + delta).view(dtype)
        twin = gradient.clone()
        torch._amp_foreach_non_finite_check_and_unscale_(
            [twin], torch.zeros(()), torch.tensor(1 / scale)
        )
        ours = setup(GradScaler, "sgd", [gradient], scale, allow_fp16=True)
        ours.step()
        assert_same(ours.parameters[0].grad, twin)
        skipped.append(not ours.calls)
        assert skipped[-1] == (not twin.isfinite().all()), delta
        assert ours.finite()
        if skipped[-1] and dtype is not torch.float16:
            theirs = setup(TorchScaler, "sgd", [gradient], scale)
            theirs.step()
            torch_fails("plain optimizer, overflow on unscaling", not theirs.finite())
    assert skipped == [False] * 3 + [True] * 3


def test_overflow_after_an_explicit_unscale(torch_fails: Any) -> None:
    ours, theirs = both("sgd", [floats(1.0), floats(F32_MAX, 1.0)], 0.5)
    for run in (ours, theirs):
        run.scaler.unscale_(run.optimizer)
        run.step()
        run.scaler.update()
    assert ours.untouched()
    assert ours.scaler.get_scale() == 0.25
    torch_fails("plain optimizer, overflow on unscaling", not theirs.finite())


def test_scale_of_zero_warns_once_when_read() -> None:
    def zero_warnings(call: Callable[[], Any]) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        for warning in caught:
            assert warning.filename == __file__
            assert "scale" in str(warning.message)
        return len(caught)

    for read in (lambda s: s.get_scale(), lambda s: s.state_dict()):
        run = setup(GradScaler, "sgd", [floats(math.inf)], 2.0**-149)
        assert zero_warnings(lambda r=run: r.scaler.get_scale()) == 0
        assert zero_warnings(lambda r=run: (r.step(), r.scaler.update())) == 0
        assert run.scaler._scale.item() == 0.0
        assert zero_warnings(lambda r=run, read=read: read(r.scaler)) == 1
        assert zero_warnings(lambda r=run: [r.scaler.get_scale(), r.scaler.state_dict()]) == 0


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_float16_gradients_when_allowed(optimizer: str, torch_fails: Any) -> None:
    gradients = [floats(8.0, -2.0, dtype=torch.float16), floats(4.0)]
    refused = setup(GradScaler, optimizer, gradients, 4.0)
    with pytest.raises(ValueError, match="FP16") as raised:
        refused.step()
    assert str(raised.value) == "Attempting to unscale FP16 gradients."
    assert_same([p.grad for p in refused.parameters], gradients)
    theirs = setup(TorchScaler, optimizer, gradients, 4.0)
    torch_fails("float16 gradients of a plain optimizer", outcome(theirs.step).error is not None)

    ours = setup(GradScaler, optimizer, gradients, 4.0, allow_fp16=True)
    ours.step()
    expected = setup(TorchScaler, optimizer, [g / 4 for g in gradients])
    expected.optimizer.step()
    assert_same(ours.values(), expected.values())
    ours.scaler.update()
    ours.parameters[0].grad[1] = math.nan
    ours.step()
    assert len(ours.calls) == 1


def test_allow_fp16_covers_sparse_gradients() -> None:
    indices = torch.tensor([[1, 1, 3]])
    values = floats(2, 4, 8, dtype=torch.float16)
    sparse = torch.sparse_coo_tensor(indices, values, (5,), check_invariants=True)
    ours = setup(GradScaler, "sgd", [sparse], 2.0, allow_fp16=True)
    ours.scaler.unscale_(ours.optimizer)
    assert_same(ours.parameters[0].grad.to_dense(), floats(0, 3, 0, 4, 0, dtype=torch.float16))
    assert flags(ours) == [0.0]


@pytest.mark.parametrize(("tracker", "interval"), [(5, 3), (5, 5), (5, 1), (1999, 10)])
def test_lowered_growth_interval(tracker: int, interval: int, torch_fails: Any) -> None:
    ours, theirs = both("sgd", [floats(1.0)], 4.0)
    for run in (ours, theirs):
        run.scaler._growth_tracker.fill_(tracker)
        run.scaler.set_growth_interval(interval)
        run.step()
        run.scaler.update()
    assert ours.scaler.get_scale() == 8.0
    assert ours.scaler._get_growth_tracker() == 0
    torch_fails("growth interval lowered below the tracker", theirs.scaler.get_scale() != 8.0)


@pytest.mark.parametrize("scale", [0.0, TINY, 0.5, 2.0**16])
@pytest.mark.parametrize("value", [0.0, 1.0, F32_MAX, math.inf, math.nan])
def test_check_inf_per_device_keeps_its_raw_meaning(scale: float, value: float) -> None:
    results = []
    for run in both("fused_adam", [floats(value, 2.0)], scale):
        found = run.scaler._check_inf_per_device(run.optimizer)
        assert found is run.scaler._found_inf_per_device(run.optimizer)
        results.append((found, run.parameters[0].grad, run.scaler._scale))
    assert_same(*results)


class Delegating(GradScaler):
    """Overrides the hooks only to observe, as subclasses for several ranks do."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(*args)


def test_a_hook_that_calls_ours_is_protected_too() -> None:
    for gradient, scale in ((floats(0.0), TINY), (floats(F32_MAX), 0.5)):
        run = setup(Delegating, "sgd", [gradient], scale)
        run.step()
        assert not run.calls


def test_clipping_by_torchs_name_rounds_less() -> None:
    """torch rounds norm and coefficient to the 16 bits of the gradients."""
    errors = {}
    for side in (torch.nn.utils, functional):
        param = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
        param.grad = torch.full((1000,), 1.0, dtype=torch.bfloat16)
        norm = side.clip_grad_norm_([param], 7.0)
        assert norm.dtype is torch.bfloat16
        errors[side] = (param.grad.double().norm() - 7.0).abs().item()
        param.grad = torch.tensor([2e38, 3e38]).repeat(500).bfloat16()
        assert side.clip_grad_norm_([param], math.inf).isinf()
        assert bool(param.grad.isnan().all()) is (side is torch.nn.utils)
    assert errors[functional] < errors[torch.nn.utils]
