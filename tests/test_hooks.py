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
from support.outcomes import agree
from support.scalers import Scaler, TorchScaler
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


def replaced(scaler_type: Scaler, where: str, name: str, make: Callable[[Any], Any]) -> Scaler:
    """Scaler type with method `name` replaced by ``make(original)``, on the class or instances."""
    if where == "class":
        return type("Scaler", (scaler_type,), {name: make(getattr(scaler_type, name))})

    class Scaler(scaler_type):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            setattr(self, name, types.MethodType(make(getattr(scaler_type, name)), self))

    return Scaler


def run(scaler_type: Scaler, optimizer: str, **arguments: Any) -> Any:
    """Takes five steps, one of which overflows and two of which unscale first."""
    one = side(scaler_type, optimizer, init_scale=1024.0, growth_interval=2, **arguments)
    for seed, bad in enumerate([None, None, float("inf"), None, None]):
        one.optimizer.zero_grad()
        one.scaler.scale(one.loss(seed)).backward()
        if bad is not None:
            next(one.model.parameters()).grad.view(-1)[3] = bad
        if seed % 2:
            one.scaler.unscale_(one.optimizer)
        one.scaler.step(one.optimizer)
        one.scaler.update()
    return one.observe()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "fused_adam"])
@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_called_as_often_as_torch_calls_it(hook: str, where: str, optimizer: str) -> None:
    def use(scaler_type: Scaler) -> Any:
        calls: list[Any] = []

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
                shown = [
                    a
                    if isinstance(a, (bool, str))
                    else "dict"
                    if isinstance(a, dict)
                    else type(a).__name__
                    for a in args
                ]
                tensors = [a.detach().clone() for a in args if isinstance(a, torch.Tensor)]
                # The bits identify a loss; other calls are shown with inv_scale and found_inf.
                calls.append([shown, sorted(kwargs), tensors])
                return original(self, *args, **kwargs)

            return recording

        return [run(replaced(scaler_type, where, hook, make), optimizer), calls]

    _, calls = agree(use).value
    if hook not in ("_found_inf_per_device", "_get_growth_tracker", "get_scale"):
        unused = {"_check_inf_per_device"} if optimizer != "fused_adam" else {"_maybe_opt_step"}
        assert calls or hook in unused


def _flags_of(value: float) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def flags(self: Any, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
            original(self, *args, **kwargs)
            return {CPU: torch.full((), value)}

        return flags

    return make


def _reduced(original: Any) -> Any:
    # FSDP's and hivemind's scalers agree on the flags right after the check.
    def flags(self: Any, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = original(self, *args, **kwargs)
        for flag in found.values():
            flag.fill_(1.0)
        return found

    return flags


def _keyed_by_text(original: Any) -> Any:
    def flags(self: Any, *args: Any, **kwargs: Any) -> dict[Any, torch.Tensor]:
        return {str(device): flag for device, flag in original(self, *args, **kwargs).items()}

    return flags


def _nothing(original: Any) -> Any:
    return lambda self, *args, **kwargs: {}


def _allows_half(original: Any) -> Any:
    # torch.distributed.fsdp and several research codes pass True to accept fp16 gradients.
    def flags(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow: bool) -> Any:
        return original(self, optimizer, inv_scale, found_inf, True)

    return flags


def _by_hand(original: Any) -> Any:
    def flags(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow: bool) -> Any:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not torch.isfinite(p.grad).all():
                    found_inf.fill_(1.0)
                p.grad.mul_(inv_scale)
        return {found_inf.device: found_inf}

    return flags


def _always_steps(original: Any) -> Any:
    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    return step


def _never_steps(original: Any) -> Any:
    return lambda self, optimizer, state, *args, **kwargs: None


def _quarter(original: Any) -> Any:
    def scale(self: Any) -> torch.Tensor | None:
        value = original(self)
        return None if value is None else value * 4

    return scale


def _no_growth(original: Any) -> Any:
    def update(self: Any, new_scale: Any = None) -> None:
        before = self.get_scale()
        original(self, new_scale)
        if self.get_scale() > before:
            self._scale.fill_(before)

    return update


def _half_start(original: Any) -> Any:
    def start(self: Any, dev: Any) -> None:
        original(self, dev)
        self._scale.mul_(0.5)
        self._growth_tracker.fill_(1)

    return start


def _own_unscale(original: Any) -> Any:
    # Unscales and writes the record itself, without the original.
    def unscale_(self: Any, optimizer: Any) -> None:
        state = self._per_optimizer_states[id(optimizer)]
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.div_(self._scale)
        finite = all(
            torch.isfinite(p.grad).all() for g in optimizer.param_groups for p in g["params"]
        )
        state["found_inf_per_device"] = {CPU: torch.tensor(0.0 if finite else 1.0)}
        state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED

    return unscale_


def _raises(original: Any) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("the hook was reached")

    return hook


BEHAVIOURS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "flags always 1": ("_unscale_grads_", _flags_of(1.0)),
    "flags always 0": ("_unscale_grads_", _flags_of(0.0)),
    "flags reduced": ("_unscale_grads_", _reduced),
    "flags keyed by text": ("_unscale_grads_", _keyed_by_text),
    "no flags": ("_unscale_grads_", _nothing),
    "fp16 allowed": ("_unscale_grads_", _allows_half),
    "unscaled by hand": ("_unscale_grads_", _by_hand),
    "always steps": ("_maybe_opt_step", _always_steps),
    "never steps": ("_maybe_opt_step", _never_steps),
    "another scale": ("_get_scale_async", _quarter),
    "update undone": ("update", _no_growth),
    "another start": ("_lazy_init_scale_growth_tracker", _half_start),
    "unscale_ of its own": ("unscale_", _own_unscale),
    **{f"{hook} raises": (hook, _raises) for hook in HOOKS},
}


@pytest.mark.parametrize("optimizer", ["sgd", "fused_adamw"])
@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_effects_of_hooks_count(behaviour: str, where: str, optimizer: str) -> None:
    hook, make = BEHAVIOURS[behaviour]

    def use(scaler_type: Scaler) -> Any:
        return run(replaced(scaler_type, where, hook, make), optimizer)

    agree(use)


def stepped_at_once(scaler_type: Scaler, optimizer: str) -> Any:
    """Three iterations that end in one call of ours, and in two of torch's."""
    one = side(scaler_type, optimizer, init_scale=1024.0, growth_interval=2)
    for seed, bad in enumerate([1.0, float("inf"), 1.0]):
        one.optimizer.zero_grad()
        one.scaler.scale(one.loss(seed)).backward()
        next(one.model.parameters()).grad.view(-1)[3] *= bad
        if isinstance(one.scaler, GradScaler):
            one.scaler.step_and_update(one.optimizer)
        else:
            one.scaler.step(one.optimizer)
            one.scaler.update()
    return one.observe()


@pytest.mark.parametrize("optimizer", ["sgd", "fused_adamw"])
@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_effects_of_hooks_count_in_step_and_update(
    behaviour: str, where: str, optimizer: str
) -> None:
    hook, make = BEHAVIOURS[behaviour]
    agree(lambda kind: stepped_at_once(replaced(kind, where, hook, make), optimizer))


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "fused_adam"])
def test_check_replaced_for_optimizers_that_read_the_scale(optimizer: str, value: float) -> None:
    def make(original: Any) -> Any:
        def check(self: Any, optimizer: Any) -> Any:
            flags = {CPU: torch.full((), value)}
            self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
            return flags

        return check

    def use(scaler_type: Scaler) -> Any:
        return run(replaced(scaler_type, "class", "_check_inf_per_device", make), optimizer)

    agree(use)


@pytest.mark.parametrize("attribute", ["_scale", "_growth_tracker", "_per_optimizer_states"])
def test_attributes_may_become_properties(attribute: str) -> None:
    """A subclass may store these elsewhere, as wrappers around several scalers do."""

    def use(scaler_type: Scaler) -> Any:
        store: dict[str, Any] = {}
        place = property(
            lambda self: store[attribute], lambda self, value: store.update({attribute: value})
        )
        return run(type("Scaler", (scaler_type,), {attribute: place}), "adam")

    agree(use)


def test_arguments_and_results_pass_through_step() -> None:
    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None, factor: float = 1.0) -> list[Any]:
            super().step()
            return [closure() if closure else None, factor]

    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, lambda params: Optimizer(params, lr=0.1), init_scale=8.0)
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


def test_an_override_without_a_check_gives_torchs_result() -> None:
    given = []

    class Told(torch.optim.SGD):
        def step(self) -> None:
            given.append(self.found_inf)

    for scaler_type in (GradScaler, TorchScaler):
        one = side(scaler_type, lambda params: Told(params, lr=0.1, momentum=0.9, fused=True))
        one.scaler._check_inf_per_device = lambda optimizer: {}
        one.scaler.scale(one.loss(0)).backward()
        one.scaler.step(one.optimizer)
    assert given == [0, 0]


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_only_update_uses_what_the_check_of_the_scale_returns(optimizer: str) -> None:
    values = []
    for base in (TorchScaler, GradScaler):

        class Checked(base):  # type: ignore[misc, valid-type]
            def _check_scale_growth_tracker(self, name: str) -> Any:
                found = super()._check_scale_growth_tracker(name)
                return found if name in ("update", "_check_inf_per_device") else None

        scaler, param = Checked("cpu", init_scale=8.0), torch.nn.Parameter(torch.ones(3))
        kind = torch.optim.SGD([param], lr=1.0, fused=optimizer == "fused")
        scaler.scale(param.sum()).backward()
        scaler.unscale_(kind)
        scaler.step(kind)
        scaler.update()
        values.append((param.tolist(), scaler.state_dict()))
    assert values[0] == values[1]


def test_a_stage_of_its_own_is_not_past_its_turn() -> None:
    values = []
    for kind in (TorchScaler, GradScaler):
        scaler, param = kind("cpu", init_scale=8.0), torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler.scale(param.sum()).backward()
        scaler._per_optimizer_states[id(optimizer)]["stage"] = None
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        values.append(param.tolist())
    assert values[0] == values[1] == [0.0] * 3


def test_a_new_scale_is_checked_once() -> None:
    counts = []
    for base in (TorchScaler, GradScaler):

        class Counted(base):  # type: ignore[misc, valid-type]
            checks = 0

            def _check_scale_growth_tracker(self, name: str) -> Any:
                self.checks += 1
                return super()._check_scale_growth_tracker(name)

        scaler = Counted("cpu")
        scaler.scale(torch.ones(()))
        scaler.update(4.0)
        counts.append(scaler.checks)
    assert counts == [1, 1]


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
    scales = []
    for scaler in (TorchScaler("cpu"), GradScaler("cpu", backend=backend)):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer: Any = Writing(param, float(gradient == 1.0))
        scaler.scale(torch.ones(()))
        param.grad = torch.full((3,), gradient)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]


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


def test_an_entry_has_torchs_keys_alone() -> None:
    """Also behind an override, whose call is marked meanwhile."""

    class Calls(GradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            return super()._unscale_grads_(*args)

    for kind in (TorchScaler, GradScaler, Calls):
        scaler, param = kind("cpu"), torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param])
        scaler.scale(param.sum()).backward()
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
