"""Bad input to the constructor and the scaler's methods: errors that name it."""

from __future__ import annotations

import functools
import pickle
import types
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from support import scalers
from support.comparison import assert_same
from support.gradients import parameter_with
from support.outcomes import outcome
from support.scalers import Scaler, TorchScaler
from support.twins import side

from ampfast import GradScaler, StepGuard

started = functools.partial(scalers.started, GradScaler)


def notes(error: BaseException) -> str:
    """Notes of the exception as one text."""
    return "\n".join(getattr(error, "__notes__", []))


# Constructor


@pytest.mark.parametrize("name", [None, "device"])
@pytest.mark.parametrize("number", [65536, 2.0**16, np.float32(8.0), np.int64(8), float("inf")])
def test_a_number_first_is_refused_with_a_hint(number: Any, name: str | None) -> None:
    with pytest.raises(TypeError) as caught:
        GradScaler(**{name: number}) if name else GradScaler(number)
    text = str(caught.value)
    assert "init_scale=" in text and "patch()" in text and str(number) in text


def test_policies_at_their_limits() -> None:
    GradScaler("cpu", init_scale=8.0, min_scale=8.0, max_scale=8.0)
    GradScaler("cpu", hysteresis=2**31 - 1)
    with pytest.raises(ValueError, match="hysteresis must be at least 1"):
        GradScaler("cpu", hysteresis=2**31)
    for half_static in ({"growth_interval": 0}, {"backoff_factor": 1.0}):
        with pytest.raises(ValueError, match="dynamic=False"):
            started(dynamic=False).load_state_dict({**started().state_dict(), **half_static})


def test_a_disabled_scaler() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not GradScaler("cuda", enabled=False).is_enabled()
    with pytest.raises(ValueError, match="no such thing"):
        GradScaler("cpu", enabled=False, backend="no such thing")
    # It has torch's attributes.
    assert not hasattr(GradScaler("cpu", enabled=False, dynamic=False), "_growth_interval")
    assert not hasattr(torch.amp.GradScaler("cpu", enabled=False), "_growth_interval")


def test_the_backend_is_chosen_when_a_scaler_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, copied, cpu = GradScaler("cpu"), started(backend="aten"), torch.device("cpu")
    monkeypatch.setenv("AMPFAST_BACKEND", "aten")
    assert scaler._choice.name_for(cpu) == "cpu"
    monkeypatch.delenv("AMPFAST_BACKEND")
    for _ in range(2):  # attributes missing in one pickle are present in the next
        copied = pickle.loads(pickle.dumps(copied))
    assert copied._choice.name_for(cpu) == "aten"


def test_an_empty_checkpoint_is_refused_as_torch_does() -> None:
    guard = StepGuard("cpu")
    for scaler in (started(), started(min_scale=1.0), started(dynamic=False), guard):
        with pytest.raises(RuntimeError, match="source state dict is empty"):
            scaler.load_state_dict({})


INTERVALS = (np.int64(2), np.int32(2), np.float64(2.0), np.bool_(True), True, torch.tensor(2))
NUMBERS: list[dict[str, Any]] = [
    *({"growth_interval": value} for value in INTERVALS),
    # Those that no tracker reaches; the last has more than 64 bits.
    *({"growth_interval": value} for value in (2**31 + 1, 2**63 - 1, 2**64)),
    *({"growth_factor": value} for value in (np.float32(4.0), np.int64(4), Fraction(4))),
    *({"backoff_factor": value} for value in (np.float32(0.3), np.float64(0.3))),
]


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_unusual_numbers(numbers: dict[str, Any], backend: str) -> None:
    """Taken or refused as in torch, with no change on a refusal."""

    def trained(kind: Scaler, **arguments: Any) -> list[Any]:
        run = side(kind, "sgd", init_scale=64.0, **numbers, **arguments)
        states: list[Any] = []
        for index in range(6):
            bad = float("inf") if index == 4 else None
            error = outcome(functools.partial(run.train, index, bad)).error
            states += [type(error), str(error), str(run.observe())]
        return states

    assert trained(GradScaler, backend=backend) == trained(TorchScaler)


@pytest.mark.parametrize("value", [None, 0, 1, "yes", torch.tensor(True)], ids=repr)
def test_allow_fp16_that_is_no_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="allow_fp16") as caught:
        GradScaler("cpu", allow_fp16=value)
    assert type(value).__name__ in str(caught.value) or repr(value) in str(caught.value)


# Notes


def params(*grads: torch.Tensor | None) -> list[Any]:
    """Parameters with these gradients; one of float16 with none for None."""
    none = torch.nn.Parameter(torch.ones(9, dtype=torch.float16))
    return [none if grad is None else parameter_with(grad) for grad in grads]


EIGHTS, HALF = torch.full((3,), 8.0), torch.ones(4, 7, dtype=torch.float16)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_the_error_for_half_gradients_names_the_parameter(call: str) -> None:
    good = params(EIGHTS.clone(), EIGHTS.clone())
    groups = [[good[0], *params(None)], [good[1], *params(None, HALF, HALF[0])]]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
    with pytest.raises(ValueError) as caught:
        getattr(started(), call)(optimizer)
    assert str(caught.value) == "Attempting to unscale FP16 gradients."
    note = notes(caught.value)
    # The first such gradient: group 1, index 2.
    assert "group 1" in note and "2" in note.replace("group 1", "")
    assert "(4, 7)" in note.replace("[", "(").replace("]", ")")
    assert "float16" in note
    assert_same([param.grad for param in good], [EIGHTS] * 2)


def leaves(*learns: bool) -> list[Any]:
    return [torch.nn.Parameter(torch.ones(2), requires_grad=each) for each in learns]


def not_a_leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


NONE = "None of the optimizer's {} parameters"
# Parameters before and after `unscale_`; gradients of the last may come later.
MISSING: dict[str, tuple[list[Any], list[Any] | None, str]] = {
    "no parameters": ([], None, "The optimizer has no parameters."),
    "no gradients": (
        leaves(True, True, False),
        None,
        f"{NONE.format(3)} has a gradient (1 of them do not ",
    ),
    "no tensor": ([], [5, not_a_leaf()], NONE.format(1)),
}


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("kind", MISSING)
def test_no_inf_checks_gives_a_reason(kind: str, unscaled: bool) -> None:
    before, after, why = MISSING[kind]
    groups = [{"params": before}] * bool(before or after)
    scaler = started()
    optimizer = types.SimpleNamespace(param_groups=groups, step=lambda: None)
    if unscaled or after:
        scaler.unscale_(optimizer)
    if after:
        groups[0] = {"params": after}
    with warnings.catch_warnings(), pytest.raises(AssertionError) as caught:
        warnings.simplefilter("error")
        scaler.step(optimizer)
    assert str(caught.value) == "No inf checks were recorded for this optimizer."
    assert why in notes(caught.value)


@pytest.mark.parametrize("leaf", [True, False])
def test_gradients_that_came_after_the_check_are_named(leaf: bool) -> None:
    scaler, [first, late] = started(), leaves(True, True)
    if not leaf:
        late = not_a_leaf()
        late.retain_grad()
    groups = [{"params": [first, late]}]
    optimizer = types.SimpleNamespace(param_groups=groups, step=lambda: None)
    scaler.unscale_(optimizer)
    late.grad = torch.ones(2)
    with pytest.raises(AssertionError, match="No inf checks") as caught:
        scaler.step(optimizer)
    assert "came after unscale_()" in notes(caught.value)


# Errors before the first write


BAD_GROUPS: dict[str, Callable[[Any], list[Any]]] = {
    "no tensor": lambda param: [{"params": [param, "text"]}],
    "half": lambda param: [{"params": [param]}, {"params": params(HALF)}],
    "no params": lambda param: [{"params": [param]}, {"lr": 1.0}],
}


@pytest.mark.parametrize("kind", BAD_GROUPS)
@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_nothing_is_modified_before_the_error(kind: str, call: str, backend: str) -> None:
    [param] = params(EIGHTS.clone())
    step = functools.partial(pytest.fail, "step was reached")
    optimizer = types.SimpleNamespace(param_groups=BAD_GROUPS[kind](param), step=step)
    scaler = started(backend=backend)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        getattr(scaler, call)(optimizer)
    assert_same(param.grad, EIGHTS)
    assert not scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    assert scaler.state_dict()["scale"] == 8.0


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_optimizers_is_refused_with_a_hint(kind: type) -> None:
    scaler, optimizer = started(), torch.optim.SGD(leaves(True), lr=0.1)
    with pytest.raises(TypeError, match=f"one by one.* got a {kind.__name__}"):
        scaler.step_and_update(kind([optimizer]))
    assert not scaler._per_optimizer_states


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_a_forgotten_update_is_named(call: str) -> None:
    scaler = started()
    optimizer = torch.optim.SGD(params(EIGHTS.clone()), lr=0.5)
    getattr(scaler, call)(optimizer)
    with pytest.raises(RuntimeError, match="has already been called") as caught:
        getattr(scaler, call)(optimizer)
    assert "update()" in notes(caught.value)


# Queries of an optimizer


@pytest.mark.parametrize("question", ["found_inf", "step_skipped"])
def test_an_optimizer_that_was_never_checked(question: str) -> None:
    scaler = started()
    with pytest.raises(LookupError):
        getattr(scaler, question)(torch.optim.SGD(leaves(True), lr=0.1))
    # A query must leave no record, or update would count it.
    assert not scaler._per_optimizer_states
    with pytest.raises((LookupError, TypeError)):
        getattr(scaler, question)(None)


# Optimizers


@pytest.mark.parametrize("given", [torch.nn.Linear(1, 1), None, "sgd", 0.1], ids=type)
@pytest.mark.parametrize("method", ["step", "unscale_", "step_and_update"])
@pytest.mark.parametrize(
    "arguments", [{}, {"backend": "aten"}, {"track": "overflow"}, {"enabled": False}], ids=str
)
def test_what_is_no_optimizer_is_named(
    arguments: dict[str, Any], method: str, given: object
) -> None:
    scaler = started(**arguments)
    theirs = TorchScaler("cpu", enabled=arguments.get("enabled", True))
    theirs.scale(torch.ones(()))
    if method == "unscale_" and arguments == {"enabled": False}:
        assert scaler.unscale_(given) is theirs.unscale_(given) is None
        return
    with pytest.raises(AttributeError) as of_theirs:
        getattr(theirs, "step" if method == "step_and_update" else method)(given)
    with pytest.raises(AttributeError) as caught:
        getattr(scaler, method)(given)
    assert str(caught.value) == str(of_theirs.value)
    (note,) = caught.value.__notes__
    assert note.startswith("expected an optimizer, an object with param_groups and step, got ")
    assert note.endswith(f".{type(given).__name__}")


class Hooked(GradScaler):
    def _unscale_grads_(self, *args: Any) -> Any:
        return super()._unscale_grads_(*args)


class CallsUnscale(GradScaler):
    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)


@pytest.mark.parametrize("kind", [Hooked, CallsUnscale])
@pytest.mark.parametrize("given", [torch.nn.Linear(1, 1), None], ids=type)
def test_subclasses_name_what_is_no_optimizer(kind: type[GradScaler], given: Any) -> None:
    for method in ("step", "unscale_"):
        scaler = scalers.started(kind)
        with pytest.raises(AttributeError, match="param_groups") as caught:
            getattr(scaler, method)(given)
        assert notes(caught.value).count("expected an optimizer, an object with param_groups") == 1


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_without_step_is_named(fused: bool) -> None:
    groups = [{"params": params(torch.ones(1))}]
    given = types.SimpleNamespace(param_groups=groups, _step_supports_amp_scaling=fused)
    with pytest.raises(AttributeError, match="step") as caught:
        started().step(given)
    note = "expected an optimizer, an object with param_groups and step, got types.SimpleNamespace"
    assert notes(caught.value) == note


@pytest.mark.parametrize("enabled", [True, False])
def test_an_error_of_an_optimizer_is_its_own(enabled: bool) -> None:
    class Own:
        def __init__(self) -> None:
            if enabled:
                self.param_groups = [{"params": [parameter_with(torch.ones(1))]}]

        def step(self) -> None:
            raise AttributeError("mine")

    with pytest.raises(AttributeError, match="mine") as caught:
        started(enabled=enabled).step(Own())
    assert not notes(caught.value)


@pytest.mark.parametrize("call", ["unscale_", "step", "clip_grad_norm_"])
@pytest.mark.parametrize("fused", [False, True])
def test_complex_gradients_are_explained(call: str, fused: bool) -> None:
    param = parameter_with(torch.ones(2, dtype=torch.complex64))
    optimizer: Any = torch.optim.SGD([param], lr=1.0)
    optimizer._step_supports_amp_scaling = fused
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'") as caught:
        getattr(started(), call)(optimizer, *((1.0,) if call == "clip_grad_norm_" else ()))
    assert "torch.complex64" in notes(caught.value) and "view_as_complex" in notes(caught.value)
    assert param.grad.eq(1).all()
