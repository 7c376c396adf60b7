"""Bad input to the constructor and the scaler's methods: errors that name it."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.comparison import HookedUnscale, TorchScaler, outcome, started
from support.gradients import parameter_with

from ampfast import GradScaler, StepGuard


@pytest.mark.parametrize("arguments", [(65536,), (2.0**16,), (np.float32(8.0),), (float("inf"),)])
def test_a_number_first_is_refused_with_a_hint(arguments: Any) -> None:
    for call in (GradScaler, lambda number: GradScaler(device=number)):
        with pytest.raises(TypeError, match=r"init_scale=.*patch\(\)") as caught:
            call(*arguments)
        assert str(arguments[0]) in str(caught.value)


@pytest.mark.parametrize(
    "make", [partial(GradScaler, "cpu"), partial(GradScaler, "cpu", hysteresis=2), StepGuard]
)
def test_of_what_is_no_checkpoint_nothing_is_loaded(make: Any, torch_fails: Any) -> None:
    with pytest.raises(KeyError) as told:
        make().load_state_dict(torch.nn.Linear(2, 1).state_dict())
    assert told.value.args == ("scale",)
    assert "got ['weight', 'bias']" in told.value.__notes__[0]
    scaler = make()
    before = scaler.state_dict()
    for given, error, note in (
        ({"scale": 1.0}, KeyError, "got ['scale']"),
        *((given, TypeError, f"got {type(given).__name__}") for given in (None, 3, [1], "a")),
    ):
        with pytest.raises(error) as told:
            scaler.load_state_dict(given)
        assert note in told.value.__notes__[0]
    for key, value in (("scale", "1"), ("growth_interval", None), ("_growth_tracker", 1j)):
        with pytest.raises(ValueError, match=f"{key}' must be a number"):
            scaler.load_state_dict({**before, key: value})
    assert scaler.state_dict() == before
    theirs = TorchScaler("cpu")
    error = outcome(lambda: theirs.load_state_dict({"scale": 1.0})).error
    torch_fails("a damaged checkpoint is loaded in part", error and theirs.get_scale() == 1.0)


def test_a_disabled_scaler() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not GradScaler("cuda", enabled=False).is_enabled()


def test_an_empty_checkpoint_is_refused_as_torch_does() -> None:
    for scaler in (started(), started(min_scale=1.0), started(dynamic=False), StepGuard("cpu")):
        with pytest.raises(RuntimeError, match="source state dict is empty"):
            scaler.load_state_dict({})


# Errors of methods, their notes, and that they come before the first write

HALF = torch.ones(4, 7, dtype=torch.float16)


def of(*groups: Any, **attributes: Any) -> Any:
    """Optimizer with these groups."""
    attributes.setdefault("step", functools.partial(pytest.fail, "step was reached"))
    return types.SimpleNamespace(param_groups=list(groups), **attributes)


def group(*grads: torch.Tensor | None) -> dict[str, Any]:
    """Parameters with these gradients, one without for None."""
    none = torch.nn.Parameter(torch.ones(9))
    return {"params": [none if grad is None else parameter_with(grad) for grad in grads]}


def eights() -> torch.Tensor:
    return torch.full((3,), 8.0)


def late(scaler: GradScaler) -> Any:
    """Optimizer whose gradient came after the check."""
    optimizer = of(group(None), group(None))
    scaler.unscale_(optimizer)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(9)
    return optimizer


def forgotten(call: str, scaler: GradScaler) -> Any:
    """Optimizer that was unscaled or stepped in this iteration."""
    optimizer = of(group(eights()), step=lambda: None)
    getattr(scaler, call)(optimizer)
    return optimizer


# Of a class that says that it divides.
Reader: Any = type(
    "SimpleNamespace",
    (types.SimpleNamespace,),
    {"__module__": "types", "_step_supports_amp_scaling": True},
)


def without_step(scaler: GradScaler) -> Any:
    return types.SimpleNamespace(param_groups=[group(torch.ones(1))])


def reader_without_step(scaler: GradScaler) -> Any:
    return Reader(param_groups=[group(torch.ones(1))])


CLIP = "clip_grad_norm_"
FP16, NO_CHECKS = "^Attempting to unscale FP16 gradients", "^No inf checks were recorded for this"
TWICE, NO_STEP = "has already been called", "SimpleNamespace' object has no attribute 'step'"
MISSING = "expected an optimizer, an object with param_groups and step, got "
Make = Callable[[GradScaler], Any]
Case = tuple[Make, str, type[Exception], str, tuple[str, ...]]


def case(make: Make, calls: str, error: type[Exception], text: str, *notes: str) -> Case:
    return make, calls, error, text, notes


# Optimizer, methods, type and text of the error, and texts in its notes.
CASES = [
    case(
        lambda s: of(group(eights()), group(None, eights(), HALF, HALF[0])),
        *("unscale_ step", ValueError, FP16, "group 1", "2", "(4, 7)", "float16"),
    ),
    case(
        lambda s: of(group(eights(), eights()[:1].expand(3))),
        *(f"unscale_ step {CLIP}", RuntimeError, "more than one element of the written-to tensor"),
    ),
    case(lambda s: of(), "step", AssertionError, NO_CHECKS, "None of the optimizer's 0 parameters"),
    case(
        lambda s: of(group(None, None, None)),
        *("step", AssertionError, NO_CHECKS, "None of the optimizer's 3 parameters has a gradient"),
    ),
    case(late, "step", AssertionError, NO_CHECKS, "came after unscale_()"),
    *(
        case(functools.partial(forgotten, call), call, RuntimeError, TWICE, "update()", *notes)
        for call, *notes in (
            ("unscale_", "accumulate", "scaler.clip_grad_norm_() of ampfast unscales, too"),
            ("step", "or a call there twice"),
        )
    ),
    case(
        functools.partial(forgotten, "step"),
        *("unscale_", RuntimeError, "is being called after step", "is update() missing"),
    ),
    case(lambda s: of(group(eights()), {"lr": 1.0}), "unscale_ step", KeyError, "params"),
    case(
        lambda s: of({"params": [parameter_with(eights()), "text"]}),
        *("unscale_ step", AssertionError, "torch.Tensor, got str", "parameter 1 of group 0"),
    ),
    case(lambda s: of(group(None)), "found_inf step_skipped", LookupError, "never checked"),
    *(
        case(make, "step", AttributeError, NO_STEP, f"{MISSING}types.SimpleNamespace")
        for make in (without_step, reader_without_step)
    ),
]


@pytest.mark.parametrize("way", ["cpu", "aten", "hooked"])
@pytest.mark.parametrize(("make", "calls", "error", "text", "notes"), CASES)
def test_errors_of_methods(
    make: Make, calls: str, error: Any, text: str, notes: tuple[str, ...], way: str
) -> None:
    for call in calls.split():
        if hasattr(TorchScaler, call):
            theirs = started(TorchScaler)
            torchs = outcome(partial(getattr(theirs, call), make(theirs))).error
            ours = started()
            assert repr(outcome(partial(getattr(ours, call), make(ours))).error) == repr(torchs)
        scaler = started(HookedUnscale) if way == "hooked" else started(backend=way)
        optimizer = make(scaler)
        before = grads_of(optimizer)
        records = len(scaler._per_optimizer_states)
        with pytest.raises(error, match=text) as caught:
            getattr(scaler, call)(optimizer, *((1.0,) if call == CLIP else ()))
        said = "\n".join(getattr(caught.value, "__notes__", []))
        if way != "hooked" or text is not NO_CHECKS:
            assert all(note in said for note in notes), said
        if text is not NO_STEP:  # which is known after the division
            assert grads_of(optimizer) == before
        if call not in ("unscale_", "step", CLIP):
            assert len(scaler._per_optimizer_states) == records
        assert scaler.state_dict()["scale"] == 8.0


def grads_of(optimizer: Any) -> list[Any]:
    groups = getattr(optimizer, "param_groups", [])
    params = [p for group in groups for p in group.get("params", []) if torch.is_tensor(p)]
    return [None if p.grad is None else p.grad.tolist() for p in params]


@pytest.mark.parametrize("given", [torch.nn.Linear(1, 1), None, "sgd", 0.1, []], ids=type)
@pytest.mark.parametrize("method", ["step", "unscale_", "step_and_update"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"backend": "aten"}, {"track": "overflow"}, {"enabled": False}, {"kind": HookedUnscale}],
    ids=str,
)
def test_what_is_no_optimizer_is_named(
    arguments: dict[str, Any], method: str, given: object
) -> None:
    arguments = {"kind": GradScaler, **arguments}
    scaler = started(arguments.pop("kind"), **arguments)
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
    assert note.startswith(MISSING) and note.endswith(f".{type(given).__name__}")


@pytest.mark.parametrize("enabled", [True, False])
def test_an_error_of_an_optimizer_is_its_own(enabled: bool) -> None:
    def step() -> None:
        raise AttributeError("mine")

    with pytest.raises(AttributeError, match="mine") as caught:
        started(enabled=enabled).step(of(group(torch.ones(1)), step=step))
    assert not getattr(caught.value, "__notes__", [])
    if not enabled:  # it needs no groups
        with pytest.raises(AttributeError, match="mine") as caught:
            started(enabled=False).step(types.SimpleNamespace(step=step))
        assert not getattr(caught.value, "__notes__", [])
