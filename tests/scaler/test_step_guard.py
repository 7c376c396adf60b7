"""A scaler whose scale is always 1: gradients are only read, and bad steps skipped."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support.comparison import assert_same, started
from support.gradients import plant
from support.launchers import ReferenceLauncher
from support.steps import adamw, side, take_step
from torch import nn

import ampfast

STEPS = 8
BAD = {2: math.inf, 5: math.nan}
EMPTY = (0, 3)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": adamw,
    "fused": partial(adamw, fused=True),
    "fused momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}
# Of `take_step`.
UNCLIPPED = ("step", "together", "unscale")
CLIP = "clip"


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("way", [*UNCLIPPED, CLIP])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_those_without_a_scaler(
    dtype: torch.dtype, name: str, way: str, on_device: bool, request: pytest.FixtureRequest
) -> None:
    """But for bad ones, which are left out there; no loss is scaled, and some have no gradients."""
    if on_device:
        request.getfixturevalue("launcher")
    ours = side(ampfast.StepGuard, OPTIMIZERS[name], dtype=dtype)
    theirs = side(ampfast.GradScaler, OPTIMIZERS[name], dtype=dtype, enabled=False)
    guard: Any = ours.scaler
    called: set[int] = set()
    ours.optimizer.register_step_post_hook(lambda *_: called.add(seed))
    for seed in range(STEPS):
        for each in (ours, theirs):
            each.optimizer.zero_grad()
            if seed not in EMPTY:
                each.loss(seed).backward()
        if seed in BAD:
            plant(ours.model[0].weight.grad, "middle", BAD[seed])
        before = copy.deepcopy([param.grad for param in ours.model.parameters()])
        take_step(guard, ours.optimizer, way=way)
        assert guard.step_skipped(ours.optimizer) is (seed in BAD)
        if seed not in BAD:
            if way == CLIP:
                started(ampfast.GradScaler, 1.0).clip_grad_norm_(theirs.optimizer, 0.5)
            theirs.optimizer.step()
        elif way != CLIP:
            assert_same([param.grad for param in ours.model.parameters()], before)
        assert_same(*([*each.model.parameters()] for each in (ours, theirs)))
    assert called >= {*range(STEPS)} - {*BAD}
    stats = guard.stats()
    assert (stats.steps, stats.skipped, stats.scale) == (STEPS, len(BAD), 1.0)
    assert "log2_scale" not in ampfast.report.figures(guard)


@contextmanager
def only_read(model: nn.Module, launcher: ReferenceLauncher) -> Iterator[None]:
    """Asserts that a block reads the gradients once and writes nothing."""
    grads = [(p.grad, p.grad._version, p.grad.clone()) for p in model.parameters()]
    launcher.launches.clear()
    launcher.read = launcher.written = 0
    yield
    assert launcher.read == sum(grad.nbytes for grad, *_ in grads)
    assert launcher.written == 0
    for grad, version, values in grads:
        assert grad._version == version
        assert_same(grad, values)


@pytest.mark.parametrize("way", UNCLIPPED)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_read_once_and_never_written(
    name: str, way: str, launcher: ReferenceLauncher
) -> None:
    one, given = side(ampfast.StepGuard, OPTIMIZERS[name]), []
    hook = lambda each, *_: given.append(vars(each).get("grad_scale"))  # noqa: E731
    one.optimizer.register_step_pre_hook(hook)
    for seed in range(2):
        one.backward(seed)
        with only_read(one.model, launcher):
            take_step(one.scaler, one.optimizer, way=way)
        expected = ["check"] if way == "together" else ["check", "update"]
        assert launcher.launches == expected
    assert given == [None, None]


@pytest.mark.parametrize("track", [None, "overflow"])
def test_a_loss_is_returned_as_it_is(track: str | None) -> None:
    loss = torch.ones((), dtype=torch.bfloat16)
    for first in (loss, [loss, (loss,)], nn.Parameter(loss)):
        guard = ampfast.StepGuard("cpu", track=track)
        assert guard.scale(first) is first
        assert guard.get_scale() == 1.0
    assert started(ampfast.GradScaler, 1.0, dynamic=False).scale(loss) is loss
    disabled = ampfast.StepGuard("cpu", enabled=False)
    assert disabled.scale(loss) is loss
    assert disabled.get_scale() == 1.0


class Hooked(ampfast.StepGuard):
    def _check_scale_growth_tracker(self, name: str) -> Any:
        return super()._check_scale_growth_tracker(name)


def again(guard: Any) -> Any:
    """A guard from pickles of one that loads its own checkpoint."""
    guard.load_state_dict(guard.state_dict())
    return copy.deepcopy(pickle.loads(pickle.dumps(guard)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["norm", *UNCLIPPED, CLIP])
def test_it_needs_neither_cuda_nor_a_device_nor_scale(way: str, fused: bool) -> None:
    """Its state is made where the first gradients are."""
    made = [ampfast.StepGuard(), ampfast.StepGuard("cuda"), Hooked(), again(ampfast.StepGuard())]
    for guard in (*made, ampfast.GradScaler("cpu", 1.0, dynamic=False)):
        first = "cpu" if fused else "meta"
        params = [nn.Parameter(torch.ones(2, device=each)) for each in (first, "cpu")]
        optimizer: Any = torch.optim.SGD(params, lr=0.1, fused=fused)
        assert guard.is_enabled() and guard.get_scale() == 1.0
        with pytest.raises(AssertionError, match="No inf checks were recorded prior"):
            guard.update()
        with pytest.raises(AttributeError, match="param_groups"):
            guard.step(params)
        assert guard._scale is None and guard.stats().steps == 0, "nothing is known yet"
        params[1].grad = torch.tensor([1.0, math.nan])
        norm = take_step(guard, optimizer, way=way)
        assert norm is None or norm.isnan()
        assert guard.skip_reason(optimizer) == "nonfinite"
        assert guard._scale.device.type == "cpu" and params[1].tolist() == [1.0, 1.0]


def test_the_scale_stays_1() -> None:
    guard, other = ampfast.StepGuard("cpu"), started(ampfast.GradScaler, dynamic=False)
    dynamic = ampfast.GradScaler("cpu", init_scale=1.0)
    before = guard.state_dict()
    for call, value, text in (
        (guard.update, 2.0, "this scaler's scale is always 1, got"),
        (guard.update, torch.tensor(1.0), "this scaler's scale is always 1, got"),
        (guard.set_backoff_factor, 0.5, "never changes: it takes no backoff_factor"),
        (guard.set_growth_interval, 1, "never changes: it takes no growth_interval"),
        (guard.load_state_dict, other.state_dict(), r"of a scaler whose scale is 8\.0: load"),
        (guard.load_state_dict, dynamic.state_dict(), r"of a scaler whose scale is 1\.0 and chang"),
    ):
        with pytest.raises(ValueError, match=text):
            call(value)
    assert guard.state_dict() == before
    guard.load_state_dict(before)
    ampfast.StepGuard("cpu", enabled=False).set_growth_interval(1)
    for name in ("init_scale", "min_scale", "growth_interval", "backoff_factor"):
        with pytest.raises(TypeError, match=f"StepGuard.* unexpected keyword argument '{name}'"):
            ampfast.StepGuard("cpu", **{name: 2})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_norm_that_clips_nothing_is_only_read(name: str, launcher: ReferenceLauncher) -> None:
    one = side(ampfast.StepGuard, OPTIMIZERS[name])
    guard: Any = one.scaler
    for factor, reason in ((1.0, None), (1e6, "spike"), (math.inf, "nonfinite")):
        one.backward(0)
        for param in one.model.parameters():
            param.grad = param.grad * factor
        with only_read(one.model, launcher):
            guard.clip_grad_norm_(one.optimizer, math.inf, skip_above=100.0)
        take_step(guard, one.optimizer)
        assert guard.skip_reason(one.optimizer) == reason


@pytest.mark.parametrize("options", [{}, {"track": "norms"}, {"skip_above": 1.0}], ids=str)
@pytest.mark.parametrize("way", ["step", "unscale", CLIP])
def test_float16_gradients_are_refused_with_every_option(options: Any, way: str) -> None:
    """Also where they are not written."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    param.grad, optimizer = torch.ones_like(param), torch.optim.SGD([param], lr=0.1)
    for allow in (False, True):
        guard = ampfast.StepGuard("cpu", allow_fp16=allow, **options)
        guard.scale(torch.ones(()))
        text = "Attempting to unscale FP16 gradients"
        with nullcontext() if allow else pytest.raises(ValueError, match=text) as error:
            take_step(guard, optimizer, way=way)
        if error is not None:
            assert "allow_fp16=True" in error.value.__notes__[-1].partition("StepGuard")[0]
