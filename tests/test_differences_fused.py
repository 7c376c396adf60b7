"""Deliberate differences with fused optimizers, each compared with torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.one_step import F32_MAX, TAKE_GRAD_SCALE, TINY, Setup, both, floats, setup
from support.optimizers import takes_scaled
from support.outcomes import outcome
from support.scalers import TorchScaler

from ampfast import GradScaler

OptState = torch.amp.grad_scaler.OptState


FUSED_CASES = [
    (0.0, (1.0,), True),
    (0.0, (0.0,), True),
    (0.0, (F32_MAX, 0.0), True),
    (TINY, (1.0,), True),
    (TINY, (0.25, 0.0), False),
    (TINY, (-1.0, 0.25), True),
    (TINY, (0.0, -0.0), False),
    (2.0**-149, (2.0**-21,), True),
    (2.0**-149, (2.0**-22,), False),
    (0.5, (F32_MAX,), True),
    (0.5, (-F32_MAX,), True),
    (0.5, (F32_MAX / 2,), False),
    (0.5, (2.0**127,), True),
    (2.0**16, (F32_MAX,), False),
    (2.0**16, (math.inf,), True),
    (2.0**16, (1.0, math.nan), True),
    (math.inf, (1.0,), False),
    (math.nan, (1.0,), True),
]


@pytest.mark.parametrize(("scale", "values", "bad"), FUSED_CASES)
@pytest.mark.parametrize("optimizer", TAKE_GRAD_SCALE)
def test_fused_division(
    optimizer: str, scale: float, values: tuple[float, ...], bad: bool, torch_fails: Any
) -> None:
    gradient = floats(*values)
    assert bad == (not (gradient / torch.tensor(scale)).isfinite().all())
    ours, theirs = both(optimizer, [floats(0.0), gradient], scale)
    ours.step()
    theirs.step()
    handed_scale, handed_flag = ours.calls[0]
    assert handed_flag.item() == float(bad)
    assert (handed_flag.dtype, handed_flag.shape) == (torch.float32, ())
    assert_same(handed_scale, theirs.calls[0][0])
    ours.scaler.update()
    if bad:
        assert ours.untouched()
        assert_same(ours.scaler._scale, torch.tensor(scale) * 0.5)
        torch_fails("fused optimizer, division that is not finite", not theirs.untouched())
    else:
        assert_same(ours.values(), theirs.values())
        theirs.scaler.update()
        assert_same(ours.scaler._scale, theirs.scaler._scale)


@pytest.mark.parametrize("optimizer", TAKE_GRAD_SCALE)
def test_fused_division_without_elements(optimizer: str) -> None:
    ours = setup(GradScaler, optimizer, [torch.empty(0), torch.empty(2, 0)], 0.0)
    ours.step()
    assert ours.calls[0][1].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", TAKE_GRAD_SCALE)
def test_fused_division_of_16_bit_gradients(
    optimizer: str, dtype: torch.dtype, torch_fails: Any
) -> None:
    if not takes_scaled(optimizer, dtype):
        pytest.skip("a kernel that fails its trial: see test_fused_trial.py")
    big = torch.finfo(dtype).max
    for scale, values, bad in (
        (0.0, (1.0,), True),
        (0.0, (0.0,), True),
        (2.0**-140, (big,), True),
        (4.0, (big, 1.0), False),
        (2.0**16, (math.inf,), True),
    ):
        ours, theirs = both(optimizer, [floats(*values, dtype=dtype)], scale)
        ours.step()
        theirs.step()
        assert ours.calls[0][1].item() == float(bad), (scale, values)
        if bad:
            assert ours.untouched()
            torch_fails("fused optimizer, division that is not finite", not theirs.untouched())
        else:
            assert_same(ours.values(), theirs.values())


OWN_SCALES = [
    # scaler's scale, the user's own, gradient, whether the quotient overflows
    (2.0**-30, 2.0**-100, 2.0**-2, True),
    (2.0**-30, 2.0**-100, 2.0**-3, False),
    (2.0**-30, 2.0**20, F32_MAX * 2.0**-10, False),
    (2.0**-30, 2.0**20, F32_MAX * 2.0**-9, True),
    (2.0**16, 0.0, 1.0, True),
    (2.0**16, math.nan, 1.0, True),
    (2.0**127, 4.0, 1.0, False),
    (2.0**16, -2.0, 3.0, False),
]


@pytest.mark.parametrize(("scale", "own", "value", "bad"), OWN_SCALES)
@pytest.mark.parametrize("optimizer", TAKE_GRAD_SCALE)
def test_the_grad_scale_handed_over_decides(
    optimizer: str, scale: float, own: float, value: float, bad: bool, torch_fails: Any
) -> None:
    ours, theirs = both(optimizer, [floats(value, value / 2)], scale)
    for run in (ours, theirs):
        run.optimizer.grad_scale = torch.tensor(own)
        run.step()
        assert not hasattr(run.optimizer, "grad_scale")
    assert_same(ours.calls[0][0], theirs.calls[0][0])
    assert ours.calls[0][1].item() == float(bad)
    if bad:
        assert ours.untouched()
        torch_fails("fused optimizer, the user's own grad_scale", not theirs.untouched())
    else:
        assert_same(ours.values(), theirs.values())


@pytest.mark.parametrize(("own", "bad"), [(2.0**-130, True), (0.0, True), (0.5, False)])
@pytest.mark.parametrize("optimizer", TAKE_GRAD_SCALE)
def test_own_grad_scale_after_an_explicit_unscale(
    optimizer: str, own: float, bad: bool, torch_fails: Any
) -> None:
    ours, theirs = both(optimizer, [floats(8.0, 4.0)], 2.0)
    for run in (ours, theirs):
        run.scaler.unscale_(run.optimizer)
        run.optimizer.grad_scale = torch.tensor(own)
        run.step()
    assert_same(ours.calls[0][0], torch.tensor(own))
    assert ours.calls[0][1].item() == float(bad)
    if bad:
        assert ours.untouched()
        torch_fails("fused optimizer, the user's own grad_scale", not theirs.untouched())
    else:
        assert_same(ours.values(), theirs.values())


@pytest.mark.parametrize("value", [2.0, 0.5, math.nan, math.inf, -1.0, 1.0, 0.0, -0.0])
@pytest.mark.parametrize("optimizer", TAKE_GRAD_SCALE)
def test_flags_are_normalised(optimizer: str, value: float, torch_fails: Any) -> None:
    ours, theirs = both(optimizer, [floats(math.inf if value else 1.0)])
    for run in (ours, theirs):
        run.scaler.unscale_(run.optimizer)
        for flag in run.scaler._found_inf_per_device(run.optimizer).values():
            flag.fill_(value)
        run.step()
    handed = ours.calls[0][1]
    assert_same(handed, torch.tensor(float(value != 0)))
    assert ours.untouched() == bool(value)
    assert ours.finite()
    assert_same(ours.scaler.found_inf(ours.optimizer), torch.tensor(float(value != 0)))
    if value not in (0, 1):
        torch_fails("found_inf that is neither 0 nor 1", not theirs.finite())
    else:
        assert_same(ours.values(), theirs.values())


class Fails(torch.optim.SGD):
    """Raises in its first step, before or after the parameters are written."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5, fused=True)
        self.fuse = True

    def step(self, closure: Any = None) -> Any:
        if self.fuse:
            self.fuse = False
            raise MemoryError("no room")
        return super().step(closure)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("own", [None, 4.0])
def test_fused_step_that_raises(own: float | None, explicit: bool, torch_fails: Any) -> None:
    def run(scaler_type: type) -> Setup:
        result = setup(scaler_type, Fails, [floats(8.0)], 2.0)
        if explicit:
            result.scaler.unscale_(result.optimizer)
        if own is not None:
            result.optimizer.grad_scale = torch.tensor(own)
        with pytest.raises(MemoryError, match="no room"):
            result.step()
        return result

    ours, theirs = run(GradScaler), run(TorchScaler)
    for name in ("grad_scale", "found_inf"):
        assert not hasattr(ours.optimizer, name)
    stage = OptState.UNSCALED if explicit else OptState.READY
    assert ours.scaler._per_optimizer_states[id(ours.optimizer)]["stage"] is stage
    ours.step()
    expected = 1 - 0.5 * 8.0 / 2.0
    assert ours.parameters[0].item() == expected
    theirs.step()
    torch_fails("a fused step that raised once", theirs.parameters[0].item() != expected)
    ours.scaler.update()
    assert outcome(ours.step).error is None
