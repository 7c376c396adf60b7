"""Deliberate differences from torch, each shown with ours and with torch's class."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.comparison import Hooked, TorchScaler, assert_same, outcome
from support.optimizers import takes_scaled
from support.steps import (
    F32_MAX,
    TAKE_GRAD_SCALE,
    TINY,
    Setup,
    both,
    flags,
    floats,
    host_reads,
    setup,
)

from ampfast import GradScaler

OptState = torch.amp.grad_scaler.OptState
NAN, INF = math.nan, math.inf


class Case(NamedTuple):
    """A step that torch takes or skips wrongly, or one beside it that both take.

    Attributes:
        what: The difference.
        gradients: Values of each gradient.
        scale: Scale of the scaler.
        skips: Whether the step must be skipped.
        own: The user's own `grad_scale`.
        explicit: Whether `unscale_` comes first.
        flag: What the user writes to the flags of `unscale_`.
        dtype: Of the last gradient.
        mends: Whether bad gradients are mended after `unscale_`, which still counts.
    """

    what: str
    gradients: list[tuple[float, ...]]
    scale: float
    skips: bool
    own: float | None = None
    explicit: bool = False
    flag: float | None = None
    dtype: torch.dtype = torch.float32
    mends: bool = False

    def begin(self, run: Setup) -> None:
        """All before the step."""
        if self.explicit:
            run.scaler.unscale_(run.optimizer)
        if self.flag is not None:
            for flag in run.scaler._found_inf_per_device(run.optimizer).values():
                flag.fill_(self.flag)
        if self.mends:
            for param in run.parameters:
                param.grad.nan_to_num_(0.0, 0.0, 0.0)
        if self.own is not None:
            run.optimizer.grad_scale = torch.tensor(self.own)

    def setups(self, optimizer: str, kind: type[GradScaler]) -> list[Setup]:
        """Of our class and of torch's."""
        values = [floats(*each) for each in self.gradients]
        values[-1] = values[-1].to(self.dtype)
        return [setup(each, optimizer, values, self.scale) for each in (kind, TorchScaler)]


INVERSE, OVERFLOW = "plain optimizer, infinite inverse scale", "plain optimizer, overflow"
PLAIN = [
    *(
        Case(INVERSE, [values, (2.0,)], scale, True)
        for scale in (TINY, 2.0**-140, 2.0**-149, 0.0)
        for values in ((0.0,), (1.0, 0.0), (-0.0, 0.0, 0.0))
    ),
    *(
        Case(INVERSE, [(2.0**-10, 0.0, -(2.0**-40))], scale, False)
        for scale in (TINY + 2.0**-149, 2.0**-127, 2.0**-126)
    ),
    # One element among empty tensors is enough.
    Case(INVERSE, [(), ()], TINY, False),
    Case(INVERSE, [(), (0.0,), ()], TINY, True),
    Case(OVERFLOW, [(1.0,), (F32_MAX, 1.0)], 0.5, True),
    Case(OVERFLOW, [(1.0,), (F32_MAX, 1.0)], 0.5, True, explicit=True),
]


@pytest.mark.parametrize("kind", [GradScaler, Hooked])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("case", PLAIN)
def test_plain_steps(case: Case, optimizer: str, kind: type[GradScaler], torch_fails: Any) -> None:
    ours, theirs = case.setups(optimizer, kind)
    for run in (ours, theirs):
        case.begin(run)
        run.step()
    assert flags(ours) == [float(case.skips)]
    assert len(ours.calls) == (not case.skips)
    assert_same([p.grad for p in ours.parameters], [p.grad for p in theirs.parameters])
    assert_ends(case, ours, theirs, torch_fails, theirs.finite())


def assert_ends(case: Case, ours: Setup, theirs: Setup, torch_fails: Any, right: bool) -> None:
    """Compares parameters and scales; `right`: whether torch's step was, if it is skipped."""
    for run in (ours, theirs):
        run.scaler.update()
    if case.skips:
        assert ours.untouched()
        assert_same(ours.scaler._scale, torch.tensor(case.scale) * 0.5)
        torch_fails(case.what, not right)
    else:
        assert_same(ours.values(), theirs.values())
        assert_same(ours.scaler._scale, theirs.scaler._scale)


QUOTIENT, OWN = "fused optimizer, division that is not finite", "fused optimizer, own grad_scale"
FLAG = "found_inf that is neither 0 nor 1"
DIVISIONS: list[tuple[float, tuple[float, ...], bool]] = [
    *((0.0, values, True) for values in ((1.0,), (0.0,), (F32_MAX, 0.0))),
    *((TINY, values, True) for values in ((1.0,), (-1.0, 0.25))),
    *((TINY, values, False) for values in ((0.25, 0.0), (0.0, -0.0))),
    *((2.0**-149, (2.0**-21,), True), (2.0**-149, (2.0**-22,), False)),
    *((0.5, (value,), True) for value in (F32_MAX, -F32_MAX, 2.0**127)),
    *((0.5, (F32_MAX / 2,), False), (2.0**16, (F32_MAX,), False)),
    *((2.0**16, (INF,), True), (2.0**16, (1.0, NAN), True)),
    *((INF, (1.0,), False), (NAN, (1.0,), True)),
]
# Scales of the scaler and of the user, gradient, and whether the quotient overflows.
OWN_SCALES = [
    *((2.0**-30, 2.0**-100, 2.0**-2, True), (2.0**-30, 2.0**-100, 2.0**-3, False)),
    (2.0**-30, 2.0**20, F32_MAX * 2.0**-10, False),
    (2.0**-30, 2.0**20, F32_MAX * 2.0**-9, True),
    *((2.0**16, 0.0, 1.0, True), (2.0**16, NAN, 1.0, True)),
    *((2.0**127, 4.0, 1.0, False), (2.0**16, -2.0, 3.0, False)),
]
FUSED = [
    *(Case(QUOTIENT, [(0.0,), values], scale, skips) for scale, values, skips in DIVISIONS),
    Case(QUOTIENT, [(), ()], 0.0, False),
    *(
        Case(QUOTIENT, [(1.0, value)], scale, skips, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16)
        for scale, value, skips in (
            *((0.0, 1.0, True), (0.0, 0.0, True), (2.0**-140, torch.finfo(dtype).max, True)),
            *((4.0, torch.finfo(dtype).max, False), (2.0**16, INF, True)),
        )
    ),
    # The optimizer uses the float32 quotient, which float16 cannot hold, so its step is valid.
    Case(QUOTIENT, [(5e4, 1.0)], 0.5, False, dtype=torch.float16),
    *(
        Case(OWN, [(value, value / 2)], scale, skips, own=own)
        for scale, own, value, skips in OWN_SCALES
    ),
    *(
        Case(OWN, [(8.0, 4.0)], 2.0, skips, own=own, explicit=True)
        for own, skips in ((2.0**-130, True), (0.0, True), (0.5, False))
    ),
    Case(OWN, [(INF, 1.0)], 2.0, True, own=0.5, explicit=True, mends=True),
    *(
        Case(FLAG, [(INF if flag else 1.0,)], 2.0**16, flag != 0, explicit=True, flag=flag)
        for flag in (2.0, 0.5, NAN, INF, -1.0, 1.0, 0.0, -0.0)
    ),
]


@pytest.mark.parametrize("case", FUSED)
@pytest.mark.parametrize("optimizer", TAKE_GRAD_SCALE)
def test_fused_steps(optimizer: str, case: Case, torch_fails: Any) -> None:
    if not takes_scaled(optimizer, case.dtype):
        pytest.skip("a kernel that fails its trial: see test_fused_support.py")
    ours, theirs = case.setups(optimizer, GradScaler)
    for run in (ours, theirs):
        case.begin(run)
        run.step()
        assert not hasattr(run.optimizer, "grad_scale")
    scale, flag = ours.calls[0]
    assert_same(scale, theirs.calls[0][0])
    assert_same(flag, torch.tensor(float(case.skips)))
    assert_same(ours.scaler.found_inf(ours.optimizer), flag)
    for state in ours.optimizer.state.values():
        assert "step" not in state or state["step"].item() == float(not case.skips)
    assert_ends(case, ours, theirs, torch_fails, theirs.untouched())


@pytest.mark.parametrize("read", ["get_scale", "state_dict"])
def test_scale_of_zero_warns_once_when_read(read: str) -> None:
    run = setup(GradScaler, "sgd", [floats(INF)], 2.0**-149)
    scaler = run.scaler
    calls = [scaler.get_scale, run.step, scaler.update, getattr(scaler, read)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, call in enumerate([*calls, scaler.get_scale, scaler.state_dict]):
            call()
            assert len(caught) == (number >= 3)
    assert caught[0].filename == __file__ and "scale" in str(caught[0].message)


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_float16_gradients_when_allowed_and_complex_ones(
    optimizer: str, dtype: torch.dtype, torch_fails: Any
) -> None:
    gradients = [torch.tensor([8.0 - 2.0j, 1j]), floats(4.0)]
    if dtype is torch.float16:
        gradients[0] = floats(8.0, -2.0, dtype=dtype)
    theirs = setup(TorchScaler, optimizer, gradients, 4.0)
    torch_fails(f"{dtype} gradients of a plain optimizer", outcome(theirs.step).error is not None)
    ours = setup(GradScaler, optimizer, gradients, 4.0, allow_fp16=True)
    ours.step()
    expected = setup(TorchScaler, optimizer, [g / 4 for g in gradients])
    expected.optimizer.step()
    assert_same(ours.values(), expected.values())
    ours.scaler.update()
    ours.parameters[0].grad[1] = NAN
    ours.step()
    assert len(ours.calls) == 1


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


# Fused steps that raise, and those that the host waits for


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
    ours, theirs = both(Fails, [floats(8.0)], 2.0)
    for run in (ours, theirs):
        if explicit:
            run.scaler.unscale_(run.optimizer)
        if own is not None:
            run.optimizer.grad_scale = torch.tensor(own)
        with pytest.raises(MemoryError, match="no room"):
            run.step()
    assert not {"grad_scale", "found_inf"} & set(vars(ours.optimizer))
    stage = OptState.UNSCALED if explicit else OptState.READY
    assert ours.scaler._per_optimizer_states[id(ours.optimizer)]["stage"] is stage
    ours.step()
    theirs.step()
    expected = 1 - 0.5 * 8.0 / 2.0
    assert ours.parameters[0].item() == expected
    torch_fails("a fused step that raised once", theirs.parameters[0].item() != expected)


def test_a_spike_is_skipped_that_a_fused_step_raised_over() -> None:
    ours, _ = both(Fails, [floats(8.0)], 2.0)
    ours.scaler.skip_above = 3.0
    with pytest.raises(MemoryError, match="no room"):
        ours.scaler.step(ours.optimizer)
    ours.scaler.step(ours.optimizer)
    assert ours.scaler.skip_reason(ours.optimizer) == "spike"
    ours.scaler.update()
    assert (ours.parameters[0].item(), ours.scaler.stats().spikes) == (1.0, 1)


@pytest.mark.parametrize("way", ["step", "own scale", "step_and_update", "defer"])
def test_a_fused_step_interrupted_after_its_kernel(way: str, torch_fails: Any) -> None:
    """If it is repeated it is skipped, since the kernel has divided the gradients."""

    def fail(*_: Any) -> None:
        hook.remove()
        raise KeyboardInterrupt

    sides = both("fused_sgd", [floats(8.0)], 2.0)
    for run in sides:
        if way == "own scale":
            run.optimizer.grad_scale = torch.tensor(1.0)
        if way == "defer" and run is sides[0]:
            run.scaler.clip_grad_norm_(run.optimizer, 1e3, in_place=False)
        hook = run.optimizer.register_step_post_hook(fail)
        together = way == "step_and_update" and run is sides[0]
        step = run.scaler.step_and_update if together else run.scaler.step
        with pytest.raises(KeyboardInterrupt):
            step(run.optimizer)
        run.scaler.step(run.optimizer)
        run.scaler.update()
    (ours,), (theirs,) = (run.parameters for run in sides)
    assert (ours.item(), ours.grad.item()) == (1 - 0.5 * 4.0, 4.0)
    torch_fails("a fused step repeated after its kernel", theirs.grad.item() != 4.0)


def fused_sgd(**options: Any) -> Callable[..., torch.optim.SGD]:
    return lambda params: torch.optim.SGD(params, lr=0.5, fused=True, **options)


MOMENTA = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.5, "dampening": 0.1, "weight_decay": 0.1},
    {"momentum": 0.9, "maximize": True},
]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("options", MOMENTA, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_fused_sgd_overflows_on_its_first_step(
    options: dict[str, Any], explicit: bool, torch_fails: Any
) -> None:
    def run(scaler_type: type, make: Callable[..., Any]) -> Setup:
        result = setup(scaler_type, make, [floats(1.0, 2.0), floats(3.0)], 4.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(result.optimizer, 0.5)
        for step in range(6):
            for p in result.parameters:
                p.grad = torch.full_like(p, 4.0 * step if step else 0.0)
            if step in (0, 1, 3):
                result.parameters[1].grad.fill_(INF)
            if explicit:
                result.scaler.unscale_(result.optimizer)
            result.step()
            result.scaler.update()
            with warnings.catch_warnings():
                # The state correctly says that no step was taken yet.
                warnings.simplefilter("ignore", UserWarning)
                schedule.step()
        return result

    ours = run(GradScaler, fused_sgd(**options))
    plain = run(TorchScaler, lambda p: torch.optim.SGD(p, lr=0.5, foreach=False, **options))
    torch.testing.assert_close(ours.values(), plain.values(), rtol=1e-6, atol=1e-6)
    assert ours.scaler.get_scale() == plain.scaler.get_scale()
    theirs = run(TorchScaler, fused_sgd(**options))
    torch_fails("fused SGD with momentum, overflow on the first step", not theirs.finite())


@pytest.mark.usefixtures("poisoned")
def test_only_groups_with_momentum_and_no_buffer_are_held_back() -> None:
    def make(params: list[Any]) -> torch.optim.Optimizer:
        groups = [{"params": params[:1], "momentum": 0.0}, {"params": params[1:]}]
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9, fused=True)

    run = setup(GradScaler, make, [floats(INF), floats(1.0)])
    assert run.step() is None
    assert not run.calls, "the step must not be called at all"
    assert run.scaler._per_optimizer_states[id(run.optimizer)]["stage"] is OptState.STEPPED
    assert not any("momentum_buffer" in s for s in run.optimizer.state.values())
    run.scaler.update()
    assert run.scaler.get_scale() == 2.0**15

    # A group with momentum but without gradients lacks nothing, nor one that has its buffer.
    for count, first, second in ((1, INF, None), (2, 1.0, 2.0), (3, 1.0, INF)):
        for param, value in zip(run.parameters, (first, second), strict=True):
            param.grad = None if value is None else floats(value)
        assert host_reads(run.step) == (count == 2)
        run.scaler.update()
        assert len(run.calls) == count and run.finite()
