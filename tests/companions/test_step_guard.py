"""A scaler whose scale is always 1: gradients are only read, and bad steps skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.launchers import ReferenceLauncher
from torch import Tensor, nn

import ampfast

STEPS = 7
BAD = {2: math.inf, 4: math.nan}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "fused momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}

Guarded = Callable[[Any, Any], None]


def stepped(guard: Any, optimizer: Any) -> None:
    guard.step(optimizer)
    guard.update()


def stepped_and_updated(guard: Any, optimizer: Any) -> None:
    guard.step_and_update(optimizer)


def unscaled_before(guard: Any, optimizer: Any) -> None:
    guard.unscale_(optimizer)
    stepped(guard, optimizer)


def clipped(guard: Any, optimizer: Any) -> None:
    guard.clip_grad_norm_(optimizer, 0.5)
    stepped(guard, optimizer)


WAYS: dict[str, Guarded] = {
    each.__name__: each for each in (stepped, stepped_and_updated, unscaled_before, clipped)
}


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [param.detach() for param in model.parameters()]


def backward(model: nn.Module, seed: int, scale: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    loss = model(torch.randn(4, 8, generator=generator).to(dtype)).float().square().mean()
    scale(loss).backward()
    if seed in BAD:
        next(model.parameters()).grad.view(-1)[3] = BAD[seed]


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_those_without_a_scaler(
    dtype: torch.dtype, name: str, way: str, on_device: bool, request: pytest.FixtureRequest
) -> None:
    """But for bad ones, which are left out there."""
    if on_device:
        request.getfixturevalue("launcher")
    ours, theirs = model_of(dtype), model_of(dtype)
    optimizer, plain = (OPTIMIZERS[name](m.parameters()) for m in (ours, theirs))
    guard = ampfast.StepGuard("cpu")
    for seed in range(STEPS):
        backward(ours, seed, guard.scale)
        grads = [p.grad.clone() for p in ours.parameters()]
        WAYS[way](guard, optimizer)
        assert guard.step_skipped(optimizer) is (seed in BAD)
        if seed not in BAD:
            backward(theirs, seed)
            if way == "clipped":
                clipping = ampfast.GradScaler("cpu", init_scale=1.0)
                clipping.scale(torch.ones(()))
                clipping.clip_grad_norm_(plain, 0.5)
            plain.step()
        elif way != "clipped":
            assert_same([p.grad for p in ours.parameters()], grads)
        assert_same(weights_of(ours), weights_of(theirs), str(seed))
    stats = guard.stats()
    assert (stats.steps, stats.skipped, stats.scale) == (STEPS, len(BAD), 1.0)


@pytest.mark.parametrize("way", ["stepped", "stepped_and_updated", "unscaled_before"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_read_once_and_never_written(
    name: str, way: str, launcher: ReferenceLauncher
) -> None:
    model, guard = model_of(torch.float32), ampfast.StepGuard("cpu")
    optimizer: Any = OPTIMIZERS[name](model.parameters())
    given = []
    optimizer.register_step_pre_hook(lambda each, *_: given.append(vars(each).get("grad_scale")))
    for seed in range(2):
        backward(model, seed, guard.scale)
        grads = [(p.grad, p.grad._version, p.grad.clone()) for p in model.parameters()]
        launcher.launches.clear()
        launcher.read = launcher.written = 0
        WAYS[way](guard, optimizer)
        expected = ["check"] if way == "stepped_and_updated" else ["check", "update"]
        assert launcher.launches == expected
        assert launcher.read == sum(grad.nbytes for grad, *_ in grads)
        assert launcher.written == 0
        for grad, version, values in grads:
            assert grad._version == version
            assert_same(grad, values)
    assert given == [None, None]


@pytest.mark.parametrize("track", [None, "overflow"])
def test_a_loss_is_returned_as_it_is(track: str | None) -> None:
    loss = torch.ones((), dtype=torch.bfloat16)
    for first in (loss, [loss, (loss,)], nn.Parameter(loss)):
        guard = ampfast.StepGuard("cpu", track=track)
        given = guard.scale(first)
        assert given is first or (type(given) is list and given == first and given[0] is loss)
        assert guard.scale(loss) is loss
        assert [each is loss for each in guard.scale(iter([loss, loss]))] == [True, True]
        assert guard.get_scale() == 1.0
        assert guard._scale is not None
    for wrong in (1.0, [loss, None]):
        with pytest.raises(ValueError, match="must be a Tensor or an iterable of Tensors"):
            guard.scale(wrong)
    plain = ampfast.GradScaler("cpu", init_scale=1.0, dynamic=False)
    plain.scale(loss)
    assert plain.scale(loss) is loss
    disabled = ampfast.StepGuard("cpu", enabled=False)
    assert disabled.scale(loss) is loss
    assert disabled.get_scale() == 1.0


def test_the_scale_stays_1() -> None:
    guard = ampfast.StepGuard("cpu")
    guard.scale(torch.ones(()))
    for value in (2.0, torch.tensor(1.0)):
        with pytest.raises(ValueError, match="this scaler's scale is always 1, got"):
            guard.update(value)
    with pytest.raises(ValueError, match="never changes: it takes no backoff_factor"):
        guard.set_backoff_factor(0.5)
    with pytest.raises(ValueError, match="never changes: it takes no growth_interval"):
        guard.set_growth_interval(1)
    ampfast.StepGuard("cpu", enabled=False).set_growth_interval(1)
    other = ampfast.GradScaler("cpu", init_scale=8.0, dynamic=False)
    other.scale(torch.ones(()))
    before = guard.state_dict()
    with pytest.raises(ValueError, match=r"always 1, but the checkpoint's is 8\.0"):
        guard.load_state_dict(other.state_dict())
    dynamic = ampfast.GradScaler("cpu", init_scale=1.0)
    with pytest.raises(ValueError, match="made with dynamic=False, but"):
        guard.load_state_dict(dynamic.state_dict())
    assert guard.state_dict() == before
    guard.load_state_dict(before)
    for name in ("init_scale", "min_scale", "growth_interval", "backoff_factor"):
        with pytest.raises(TypeError, match=f"StepGuard.* unexpected keyword argument '{name}'"):
            ampfast.StepGuard("cpu", **{name: 2})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_norm_that_clips_nothing_is_only_read(name: str, launcher: ReferenceLauncher) -> None:
    model, guard = model_of(torch.float32), ampfast.StepGuard("cpu")
    optimizer = OPTIMIZERS[name](model.parameters())
    for factor, reason in ((1.0, None), (1e6, "spike"), (math.inf, "overflow")):
        backward(model, 0, guard.scale)
        for param in model.parameters():
            param.grad = param.grad * factor
        before = [(p.grad, p.grad._version, p.grad.clone()) for p in model.parameters()]
        launcher.written = launcher.read = 0
        guard.clip_grad_norm_(optimizer, math.inf, skip_above=100.0)
        assert launcher.written == 0
        assert launcher.read == sum(grad.nbytes for grad, *_ in before)
        for grad, version, values in before:
            assert grad._version == version
            assert_same(grad, values)
        stepped(guard, optimizer)
        assert guard.skip_reason(optimizer) == reason


@pytest.mark.parametrize("options", [{}, {"track": "norms"}, {"skip_above": 1.0}], ids=str)
@pytest.mark.parametrize("call", ["step", "unscale_", "clip"])
def test_float16_gradients_are_refused_with_every_option(options: Any, call: str) -> None:
    """Also where they are not written."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    param.grad, optimizer = torch.ones_like(param), torch.optim.SGD([param], lr=0.1)
    for allow in (False, True):
        guard = ampfast.StepGuard("cpu", allow_fp16=allow, **options)
        guard.scale(torch.ones(()))
        given = (optimizer, math.inf) if call == "clip" else (optimizer,)
        method = getattr(guard, "clip_grad_norm_" if call == "clip" else call)
        if allow:
            method(*given)
            continue
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            method(*given)
