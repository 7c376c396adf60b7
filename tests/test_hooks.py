"""Subclasses, instances and optimizers with overridden methods, as in projects around torch."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gradients import parameter_with, sgd_with
from support.outcomes import agree
from support.scalers import Scaler, TorchScaler, started
from support.twins import side

from ampfast import GradScaler
from ampfast.backends.core import overrides
from ampfast.hooks import replace_method

CPU = torch.device("cpu")
HOOKS = [
    "_unscale_grads_",
    "_maybe_opt_step",
    "_check_inf_per_device",
    "_found_inf_per_device",
    "_check_scale_growth_tracker",
    "_lazy_init_scale_growth_tracker",
    "_get_scale_async",
    "_get_growth_tracker",
    "get_scale",
    "scale",
    "unscale_",
    "step",
    "update",
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
        if at_once and isinstance(one.scaler, GradScaler):
            one.scaler.step_and_update(one.optimizer)
            continue
        if seed % 2 and not at_once:
            one.scaler.unscale_(one.optimizer)
        one.scaler.step(one.optimizer)
        one.scaler.update()
    return one.observe()


def kind_of(argument: Any) -> Any:
    if isinstance(argument, (bool, str)):
        return argument
    return "dict" if isinstance(argument, dict) else type(argument).__name__


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "fused_adam"])
@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_called_as_often_as_torch_calls_it(name: str, where: str, optimizer: str) -> None:
    def use(scaler_type: Scaler) -> Any:
        calls: list[Any] = []

        def recording(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [a.detach().clone() for a in args if isinstance(a, torch.Tensor)]
            # The bits identify a loss; other calls are shown with inv_scale and found_inf.
            calls.append([[kind_of(a) for a in args], sorted(kwargs), tensors])
            return original(self, *args, **kwargs)

        return [run(replaced(scaler_type, where, name, recording), optimizer), calls]

    _, calls = agree(use).value
    if name not in ("_found_inf_per_device", "_get_growth_tracker", "get_scale"):
        unused = {"_check_inf_per_device"} if optimizer != "fused_adam" else {"_maybe_opt_step"}
        assert calls or name in unused


def _flags_of(value: float) -> Hook:
    def flags(original: Hook, *args: Any) -> dict[torch.device, torch.Tensor]:
        original(*args)
        return {CPU: torch.full((), value)}

    return flags


def _reduced(original: Hook, *args: Any) -> Any:
    # FSDP's and hivemind's scalers agree on the flags right after the check.
    found = original(*args)
    for flag in found.values():
        flag.fill_(1.0)
    return found


def _keyed_by_text(original: Hook, *args: Any) -> Any:
    return {str(device): flag for device, flag in original(*args).items()}


def _allows_half(original: Hook, *args: Any) -> Any:
    # torch.distributed.fsdp and several research codes pass True to accept fp16 gradients.
    return original(*args[:-1], True)


def _by_hand(
    original: Hook, self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow: bool
) -> Any:
    for p in parameters(optimizer):
        if not torch.isfinite(p.grad).all():
            found_inf.fill_(1.0)
        p.grad.mul_(inv_scale)
    return {found_inf.device: found_inf}


def _always_steps(original: Hook, self: Any, optimizer: Any, state: Any, *args: Any) -> Any:
    return optimizer.step(*args)


def _quarter(original: Hook, self: Any) -> torch.Tensor | None:
    value = original(self)
    return None if value is None else value * 4


def _no_growth(original: Hook, self: Any, *new_scale: Any) -> None:
    before = self.get_scale()
    original(self, *new_scale)
    if self.get_scale() > before:
        self._scale.fill_(before)


def _half_start(original: Hook, self: Any, dev: Any) -> None:
    original(self, dev)
    self._scale.mul_(0.5)
    self._growth_tracker.fill_(1)


def _own_unscale(original: Hook, self: Any, optimizer: Any) -> None:
    # Unscales and writes the record itself, without the original.
    for p in parameters(optimizer):
        p.grad.div_(self._scale)
    finite = all(torch.isfinite(p.grad).all() for p in parameters(optimizer))
    state = self._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {CPU: torch.tensor(0.0 if finite else 1.0)}
    state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise ArithmeticError("the hook was reached")


def parameters(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


BEHAVIOURS: dict[str, tuple[str, Hook]] = {
    "flags always 1": ("_unscale_grads_", _flags_of(1.0)),
    "flags always 0": ("_unscale_grads_", _flags_of(0.0)),
    "flags reduced": ("_unscale_grads_", _reduced),
    "flags keyed by text": ("_unscale_grads_", _keyed_by_text),
    "no flags": ("_unscale_grads_", lambda *args, **kwargs: {}),
    "fp16 allowed": ("_unscale_grads_", _allows_half),
    "unscaled by hand": ("_unscale_grads_", _by_hand),
    "always steps": ("_maybe_opt_step", _always_steps),
    "never steps": ("_maybe_opt_step", lambda *args, **kwargs: None),
    "another scale": ("_get_scale_async", _quarter),
    "update undone": ("update", _no_growth),
    "another start": ("_lazy_init_scale_growth_tracker", _half_start),
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


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "fused_adam"])
def test_check_replaced_for_optimizers_that_read_the_scale(optimizer: str, value: float) -> None:
    def check(original: Hook, self: Any, optimizer: Any) -> Any:
        flags = {CPU: torch.full((), value)}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    agree(lambda kind: run(replaced(kind, "class", "_check_inf_per_device", check), optimizer))


@pytest.mark.parametrize("attribute", ["_scale", "_growth_tracker", "_per_optimizer_states"])
def test_attributes_may_become_properties(attribute: str) -> None:
    """A subclass may store these elsewhere, as wrappers around several scalers do."""

    def use(scaler_type: Scaler) -> Any:
        store: dict[str, Any] = {}
        place = property(lambda _: store["kept"], lambda _, value: store.update(kept=value))
        return run(type("Scaler", (scaler_type,), {attribute: place}), "adam")

    agree(use)


class Returning(torch.optim.SGD):
    def step(self, closure: Any = None, factor: float = 1.0) -> list[Any]:
        super().step()
        return [closure() if closure else None, factor]


def test_arguments_and_results_pass_through_step() -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, lambda params: Returning(params, lr=0.1), init_scale=8.0)
        results = []
        for arguments, keywords in [((), {}), ((None,), {}), ((lambda: 7,), {"factor": 2.0})]:
            one.scaler.scale(one.loss(0)).backward()
            results.append(one.scaler.step(one.optimizer, *arguments, **keywords))
            one.scaler.update()
        return [results, one.observe()]

    assert agree(use).value[0] == [[None, 1.0], [None, 1.0], [7, 2.0]]


@pytest.mark.parametrize("optimizer", ["sgd", "fused_adam"])
def test_a_subclass_may_set_the_attributes_by_itself(optimizer: str) -> None:
    """Some wrap another scaler and set the attributes without torch's constructor."""

    def use(scaler_type: Scaler) -> Any:
        class Filled(scaler_type):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.__dict__.update(vars(TorchScaler(*args, **kwargs)))

        return run(Filled, optimizer)

    agree(use)


def test_a_scale_that_is_nowhere_is_an_error() -> None:
    def use(scaler_type: Scaler) -> None:
        one = side(scaler_type, "fused_adam")
        one.scaler.scale(torch.ones(()))
        one.scaler._get_scale_async = lambda: None
        one.scaler.step(one.optimizer)

    assert isinstance(agree(use).error, AssertionError)


class Told(torch.optim.SGD):
    def step(self) -> Any:
        return self.found_inf


def test_an_override_without_a_check_gives_torchs_result() -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, lambda params: Told(params, lr=0.1, momentum=0.9, fused=True))
        one.scaler._check_inf_per_device = lambda optimizer: {}
        one.scaler.scale(one.loss(0)).backward()
        return one.scaler.step(one.optimizer)

    assert agree(use).value == 0


@pytest.mark.parametrize("optimizer", ["sgd", "fused_sgd"])
def test_only_update_uses_what_the_check_of_the_scale_returns(optimizer: str) -> None:
    def check(original: Hook, self: Any, name: str) -> Any:
        found = original(self, name)
        return found if name in ("update", "_check_inf_per_device") else None

    name = "_check_scale_growth_tracker"
    assert agree(lambda kind: run(replaced(kind, "class", name, check), optimizer)).error is None


def test_a_stage_of_its_own_is_not_past_its_turn() -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, init_scale=8.0)
        one.scaler.scale(one.loss(0)).backward()
        one.scaler._per_optimizer_states[id(one.optimizer)]["stage"] = None
        one.scaler.unscale_(one.optimizer)
        one.scaler.step(one.optimizer)
        return one.observe()

    assert agree(use).error is None


def test_a_new_scale_is_checked_once() -> None:
    def use(scaler_type: Scaler) -> Any:
        checks = []

        def check(original: Hook, self: Any, name: str) -> Any:
            checks.append(name)
            return original(self, name)

        scaler = replaced(scaler_type, "class", "_check_scale_growth_tracker", check)("cpu")
        scaler.scale(torch.ones(()))
        scaler.update(4.0)
        return checks

    assert agree(use).value == ["update"]


PATCHED_BEFORE = """
import torch
calls = []
for name in ("_check_scale_growth_tracker", "_get_scale_async"):
    def hook(self, *args, original=getattr(torch.amp.GradScaler, name), name=name):
        calls.append(name)
        return original(self, *args)
    setattr(torch.amp.GradScaler, name, hook)
import ampfast
seen = []
for kind in (torch.amp.GradScaler, ampfast.GradScaler):
    for fused in (False, True):
        calls.clear()
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
        scaler = kind("cpu")
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(list(calls))
assert seen[:2] == seen[2:] and all(seen), seen
"""


@pytest.mark.slow
def test_hooks_on_torchs_class_from_before_the_import() -> None:
    subprocess.run([sys.executable, "-c", PATCHED_BEFORE], check=True, timeout=120)


class Writing:
    """Optimizer that writes the flag it is given."""

    _step_supports_amp_scaling = True

    def __init__(self, param: torch.Tensor, value: float) -> None:
        self.param_groups = [{"params": [param]}]
        self.value = value
        self.found_inf = torch.zeros(())

    def step(self) -> None:
        self.found_inf.fill_(self.value)


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("gradient", [1.0, math.inf])
def test_a_flag_that_the_optimizer_writes_is_its_own(backend: str, gradient: float) -> None:
    def use(scaler_type: Scaler) -> Any:
        scaler = scaler_type("cpu", **({"backend": backend} if scaler_type is GradScaler else {}))
        param = parameter_with(torch.full((3,), gradient))
        scaler.scale(torch.ones(()))
        scaler.step(Writing(param, float(gradient == 1.0)))
        scaler.update()
        return scaler.get_scale()

    assert agree(use).error is None


@pytest.mark.parametrize("method", ["unscale_", "step", "grad_norm"])
def test_a_scale_that_nobody_made_is_an_error(method: str) -> None:
    def use(scaler_type: Scaler) -> None:
        class Unchecked(scaler_type):
            def _check_scale_growth_tracker(self, name: str) -> Any:
                return None

        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
        getattr(Unchecked("cpu"), method)(optimizer)

    if method == "grad_norm":  # ours alone
        with pytest.raises(AssertionError, match="_scale is None in grad_norm"):
            use(GradScaler)
    else:
        assert isinstance(agree(use).error, AssertionError)


class Calls(GradScaler):
    def _unscale_grads_(self, *args: Any) -> Any:
        return super()._unscale_grads_(*args)


@pytest.mark.parametrize("kind", [TorchScaler, GradScaler, Calls])
def test_an_entry_has_torchs_keys_alone(kind: Scaler) -> None:
    """Also behind an override, whose call is marked meanwhile."""
    scaler, optimizer = started(kind), sgd_with(torch.ones(2))
    scaler.unscale_(optimizer)
    assert set(scaler._per_optimizer_states[id(optimizer)]) == {"stage", "found_inf_per_device"}


@pytest.mark.parametrize("name", ["unscale_", "step", "update", "_maybe_opt_step"])
def test_a_method_that_is_watched_is_no_hook(name: str) -> None:
    original = vars(GradScaler)[name]
    replace_method(GradScaler, name, functools.wraps(original)(lambda *args: original(*args)))
    try:
        scaler = GradScaler("cpu")
        assert not any(overrides(scaler, methods) for methods in GradScaler._originals)
    finally:
        replace_method(GradScaler, name, original)
    assert not any(overrides(scaler, methods) for methods in GradScaler._originals)
