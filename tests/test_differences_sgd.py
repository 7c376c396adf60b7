"""Fused steps that the host waits for: the first of SGD with momentum, and watched ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gradients import parameter_with
from support.one_step import TAKE_GRAD_SCALE, Setup, floats, host_reads, setup
from support.scalers import TorchScaler

from ampfast import GradScaler

OptState = torch.amp.grad_scaler.OptState


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
                result.parameters[1].grad.fill_(math.inf)
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

    run = setup(GradScaler, make, [floats(math.inf), floats(1.0)])
    assert run.step() is None
    assert not run.calls, "the step must not be called at all"
    assert run.scaler._per_optimizer_states[id(run.optimizer)]["stage"] is OptState.STEPPED
    assert not any("momentum_buffer" in s for s in run.optimizer.state.values())
    run.scaler.update()
    assert run.scaler.get_scale() == 2.0**15

    # A group with momentum but without gradients lacks nothing.
    run.parameters[1].grad = None
    assert host_reads(run.step) == 0
    assert len(run.calls) == 1
    run.scaler.update()

    run.parameters[0].grad, run.parameters[1].grad = floats(1.0), floats(2.0)
    run.step()
    run.scaler.update()
    assert len(run.calls) == 2
    assert run.finite()
    # From now on no buffer is missing and the host reads nothing.
    run.parameters[1].grad.fill_(math.inf)
    assert host_reads(run.step) == 0
    assert len(run.calls) == 3
    assert run.finite()


def test_fused_sgd_that_lacks_one_buffer() -> None:
    run = setup(GradScaler, fused_sgd(momentum=0.9), [floats(1.0), floats(1.0)])
    run.parameters[1].grad = None
    run.step()
    run.scaler.update()
    run.parameters[1].grad = floats(math.nan)
    run.step()
    run.scaler.update()
    assert len(run.calls) == 1
    assert run.finite()
    # A group added later, as in fine-tuning schedules, is guarded in the same way.
    run.parameters[1].grad = None
    late = parameter_with(floats(math.inf))
    run.optimizer.add_param_group({"params": [late]})
    run.step()
    run.scaler.update()
    assert len(run.calls) == 1
    late.grad = floats(0.0)
    run.step()
    assert len(run.calls) == 2
    assert late.item() == 1.0


@pytest.mark.parametrize("bad", [1.0, math.inf])
@pytest.mark.parametrize("optimizer", TAKE_GRAD_SCALE)
def test_other_fused_optimizers_never_read_on_the_host(optimizer: str, bad: float) -> None:
    run = setup(GradScaler, optimizer, [floats(1.0), floats(bad)])
    for _ in range(3):
        assert host_reads(run.step) == 0
        assert host_reads(run.scaler.update) == 0
    assert len(run.calls) == 3
    assert run.untouched() == (bad == math.inf)
