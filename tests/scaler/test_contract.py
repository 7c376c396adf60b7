"""The contract with torch: scenarios that must end alike with torch's class and with ours."""

from __future__ import annotations

import functools
import inspect
import itertools
import pickle
import types
from collections import UserDict
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from support.comparison import Scaler, TorchScaler, agree, outcome, started
from support.gradients import parameter_with, sgd_with, six
from support.steps import side
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import OptState

from ampfast import GradScaler

INF = float("inf")
CPU = torch.device("cpu")


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
    for name, method in inspect.getmembers(TorchScaler, inspect.isfunction):
        if name != "__init__":
            names = list(inspect.signature(method).parameters)
            assert list(inspect.signature(getattr(GradScaler, name)).parameters) == names, name
    assert issubclass(GradScaler, TorchScaler) and GradScaler.__name__ == "GradScaler"


def test_without_cuda_warns_at_the_users_line_and_is_disabled() -> None:
    result = agree(lambda kind: kind().is_enabled())
    if not torch.cuda.is_available():
        assert result.value is False
        [(category, _, filename, _)] = result.warned
        assert category is UserWarning and filename == __file__


SCENARIOS: dict[str, Callable[[Any], object]] = {}


def scenario(use: Callable[..., object]) -> None:
    SCENARIOS[use.__name__] = use


def scenario_of(cases: Iterable[Any]) -> Callable[[Callable[..., object]], None]:
    def add(use: Callable[..., object]) -> None:
        for case in cases:
            SCENARIOS[f"{use.__name__} {case}"] = functools.partial(use, case)

    return add


ODD_ARGUMENTS: list[dict[str, Any]] = [
    *({"growth_factor": value} for value in (1.0, 0.5, float("nan"), None)),
    *({"backoff_factor": value} for value in (1.0, 2.0, "0.5")),
    {"growth_factor": 1.0, "enabled": False},
    *({"growth_interval": value} for value in (0, None)),
    *({"init_scale": value} for value in (3, -2.0, torch.tensor(4.0))),
    {"speed": 1},
]


@scenario_of(ODD_ARGUMENTS)
def constructed(arguments: dict[str, Any], kind: Scaler) -> None:
    try:
        kind("cpu", **arguments)
    except TypeError as error:
        # Python names the class in it: only the type and the rest of the text must be equal.
        raise TypeError(str(error).replace("ampfast.", "")) from None


@scenario_of(["cpu", torch.device("cpu"), torch.device("cpu", 0), "cpu:0", "cuda:0"])
def on_a_device(device: Any, kind: Scaler) -> Any:
    scaler = kind(device, init_scale=4.0)
    optimizer = sgd_with(torch.ones(3) * 4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    kept = [scaler._device, scaler.state_dict(), optimizer.param_groups[0]["params"][0].data]
    # Compared with the device's type as text, so torch refuses other forms, too.
    return [*kept, outcome(lambda: scaler.update(torch.tensor(2.0))).comparable()]


@scenario
def scale_promotes(kind: Scaler) -> Any:
    scaler = started(kind)
    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.complex64]
    return [scaler.scale(torch.ones(shape, dtype=d)) for d in dtypes for shape in ((), (3,))]


CALLS = ("step", "unscale_", "update", "_check_inf_per_device")


@scenario_of(itertools.product(("_scale", "_growth_tracker"), CALLS))
def without_state(case: tuple[str, str], kind: Scaler) -> Any:
    scaler, (name, call) = started(kind), case
    setattr(scaler, name, None)
    arguments = () if call == "update" else (sgd_with(torch.ones(2)),)
    return outcome(lambda: getattr(scaler, call)(*arguments)).comparable()


@scenario_of(("repr", "_get_scale_async"))
def an_error_of_the_check_leaves_no_turn(overridden: str, kind: Scaler) -> Any:
    own: Any = type("Own", (kind,), {overridden: lambda self: getattr(kind, overridden)(self)})
    scaler, param = started(own), torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)._neg_view()
    found = outcome(lambda: scaler._check_inf_per_device(torch.optim.SGD([param], lr=1.0)))
    return [type(found.error), len(scaler._per_optimizer_states)]


@scenario_of([torch.float32, torch.float16])
def a_check_alone_leaves_the_stage(dtype: torch.dtype, kind: Scaler) -> Any:
    scaler, optimizer = started(kind, 3.0), sgd_with(torch.ones(2, dtype=dtype))
    flags = scaler._check_inf_per_device(optimizer)
    return [list(flags.values()), scaler._per_optimizer_states[id(optimizer)]["stage"].name]


@scenario_of(["unscale_", "step"])
def a_record_that_was_read_is_that_of_the_step(call: str, kind: Scaler) -> Any:
    scaler, optimizer = started(kind, 3.0), sgd_with(torch.ones(2))
    record = scaler._per_optimizer_states[id(optimizer)]
    getattr(scaler, call)(optimizer)
    return record["stage"].name, list(record["found_inf_per_device"].values())


@pytest.mark.parametrize("track", [None, "overflow", "norms"])
def test_a_scaler_is_pickled_that_was_disabled_within_an_iteration(track: str | None) -> None:
    scaler, optimizer = started(track=track), sgd_with(torch.ones(2))
    scaler.unscale_(optimizer)
    scaler._enabled = False
    copied = pickle.loads(pickle.dumps(scaler))
    assert next(iter(copied._per_optimizer_states.values()))["stage"] is OptState.UNSCALED


def test_a_norm_coalesces_sparse_gradients() -> None:
    for track, is_coalesced in ((None, False), ("norms", True)):
        optimizer = sgd_with(torch.sparse_coo_tensor([[0, 0]], [8.0, 16.0], (2,)))
        started(track=track).unscale_(optimizer)
        (grad,) = (param.grad for param in optimizer.param_groups[0]["params"])
        assert grad.is_coalesced() is is_coalesced
        assert grad.to_dense().tolist() == [3.0, 0.0]


@scenario
def update_between_scale_and_backward(kind: Scaler) -> Any:
    one = side(kind, init_scale=8.0)
    one.train(0)
    pending = one.scaler.scale(one.loss(1))
    one.scaler.unscale_(one.optimizer)
    one.scaler.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pending.backward()


ODD_SETTINGS = [
    *(("_growth_factor", value) for value in (None, "2", 3, torch.tensor(3.0), Fraction(4))),
    *(("_backoff_factor", value) for value in (INF, np.float32(0.3), np.float64(0.3))),
    *(("_growth_interval", value) for value in (2.0, None, True, 2**31 + 1, 2**40, 2**64)),
    *(("_growth_interval", value) for value in (np.int64(2), np.bool_(True), torch.tensor(2))),
    *(("_scale", torch.full(s, 3.0, dtype=torch.float32)) for s in ((), (1,), (1, 1))),
    *(("_scale", torch.full(s, 3.0, dtype=torch.float64)) for s in ((), (1,), (1, 1))),
]


@scenario_of((*setting, value) for setting in ODD_SETTINGS for value in (1.0, INF))
def update_with_odd_settings(setting: tuple[str, Any, float], kind: Scaler) -> Any:
    name, value, gradient = setting
    scaler, optimizer = started(kind, growth_interval=1), sgd_with(torch.tensor([gradient]))
    setattr(scaler, name, value.clone() if name == "_scale" else value)
    errors = [outcome(lambda: scaler.step(optimizer)).error, outcome(scaler.update).error]
    # The text is the dispatcher's, which lists the arguments of the op.
    assert all(isinstance(e, (TypeError, RuntimeError, ValueError)) for e in errors if e)
    weight = optimizer.param_groups[0]["params"][0].detach()
    return [[type(e).__name__ for e in errors], scaler._scale, scaler._growth_tracker, weight]


@scenario
def under_another_default_device(kind: Scaler) -> Any:
    scaler, p = started(kind, 3.0), six(3)
    with torch.device("meta"):
        scaler.unscale_(torch.optim.SGD([p], lr=0.1))
        scaler.update()
    return [p.grad, scaler._scale, scaler.get_scale()]


class Groups(list):
    """Iterates over other items than it holds."""

    def __init__(self, shown: list[Any]) -> None:
        super().__init__()
        self.shown = shown

    def __iter__(self) -> Any:
        return iter(self.shown)


GROUPS: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "tuple of params": lambda p: [{"params": (p,)}],
    "generator of params": lambda p: [{"params": (x for x in [p])}],
    "dict values": lambda p: [{"params": {0: p}.values()}],
    "iterator": lambda p: [{"params": iter([p])}],
    "parameter list": lambda p: [{"params": torch.nn.ParameterList([p])}],
    "module parameters": lambda p: [{"params": torch.nn.ParameterList([p]).parameters()}],
    "list that iterates otherwise": lambda p: [{"params": Groups([p])}],
    "generator of groups": lambda p: (g for g in [{"params": [p]}]),
    "UserDict": lambda p: [UserDict(params=[p])],
    "None": lambda p: [{"params": None}],
    "names": lambda p: [{"params": {"weight": p}}],
    "pairs": lambda p: [{"params": [("weight", p)]}],
    "no groups": lambda p: None,
    "no params": lambda p: [{}],
    "number": lambda p: [{"params": [1]}],
}


class Made:
    """An "optimizer" whose groups are made at every access."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.steps = make, 0

    param_groups = property(lambda self: self.make())

    def step(self) -> None:
        self.steps += 1


@scenario_of(GROUPS)
def groups_may_be(name: str, kind: Scaler) -> Any:
    scaler, p = started(kind, 3.0), six(3)
    optimizer = Made(lambda: GROUPS[name](p))
    for _ in range(3):
        scaler.unscale_(optimizer)
        flags = list(scaler._found_inf_per_device(optimizer).values())
        scaler.step(optimizer)
        scaler.update()
    return [p.grad, flags, optimizer.steps]


class Same(torch.Tensor):
    """Subclass without changes."""


def sixes(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((4,), 6.0).to(dtype)


def with_gradient(p: Any, gradient: torch.Tensor) -> Any:
    p.grad = gradient
    return p


def _negated() -> Any:
    p = parameter_with(torch.complex(torch.ones(4), torch.arange(-2.0, 2)).conj().imag)
    assert p.grad.is_neg()
    return p


def _rows() -> Any:
    p = torch.nn.Parameter(torch.eye(3).to_sparse_csr())
    return with_gradient(p, (torch.eye(3) * 6).to_sparse_csr())


PARAMETERS: dict[str, Callable[[], Any]] = {
    "subclass": lambda: with_gradient(
        sixes().as_subclass(Same).requires_grad_(), sixes().as_subclass(Same)
    ),
    "rows": _rows,
    "float8": lambda: parameter_with(torch.ones(3).to(torch.float8_e4m3fn)),
    "negated": _negated,
}


@scenario_of(itertools.product(PARAMETERS, ("unscale_", "_check_inf_per_device")))
def parameters_may_be(case: tuple[str, str], kind: Scaler) -> Any:
    def use() -> Any:
        scaler, regular, odd = started(kind, 3.0), six(2), PARAMETERS[case[0]]()
        optimizer = types.SimpleNamespace(param_groups=[{"params": [regular, odd]}])
        getattr(scaler, case[1])(optimizer)
        gradient = odd.grad.values() if odd.grad.layout is torch.sparse_csr else odd.grad
        gradient = gradient.detach().clone().resolve_neg().as_subclass(torch.Tensor)
        return [list(scaler._found_inf_per_device(optimizer).values()), regular.grad, gradient]

    # C++ warnings about such tensors point into the module that first touched them.
    return outcome(use).comparable()[:2]


@scenario_of(["unscale_", "step"])
def on_fake_tensors(call: str, kind: Scaler) -> Any:
    """Memory estimators train on tensors without memory."""
    with FakeTensorMode():
        scaler, p = started(kind, 3.0), six(3)
        optimizer = torch.optim.Adam([p], lr=0.1, fused=True)
        getattr(scaler, call)(optimizer)
        kinds = [type(f).__name__ for f in scaler._found_inf_per_device(optimizer).values()]
        scaler.update()
        return [kinds, type(scaler._scale).__name__, scaler._scale.shape]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios(name: str) -> None:
    result = agree(SCENARIOS[name])
    if not name.startswith(("constructed", "groups_may_be")):
        assert result.error is None, result.error
