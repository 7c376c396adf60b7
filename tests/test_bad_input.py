"""Bad input to the constructor and the scaler's methods: errors that name it."""

from __future__ import annotations

import pickle
import types
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from support.comparison import assert_same
from support.gradients import parameter_with
from support.scalers import Scaler, TorchScaler
from support.twins import side

from ampfast import GradScaler, StepGuard


def started(**arguments: Any) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=8.0, **arguments)
    scaler.scale(torch.ones(()))
    return scaler


def notes(error: BaseException) -> str:
    """Notes of the exception as one text."""
    return "\n".join(getattr(error, "__notes__", []))


# Constructor


@pytest.mark.parametrize("number", [65536, 2.0**16, np.float32(8.0), np.int64(8), float("inf")])
def test_a_number_first_is_refused_with_a_hint(number: Any) -> None:
    with pytest.raises(TypeError) as caught:
        GradScaler(number)
    text = str(caught.value)
    assert "init_scale=" in text and "patch()" in text and str(number) in text


def test_a_number_by_name_is_refused_alike() -> None:
    with pytest.raises(TypeError, match="init_scale="):
        GradScaler(device=1024.0)


def test_policies_at_their_limits() -> None:
    GradScaler("cpu", init_scale=8.0, min_scale=8.0, max_scale=8.0)
    GradScaler("cpu", hysteresis=2**31 - 1)
    with pytest.raises(ValueError, match="hysteresis must be at least 1"):
        GradScaler("cpu", hysteresis=2**31)
    half_static = {**started().state_dict(), "growth_interval": 0}
    with pytest.raises(ValueError, match="dynamic=False"):
        started(dynamic=False).load_state_dict(half_static)
    with pytest.raises(ValueError, match="dynamic=False"):
        started(dynamic=False).load_state_dict({**started().state_dict(), "backoff_factor": 1.0})


def test_a_disabled_scaler_is_asked_for_the_same() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not GradScaler("cuda", enabled=False).is_enabled()
    with pytest.raises(ValueError, match="no such thing"):
        GradScaler("cpu", enabled=False, backend="no such thing")


def test_a_disabled_scaler_has_torchs_attributes() -> None:
    off = GradScaler("cpu", enabled=False, dynamic=False)
    assert not hasattr(off, "_growth_interval")
    assert not hasattr(torch.amp.GradScaler("cpu", enabled=False), "_growth_interval")


def test_the_environment_is_read_when_a_scaler_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = GradScaler("cpu")
    monkeypatch.setenv("AMPFAST_BACKEND", "aten")
    assert scaler._choice.name_for(torch.device("cpu")) == "cpu"


def test_a_copy_keeps_the_backend_that_was_asked_for() -> None:
    copied = started(backend="aten")
    for _ in range(2):  # attributes missing in one pickle are present in the next
        copied = pickle.loads(pickle.dumps(copied))
    assert copied._choice.name_for(torch.device("cpu")) == "aten"


def test_an_empty_checkpoint_is_refused_as_torch_does() -> None:
    guard = StepGuard("cpu")
    for scaler in (started(), started(min_scale=1.0), started(dynamic=False), guard):
        with pytest.raises(RuntimeError, match="source state dict is empty"):
            scaler.load_state_dict({})


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("interval", [2**31 + 1, 2**63 - 1, 2**64])
def test_intervals_that_no_tracker_reaches(interval: int, backend: str) -> None:
    ends = []
    for kind, arguments in ((torch.amp.GradScaler, {}), (GradScaler, {"backend": backend})):
        run = side(kind, "sgd", growth_interval=interval, **arguments)
        try:
            run.train(0, None)
        except ValueError as error:  # the interval has more than 64 bits
            ends.append(str(error))
        else:
            ends.append(str(run.scaler.state_dict()))
    assert ends[0] == ends[1]


NUMBERS: list[dict[str, Any]] = [
    {"growth_interval": np.int64(2)},
    {"growth_interval": np.int32(2)},
    {"growth_interval": np.float64(2.0)},
    {"growth_interval": np.bool_(True)},
    {"growth_interval": True},
    {"growth_interval": torch.tensor(2)},
    {"growth_factor": np.float32(4.0)},
    {"growth_factor": np.int64(4)},
    {"growth_factor": Fraction(4)},
    {"backoff_factor": np.float32(0.3)},
    {"backoff_factor": np.float64(0.3)},
]


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_numbers_of_other_types(numbers: dict[str, Any], backend: str) -> None:
    """Taken or refused as in torch, with no change on a refusal."""

    def trained(kind: Scaler, **arguments: Any) -> list[Any]:
        run = side(kind, "sgd", init_scale=64.0, **numbers, **arguments)
        states: list[Any] = []
        for index in range(6):
            try:
                run.train(index, float("inf") if index == 4 else None)
            except Exception as error:
                states.append((type(error), str(error)))
            states.append(str(run.observe()))
        return states

    assert trained(GradScaler, backend=backend) == trained(TorchScaler)


@pytest.mark.parametrize("value", [None, 0, 1, "yes", torch.tensor(True)], ids=repr)
def test_allow_fp16_that_is_no_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="allow_fp16") as caught:
        GradScaler("cpu", allow_fp16=value)
    assert type(value).__name__ in str(caught.value) or repr(value) in str(caught.value)


# Notes


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_the_error_for_half_gradients_names_the_parameter(call: str) -> None:
    groups = [
        {"params": [parameter_with(torch.full((3,), 8.0)), torch.nn.Parameter(torch.ones(1))]},
        {
            "params": [
                parameter_with(torch.full((2,), 8.0)),
                torch.nn.Parameter(torch.ones(9, dtype=torch.float16)),
                parameter_with(torch.ones(4, 7, dtype=torch.float16)),
                parameter_with(torch.ones(5, dtype=torch.float16)),
            ]
        },
    ]
    scaler, optimizer = started(), torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(ValueError) as caught:
        getattr(scaler, call)(optimizer)
    assert str(caught.value) == "Attempting to unscale FP16 gradients."
    note = notes(caught.value)
    # The first such gradient: group 1, index 2.
    assert "group 1" in note and "2" in note.replace("group 1", "")
    assert "(4, 7)" in note.replace("[", "(").replace("]", ")")
    assert "float16" in note
    assert_same(groups[0]["params"][0].grad, torch.full((3,), 8.0))
    assert_same(groups[1]["params"][0].grad, torch.full((2,), 8.0))


def _no_parameters() -> Any:
    return type("Empty", (), {"param_groups": [], "step": lambda self: None})()


def _no_gradients() -> Any:
    params = [
        torch.nn.Parameter(torch.ones(2), requires_grad=learns) for learns in (True, True, False)
    ]
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_no_parameters, "The optimizer has no parameters."),
        (_no_gradients, "None of the optimizer's 3 parameters has a gradient (1 of them do not "),
    ],
    ids=["no_parameters", "no_gradients"],
)
def test_no_inf_checks_gives_a_reason(make: Any, why: str, unscaled: bool) -> None:
    scaler, optimizer = started(), make()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(AssertionError) as caught:
        scaler.step(optimizer)
    assert str(caught.value) == "No inf checks were recorded for this optimizer."
    assert why in notes(caught.value)


@pytest.mark.parametrize("leaf", [True, False])
def test_gradients_that_came_after_the_check_are_named(leaf: bool) -> None:
    late = torch.ones(2, requires_grad=True) * 2
    late.retain_grad()
    if leaf:
        late = torch.nn.Parameter(torch.ones(2))
    scaler = started()
    optimizer = types.SimpleNamespace(
        param_groups=[{"params": [torch.nn.Parameter(torch.ones(2)), late]}], step=lambda: None
    )
    scaler.unscale_(optimizer)
    late.grad = torch.ones(2)
    with pytest.raises(AssertionError, match="No inf checks") as caught:
        scaler.step(optimizer)
    assert "came after unscale_()" in notes(caught.value)


# Errors before the first write


def _non_tensor() -> Any:
    return [{"params": [parameter_with(torch.full((3,), 8.0)), "text"]}]


def _half() -> Any:
    half = parameter_with(torch.ones(2, dtype=torch.float16))
    return [{"params": [parameter_with(torch.full((3,), 8.0))]}, {"params": [half]}]


def _no_params() -> Any:
    return [{"params": [parameter_with(torch.full((3,), 8.0))]}, {"lr": 1.0}]


@pytest.mark.parametrize("make", [_non_tensor, _half, _no_params], ids=lambda make: make.__name__)
@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_nothing_is_modified_before_the_error(make: Any, call: str, backend: str) -> None:
    class Optimizer:
        param_groups = make()

        def step(self) -> None:
            raise RuntimeError("step was reached")

    scaler, optimizer = started(backend=backend), Optimizer()
    with pytest.raises((AssertionError, ValueError, KeyError)):
        getattr(scaler, call)(optimizer)
    assert_same(optimizer.param_groups[0]["params"][0].grad, torch.full((3,), 8.0))
    assert not scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    assert scaler.state_dict()["scale"] == 8.0


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_optimizers_is_refused_with_a_hint(kind: type) -> None:
    scaler, optimizer = started(), _no_gradients()
    with pytest.raises(TypeError, match=f"one by one.* got a {kind.__name__}"):
        scaler.step_and_update(kind([optimizer]))
    assert not scaler._per_optimizer_states


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_a_forgotten_update_is_named(call: str) -> None:
    scaler = started()
    optimizer = torch.optim.SGD([parameter_with(torch.full((3,), 8.0))], lr=0.5)
    getattr(scaler, call)(optimizer)
    with pytest.raises(RuntimeError, match="has already been called") as caught:
        getattr(scaler, call)(optimizer)
    assert "update()" in notes(caught.value)


def test_the_note_on_missing_checks_survives_non_tensors() -> None:
    scaler = started()
    groups = [{"params": []}]
    optimizer = types.SimpleNamespace(param_groups=groups, step=lambda: None)
    scaler.unscale_(optimizer)
    groups[0]["params"] = [5, torch.ones(2, requires_grad=True) * 2]
    with warnings.catch_warnings(), pytest.raises(AssertionError, match="No inf checks") as caught:
        warnings.simplefilter("error")
        scaler.step(optimizer)
    assert "None of the optimizer's 1 parameters" in notes(caught.value)


# Queries of an optimizer


@pytest.mark.parametrize("question", ["found_inf", "step_skipped"])
def test_an_optimizer_that_was_never_checked(question: str) -> None:
    scaler = started()
    with pytest.raises(LookupError):
        getattr(scaler, question)(_no_gradients())
    # A query must leave no record, or update would count it.
    assert not scaler._per_optimizer_states


@pytest.mark.parametrize("question", ["found_inf", "step_skipped"])
def test_asking_with_no_optimizer(question: str) -> None:
    with pytest.raises((LookupError, TypeError)):
        getattr(started(), question)(None)


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
        scaler = kind("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(AttributeError, match="param_groups") as caught:
            getattr(scaler, method)(given)
        assert notes(caught.value).count("expected an optimizer, an object with param_groups") == 1


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_without_step_is_named(fused: bool) -> None:
    param = parameter_with(torch.ones(1))
    given = types.SimpleNamespace(
        param_groups=[{"params": [param]}], _step_supports_amp_scaling=fused
    )
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
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    param.grad = torch.ones(2, dtype=torch.complex64)
    optimizer: Any = torch.optim.SGD([param], lr=1.0)
    optimizer._step_supports_amp_scaling = fused
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'") as caught:
        getattr(started(), call)(optimizer, *((1.0,) if call == "clip_grad_norm_" else ()))
    assert "torch.complex64" in notes(caught.value) and "view_as_complex" in notes(caught.value)
    assert param.grad.eq(1).all()
