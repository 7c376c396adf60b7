"""The contract with torch, each rule compared with torch in the same test."""

from __future__ import annotations

import inspect
import threading
import warnings
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.gradients import make_gradient, parameter_with, sgd_with
from support.outcomes import agree
from support.scalers import Scaler, TorchScaler, started
from support.twins import Side, side

from ampfast import GradScaler, errors

# Constructor


def test_is_a_torch_scaler_by_every_name() -> None:
    assert issubclass(GradScaler, torch.amp.GradScaler)
    assert GradScaler.__qualname__ == GradScaler.__name__ == "GradScaler"
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)


def test_arguments_are_torchs_then_keyword_only() -> None:
    theirs = inspect.signature(TorchScaler.__init__).parameters
    ours = inspect.signature(GradScaler.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name
    added = [ours[name] for name in list(ours)[len(theirs) :]]
    assert added, "the keywords that ampfast adds are missing"
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in added)


def test_methods_take_torchs_arguments() -> None:
    for name, method in inspect.getmembers(TorchScaler, inspect.isfunction):
        if name == "__init__":
            continue
        theirs = list(inspect.signature(method).parameters)
        assert list(inspect.signature(getattr(GradScaler, name)).parameters) == theirs, name


def test_defaults() -> None:
    def defaults(scaler_type: Scaler) -> Any:
        scaler = scaler_type("cpu")
        names = ["_init_scale", "_init_growth_tracker", "_growth_factor", "_backoff_factor"]
        names += ["_growth_interval", "_enabled", "_device", "_scale", "_growth_tracker"]
        return [{name: getattr(scaler, name) for name in names}, scaler.state_dict()]

    assert agree(defaults).value[0]["_init_scale"] == 2.0**16


@pytest.mark.parametrize(
    "arguments",
    [
        {"growth_factor": 1.0},
        {"growth_factor": 0.5},
        {"backoff_factor": 1.0},
        {"backoff_factor": 2.0},
        {"growth_factor": 1.0, "backoff_factor": 1.0},
        {"growth_factor": 1.0, "enabled": False},
        {"growth_factor": float("nan")},
        {"growth_factor": None},
        {"backoff_factor": "0.5"},
        {"growth_interval": 0},
        {"growth_interval": None},
        {"init_scale": 3},
        {"init_scale": -2.0},
        {"init_scale": torch.tensor(4.0)},
        {"speed": 1},
    ],
    ids=str,
)
def test_constructor_refuses_the_same_as_torch(arguments: dict[str, Any]) -> None:
    def build(scaler_type: Scaler) -> None:
        try:
            scaler_type("cpu", **arguments)
        except TypeError as error:
            # Python names the class in it: only the type and the rest of the text must be equal.
            raise TypeError(str(error).replace("ampfast.", "")) from None

    agree(build)


def test_without_cuda_warns_at_the_users_line_and_is_disabled() -> None:
    def build(scaler_type: Scaler) -> bool:
        return scaler_type().is_enabled()

    result = agree(build)
    if not torch.cuda.is_available():
        assert result.value is False
        [(category, _, filename, _)] = result.warned
        assert category is UserWarning and filename == __file__


@pytest.mark.parametrize(
    "device", ["cpu", torch.device("cpu"), torch.device("cpu", 0), "cpu:0", "cuda:0"]
)
def test_device_forms(device: Any) -> None:
    def use(scaler_type: Scaler) -> Any:
        scaler = scaler_type(device, init_scale=4.0)
        optimizer = sgd_with(torch.ones(3) * 4.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        kept = [scaler._device, scaler.state_dict(), optimizer.param_groups[0]["params"][0].data]
        try:
            # Compared with the device's type as text, so torch refuses other forms, too.
            scaler.update(torch.tensor(2.0))
        except AssertionError as error:
            kept.append(str(error))
        return kept

    agree(use)


# Starting


def test_starts_at_the_first_scaled_tensor() -> None:
    def start(scaler_type: Scaler) -> Any:
        scaler = scaler_type("cpu")
        scaler._init_scale, scaler._init_growth_tracker = 48.0, 3
        before = [scaler._scale, scaler._growth_tracker, scaler.get_scale()]
        scaler.scale(torch.ones(()))
        return [before, scaler._scale, scaler._growth_tracker, scaler.get_scale()]

    _, scale, tracker, _ = agree(start).value
    assert scale.dtype == torch.float32 and tracker.dtype == torch.int32
    assert scale.dim() == tracker.dim() == 0


@pytest.mark.parametrize("call", ["step", "unscale_", "update", "_check_inf_per_device"])
@pytest.mark.parametrize("missing", ["both", "_scale", "_growth_tracker"])
def test_before_the_start(call: str, missing: str) -> None:
    def use(scaler_type: Scaler) -> None:
        scaler = scaler_type("cpu") if missing == "both" else started(scaler_type)
        if missing != "both":
            setattr(scaler, missing, None)
        getattr(scaler, call)(*([] if call == "update" else [sgd_with(torch.ones(2))]))

    assert isinstance(agree(use).error, AssertionError)


# scale


def test_scale_promotes() -> None:
    def scale(scaler_type: Scaler) -> Any:
        scaler = started(scaler_type)
        dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.complex64]
        return [scaler.scale(torch.ones(shape, dtype=d)) for d in dtypes for shape in ((), (3,))]

    scaled = agree(scale).value
    assert scaled[0].dtype == torch.float32 and scaled[1].dtype == torch.float16


def test_scale_before_a_write_is_not_changed_by_it() -> None:
    def scale(scaler_type: Scaler) -> Any:
        scaler = started(scaler_type)
        lazy = scaler.scale(t for t in [torch.ones(2), torch.ones(2)])
        first = next(iter(lazy))
        scaler._scale.fill_(2.0)
        return [first, next(iter(lazy)), scaler.scale(torch.ones(1))]

    agree(scale)


# Errors, and their order


def _step_then(call: str, **more: Any) -> Any:
    def use(scaler_type: Scaler) -> None:
        scaler, optimizer = started(scaler_type), sgd_with(torch.ones(2))
        scaler.step(optimizer)
        getattr(scaler, call)(optimizer, **more)

    return use


def _unscale_twice(scaler_type: Scaler) -> None:
    scaler, optimizer = started(scaler_type), sgd_with(torch.ones(2))
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def _nothing_to_check(scaler_type: Scaler) -> None:
    started(scaler_type).step(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))


def _half_after_unscale(scaler_type: Scaler) -> None:
    scaler, optimizer = started(scaler_type), sgd_with(torch.ones(2))
    scaler.unscale_(optimizer)
    optimizer.add_param_group({"params": [parameter_with(torch.ones(2).half())]})
    scaler.unscale_(optimizer)


ERRORS = {
    "closure keyword before all else": lambda t: t("cpu").step(None, closure=1),
    "step twice": _step_then("step"),
    "unscale_ after step": _step_then("unscale_"),
    "closure keyword before step twice": _step_then("step", closure=None),
    "unscale_ twice": _unscale_twice,
    "unscale_ twice before fp16": _half_after_unscale,
    "step without gradients": _nothing_to_check,
    "update without checks": lambda t: started(t).update(),
    "update without start and new scale": lambda t: t("cpu").update(2.0),
    "fp16": lambda t: started(t).unscale_(sgd_with(torch.ones(2), torch.ones(2).half())),
    "not an optimizer": lambda t: started(t).step(object()),
    "not a tensor": lambda t: started(t).unscale_(
        type("O", (), {"param_groups": [{"params": [1]}]})
    ),
    "no params": lambda t: started(t).unscale_(type("O", (), {"param_groups": [{}]})),
    "groups not iterable": lambda t: started(t).unscale_(type("O", (), {"param_groups": None})),
    "complex": lambda t: started(t).unscale_(sgd_with(torch.ones(2, dtype=torch.complex64))),
    "expanded": lambda t: started(t).unscale_(sgd_with(make_gradient("expanded"))),
    "expanded, read only": lambda t: started(t)._check_inf_per_device(
        sgd_with(make_gradient("expanded"))
    ),
}


@pytest.mark.parametrize("scenario", ERRORS.values(), ids=ERRORS)
def test_errors(scenario: Any) -> None:
    assert agree(scenario).error is not None


# Threads


def test_two_scalers_in_two_threads() -> None:
    def build(index: int) -> Side:
        return side(GradScaler, "momentum", index, init_scale=2.0**12, growth_interval=5)

    def work(one: Side, index: int) -> None:
        for step in range(200):
            one.train(step + 1000 * index, float("inf") if step % 17 == index else None)

    serial, parallel = ([build(i) for i in range(2)] for _ in range(2))
    for index, one in enumerate(serial):
        work(one, index)
    workers = [threading.Thread(target=work, args=(one, i)) for i, one in enumerate(parallel)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for theirs, ours in zip(serial, parallel, strict=True):
        assert_same(ours.observe(), theirs.observe())


@pytest.mark.parametrize("module", ["ampfast", "ampfast.other", "ampfaster", "warnings_of_mine"])
def test_warnings_pass_by_ampfast_alone(module: str) -> None:
    """Warnings point at the caller's line: the first one that is in no module of ours."""
    inside: dict[str, Any] = {"__name__": module, "warn": errors.warn_caller}
    exec(compile("def call():\n    warn('seen')\n", module, "exec"), inside)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inside["call"]()
    is_ours = module.partition(".")[0] == "ampfast"
    assert [each.filename for each in caught] == [__file__ if is_ours else module]
