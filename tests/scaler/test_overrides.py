"""Subclasses and instances with overridden methods, as in projects around torch."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import Scaler, agree
from support.steps import side, take_step

CPU = torch.device("cpu")
OptState = torch.amp.grad_scaler.OptState
HOOKS = [
    *("_unscale_grads_", "_maybe_opt_step", "_check_inf_per_device", "_found_inf_per_device"),
    *("_check_scale_growth_tracker", "_lazy_init_scale_growth_tracker", "_get_scale_async"),
    *("_get_growth_tracker", "get_scale", "scale", "unscale_", "step", "update"),
]


# Called with the original method, the scaler and what the method is given.
Hook = Callable[..., Any]


def replaced(scaler_type: Scaler, where: str, name: str, hook: Hook) -> Scaler:
    """Scaler type with method `name` replaced by `hook`, on the class or on instances."""
    original = getattr(scaler_type, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    if where == "class":
        return type("Scaler", (scaler_type,), {name: method})

    class Scaler(scaler_type):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            setattr(self, name, types.MethodType(method, self))

    return Scaler


def run(scaler_type: Scaler, optimizer: Any, at_once: bool = False, **arguments: Any) -> Any:
    """Takes five steps, one of which overflows and two of which unscale first.

    Or three `at_once`, which end in one call of ours and in two of torch's.
    """
    one = side(scaler_type, optimizer, init_scale=1024.0, growth_interval=2, **arguments)
    for seed, is_bad in enumerate([0, 1, 0] if at_once else [0, 0, 1, 0, 0]):
        one.optimizer.zero_grad()
        one.scaler.scale(one.loss(seed)).backward()
        if is_bad:
            next(one.model.parameters()).grad.view(-1)[3] = math.inf
        way = "together" if at_once else "unscale" if seed % 2 else "step"
        take_step(one.scaler, one.optimizer, way=way)
    return one.observe()


def kind_of(argument: Any) -> Any:
    if isinstance(argument, (bool, str)):
        return argument
    return "dict" if isinstance(argument, dict) else type(argument).__name__


def recording(calls: list[Any]) -> Hook:
    def hook(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [a.detach().clone() for a in args if isinstance(a, torch.Tensor)]
        # The bits identify a loss; other calls are shown with inv_scale and found_inf.
        calls.append([[kind_of(a) for a in args], sorted(kwargs), tensors])
        return original(self, *args, **kwargs)

    return hook


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "fused_adam"])
@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_called_as_often_as_torch_calls_it(name: str, where: str, optimizer: str) -> None:
    def use(scaler_type: Scaler) -> Any:
        calls: list[Any] = []
        return [run(replaced(scaler_type, where, name, recording(calls)), optimizer), calls]

    _, calls = agree(use).value
    if name not in ("_found_inf_per_device", "_get_growth_tracker", "get_scale"):
        unused = {"_check_inf_per_device"} if optimizer != "fused_adam" else {"_maybe_opt_step"}
        assert calls or name in unused


def _flags_of(value: float) -> Hook:
    def flags(original: Hook, self: Any, optimizer: Any, *args: Any) -> dict[Any, torch.Tensor]:
        original(self, optimizer, *args)
        flags = {CPU: torch.full((), value)}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    return flags


def _reduced(original: Hook, *args: Any) -> Any:
    # FSDP's and hivemind's scalers agree on the flags right after the check.
    found = original(*args)
    for flag in found.values():
        flag.fill_(1.0)
    return found


def _by_hand(
    original: Hook, self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow: bool
) -> Any:
    for p in optimizer.param_groups[0]["params"]:
        if not torch.isfinite(p.grad).all():
            found_inf.fill_(1.0)
        p.grad.mul_(inv_scale)
    return {found_inf.device: found_inf}


def _own_unscale(original: Hook, self: Any, optimizer: Any) -> None:
    # Unscales and writes the record itself, without the original.
    found = torch.zeros(())
    found_inf = _by_hand(original, self, optimizer, 1 / self._scale, found, False)
    state = self._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"], state["stage"] = found_inf, OptState.UNSCALED


def _used_by_update_alone(original: Hook, self: Any, name: str) -> Any:
    found = original(self, name)
    return found if name in ("update", "_check_inf_per_device") else None


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise ArithmeticError("the hook was reached")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


UNSCALE, CHECK = "_unscale_grads_", "_check_inf_per_device"
BEHAVIOURS: dict[str, tuple[str, Hook]] = {
    **{f"{hook}: flags 1": (hook, _flags_of(1.0)) for hook in (UNSCALE, CHECK)},
    **{f"{hook}: flags 0": (hook, _flags_of(0.0)) for hook in (UNSCALE, CHECK)},
    **{f"{hook}: no flags": (hook, lambda *args, **kwargs: {}) for hook in (UNSCALE, CHECK)},
    "flags reduced": (UNSCALE, _reduced),
    "flags keyed by text": (
        UNSCALE,
        lambda original, *args: {str(device): flag for device, flag in original(*args).items()},
    ),
    # torch.distributed.fsdp and several research codes pass True to accept fp16 gradients.
    "fp16 allowed": (UNSCALE, lambda original, *args: original(*args[:-1], True)),
    "unscaled by hand": (UNSCALE, _by_hand),
    "always steps": ("_maybe_opt_step", lambda _, self, it, state, *args: it.step(*args)),
    "never steps": ("_maybe_opt_step", _nothing),
    "another scale": ("_get_scale_async", lambda original, self: original(self) * 4),
    "no scale": ("_get_scale_async", _nothing),
    "no scale checked": ("_check_scale_growth_tracker", _used_by_update_alone),
    "unscale_ of its own": ("unscale_", _own_unscale),
    **{f"{hook} raises": (hook, _raises) for hook in HOOKS},
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "fused_adamw"])
@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_effects_of_hooks_count(behaviour: str, where: str, optimizer: str, at_once: bool) -> None:
    name, hook = BEHAVIOURS[behaviour]
    agree(lambda kind: run(replaced(kind, where, name, hook), optimizer, at_once))
