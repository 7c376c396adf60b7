"""Reports of overflows, and names of parameters in them."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from support import scalers
from support.comparison import assert_same
from support.gradients import parameter_with
from support.scalers import TorchScaler
from torch.testing._internal.two_tensor import TwoTensor

from ampfast import GradScaler, capture
from ampfast.tracking import OverflowReport


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def started(track: str | None = "overflow", **arguments: Any) -> GradScaler:
    return scalers.started(GradScaler, 4.0, track=track, **arguments)


def parameters(*values: float | None, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Parameter of three elements for each value, which is in the middle of its gradient."""
    found = []
    for value in values:
        param = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        if value is not None:
            param.grad = torch.tensor([1.0, value, 2.0], dtype=dtype)
        found.append(param)
    return found


def set_values(params: list[Any], *values: float | None) -> None:
    for param, value in zip(params, values, strict=True):
        param.grad = None if value is None else torch.tensor([1.0, value, 2.0], dtype=param.dtype)


def summary(report: OverflowReport) -> list[tuple[str, str, int, int, int]]:
    return [(p.name, p.kind, p.step, p.infinities, p.nans) for p in report.totals]


BACKENDS = ("cpu", "aten")


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_overflow(backend: str) -> None:
    scaler = started(backend=backend)
    assert scaler.overflow_report() == OverflowReport(None, (), ())
    params = parameters(1.0, 2.0)
    scaler.step(torch.optim.SGD(params, lr=1.0))
    scaler.update()
    report = scaler.overflow_report()
    assert report == OverflowReport(None, (), ())
    assert str(report) == "No infinite or NaN gradients so far."


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_without_elements(backend: str) -> None:
    scaler = started(backend=backend)
    params = [torch.nn.Parameter(torch.zeros(0)), *parameters(math.inf)]
    params[0].grad = torch.zeros(0)
    for some in (params[:1], params):
        optimizer = torch.optim.SGD(some, lr=1.0)
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert norm.item() == (0.0 if len(some) == 1 else math.inf)
    assert [p.index for p in scaler.overflow_report().totals] == [1]


def test_a_subclass_is_not_tracked() -> None:
    scaler, params = started(), parameters(math.inf)
    pair = TwoTensor(torch.tensor([math.inf]), torch.tensor([math.inf]))
    params.append(torch.nn.Parameter(pair))
    params[1].grad = pair.clone()
    optimizer = torch.optim.SGD(params, lr=1.0, foreach=False)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_skipped(optimizer)
    assert [p.index for p in scaler.overflow_report().totals] == [0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_names_kinds_and_counts(backend: str, fused: bool) -> None:
    scaler = started(backend=backend)
    params = parameters(None, None, None, None)
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = torch.optim.Adam(groups, fused=fused)
    steps = [
        (1.0, 1.0, math.inf, 1.0),
        (1.0, 1.0, 1.0, 1.0),
        (1.0, None, -math.inf, math.nan),
        (1.0, None, math.nan, 1.0),
        (1.0, 1.0, 1.0, 1.0),
    ]
    for values in steps:
        set_values(params, *values)
        scaler.step(optimizer)
        scaler.update()
    report = scaler.overflow_report()
    assert report.step == 3
    assert [(p.group, p.index, p.kind) for p in report.parameters] == [(1, 1, "nan")]
    assert summary(report) == [
        ("group 1, parameter 1", "nan", 3, 2, 1),
        ("group 1, parameter 2", "nan", 2, 0, 1),
    ]
    assert report.totals[0].optimizer_type == "Adam" and report.totals[0].optimizer == 0
    scaler.name_parameters(zip("abcd", params, strict=True))
    report = scaler.overflow_report()
    assert [p.name for p in report.totals] == ["c", "d"]
    assert str(report).splitlines() == [
        "In step 3, 1 parameter's gradient was not finite.",
        "parameter  optimizer  kind  steps with inf  with NaN",
        "c            0: Adam   nan               2         1",
        "",
        "In earlier steps only:",
        "parameter  optimizer  kind  steps with inf  with NaN",
        "d            0: Adam   nan               0         1",
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_is_named_where_all_parameters_overflow(backend: str) -> None:
    scaler = started(backend=backend)
    params, others = parameters(math.inf, math.nan, None), parameters(1.0)
    params[2].requires_grad_(False)
    optimizers = [torch.optim.SGD(params, lr=1.0), torch.optim.SGD(others, lr=1.0)]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    report = scaler.overflow_report()
    assert report.is_everywhere
    told = "These are all trainable parameters of their optimizer: the loss or a forward activation"
    line = str(report).splitlines()[1]
    assert line.startswith(f"{told} was not finite, or the loss times the scale was not.")
    assert OverflowReport.of_all([report, report]).is_everywhere
    assert not OverflowReport.of_all([report, OverflowReport(None, (), ())]).is_everywhere
    set_values(params, math.inf, 1.0, None)
    scaler.step(optimizers[0])
    scaler.update()
    report = scaler.overflow_report()
    assert not report.is_everywhere and "forward activation" not in str(report)


def test_all_parameters_are_those_that_can_overflow() -> None:
    scaler = started()
    params = [*parameters(math.inf, math.inf), torch.nn.Parameter(torch.ones(0))]
    params[2].grad = torch.ones(0)
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.overflow_report().is_everywhere
    # A frozen one with a gradient left, in the place of one that is finite.
    params[0].requires_grad_(False)
    params[2].requires_grad_(False)
    assert scaler.overflow_report().is_everywhere is False  # one alone
    frozen, *others = parameters(math.inf, math.inf, 1.0)
    frozen.requires_grad_(False)
    scaler.step(other := torch.optim.SGD([frozen, *others], lr=1.0))
    scaler.update()
    report = scaler.overflow_report()
    assert [row.optimizer_type for row in report.parameters] == [type(other).__name__] * 2
    assert not report.is_everywhere


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_used_value_counts(backend: str) -> None:
    # Divided by 2^-120, a large value overflows, as found_inf reports.
    scaler = GradScaler("cpu", init_scale=2.0**-120, track="overflow", backend=backend)
    scaler.scale(torch.ones(()))
    params = parameters(1.0, 2.0**20)
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler.step(optimizer)
    assert scaler.step_skipped(optimizer)
    scaler.update()
    assert [(p.index, p.kind) for p in scaler.overflow_report().parameters] == [(1, "inf")]
    # Infinity divided by infinity is NaN.
    scaler.update(math.inf)
    set_values(params, 1.0, math.inf)
    scaler.step(optimizer)
    assert [(p.index, p.kind) for p in scaler.overflow_report().parameters] == [(1, "nan")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_iteration_counts_once(backend: str) -> None:
    scaler = started(backend=backend)
    params = parameters(math.inf)
    optimizer: Any = torch.optim.Adam(params, fused=True)
    for _ in range(2):
        set_values(params, math.inf)
        scaler.unscale_(optimizer)
        optimizer.grad_scale = torch.ones(())  # the user's own: the quotients are checked again
        scaler.step(optimizer)
        scaler.update()
    assert summary(scaler.overflow_report()) == [("group 0, parameter 0", "inf", 1, 2, 0)]


def test_several_optimizers_and_dtypes() -> None:
    scaler = started(allow_fp16=True)
    first = parameters(1.0, math.nan) + parameters(math.inf, dtype=torch.float16)
    second = parameters(math.inf, dtype=torch.float64) + parameters(1.0, dtype=torch.bfloat16)
    optimizers = [torch.optim.SGD(first, lr=1.0), torch.optim.Adagrad(second)]
    scaler.step_and_update(*optimizers)
    report = scaler.overflow_report()
    assert report.step == 0
    assert [(p.optimizer, p.optimizer_type, p.index, p.kind) for p in report.parameters] == [
        *((0, "SGD", 1, "nan"), (0, "SGD", 2, "inf")),
        (1, "Adagrad", 0, "inf"),
    ]
    for params in (first, second):
        for param in params:
            param.grad = torch.ones_like(param)
    second[1].grad[0] = math.nan
    scaler.step_and_update(*optimizers)
    assert [(p.optimizer, p.index) for p in scaler.overflow_report().parameters] == [(1, 1)]
    del optimizers[0], first
    gc.collect()
    assert {p.optimizer_type for p in scaler.overflow_report().totals} == {"Adagrad"}


def test_irregular_gradients() -> None:
    scaler = started()
    sparse = torch.nn.Parameter(torch.zeros(4, 2))
    sparse.grad = torch.sparse_coo_tensor(
        [[1, 3]], [[1.0, 2.0], [math.inf, 1.0]], (4, 2), check_invariants=True
    )
    strided = parameter_with(torch.tensor([[1.0, 9.0], [math.nan, 9.0]])[:, 0])
    fine = parameter_with(torch.ones(6)[::2])
    empty = parameter_with(torch.ones(0))
    params = [sparse, strided, fine, empty]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler.unscale_(optimizer)
    found = [(p.index, p.kind) for p in scaler.overflow_report().parameters]
    assert found == [(0, "inf"), (1, "nan")]


@pytest.mark.parametrize("track", ["all", "Overflow", "", 3, True, ["overflow"]])
def test_bad_track(track: Any) -> None:
    with pytest.raises(ValueError if isinstance(track, str) else TypeError, match="track must be"):
        GradScaler("cpu", track=track)


def test_without_track() -> None:
    scaler = started(None)
    scaler.name_parameters(net())
    with pytest.raises(RuntimeError, match="made with track='overflow'"):
        scaler.overflow_report()
    assert "_tracking" not in vars(scaler)


def test_disabled() -> None:
    scaler = GradScaler("cpu", enabled=False, track="overflow")
    scaler.name_parameters(net())
    assert scaler.overflow_report().step is None


class Own(GradScaler):
    """Reads the gradients itself."""

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, torch.Tensor]:
        return {torch.device("cpu"): torch.zeros(())}


@pytest.mark.parametrize("track", ["overflow", "modules", "norms"])
def test_a_disabled_scaler_clips(track: str) -> None:
    scaler = GradScaler("cpu", enabled=False, track=track)
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad, optimizer = torch.tensor([3.0, 4.0]), torch.optim.SGD([param], lr=1.0)
    assert scaler.grad_norm(optimizer) == scaler.clip_grad_norm_(optimizer, 1.0) == 5.0
    assert param.grad.norm() == pytest.approx(1.0, abs=1e-6)
    assert scaler.overflow_report().step is None


def test_a_disabled_scaler_has_nothing_to_override() -> None:
    assert Own("cpu", enabled=False, track="overflow").overflow_report().step is None


class Calls(GradScaler):
    """Override that calls the original."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(*args)


@pytest.mark.parametrize("fused", [False, True])
def test_overridden_hooks(fused: bool) -> None:
    for kind in (Own, Calls):
        scaler = kind("cpu", init_scale=4.0, track="overflow")
        scaler.scale(torch.ones(()))
        params = parameters(math.inf)
        optimizer = torch.optim.Adam(params, fused=fused)
        scaler.step(optimizer)
        if kind is Own:
            with pytest.raises(RuntimeError, match="Own overrides a hook"):
                scaler.overflow_report()
        else:
            assert summary(scaler.overflow_report()) == [("group 0, parameter 0", "inf", 0, 1, 0)]


class Bare:
    """An "optimizer" without weak references, with new groups at every access."""

    __slots__ = ("params",)

    def __init__(self, params: list[Any]) -> None:
        self.params = params

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.params)}]

    def step(self) -> None:
        pass


def test_parameters_that_are_added_and_removed() -> None:
    scaler = started()
    params = parameters(math.inf, 1.0)
    optimizer: Any = Bare(params)
    scaler.step(optimizer)
    scaler.update()
    params += parameters(math.nan)
    set_values(params[:2], 1.0, math.inf)
    report = scaler.overflow_report()  # before a pass over the new parameter
    assert [p.index for p in report.totals] == [0]
    scaler.step(optimizer)
    scaler.update()
    counts = [(p.index, p.infinities, p.nans) for p in scaler.overflow_report().totals]
    assert counts == [(0, 1, 0), (1, 1, 0), (2, 0, 1)]
    del params[1:]
    set_values(params, 1.0)
    scaler.step(optimizer)
    scaler.update()
    counts = [(p.index, p.infinities, p.nans) for p in scaler.overflow_report().totals]
    assert counts == [(0, 1, 0)]
    # Others in their place, in equal number.
    bad, params[:] = params[0], parameters(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.overflow_report().totals == ()
    bad.grad.fill_(math.nan)
    params[:] = [*parameters(1.0), bad, *params]
    scaler.step(optimizer)
    scaler.update()
    scaler.name_parameters([("bad", bad)])
    assert [(p.name, p.index) for p in scaler.overflow_report().totals] == [("bad", 1)]


def test_counts_are_not_those_of_a_parameter_that_died() -> None:
    """Whose address a new one would take soon if nothing held the old one."""
    scaler = started()
    optimizer: Any = Bare(parameters(math.inf, math.inf))
    scaler.name_parameters(zip("ab", optimizer.params, strict=True))
    scaler.step(optimizer)
    scaler.update()
    died = weakref.ref(optimizer.params[0])
    optimizer.params[0] = None
    values = torch.zeros(1000, 3).unbind()
    others = [torch.nn.Parameter(value) for value in values]
    others.sort(key=lambda param: id(param) != id(died()))
    optimizer.params[0] = others[0]
    scaler.name_parameters([("c", others[0])])
    for first, expected in ((1.0, []), (math.nan, [("c", "nan", 2, 0, 1)])):
        set_values(optimizer.params, first, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert summary(scaler.overflow_report()) == [*expected, ("b", "inf", 0, 1, 0)]
    gc.collect()
    assert died() is None, "it is held until the next step at most"


def test_parameters_that_change_groups() -> None:
    scaler = started()
    optimizer = torch.optim.SGD([{"params": parameters(1.0)}, {"params": parameters(math.inf)}])
    scaler.step(optimizer)
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop())
    scaler.update()
    scaler.step(optimizer)
    [row] = scaler.overflow_report().totals
    assert (row.group, row.index, row.infinities) == (0, 1, 2)


class OneShot:
    """An "optimizer" whose parameters can be iterated over once."""

    def __init__(self, params: list[Any], fused: bool) -> None:
        self.params = params
        self.param_groups = [{"params": iter([param])} for param in params]
        if fused:
            self._step_supports_amp_scaling = True

    def step(self) -> None:
        for param in self.params:
            param.data -= param.grad


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [2.0, math.inf])
def test_groups_of_iterators(bad: float, fused: bool) -> None:
    sides = []
    for scaler in (started(), TorchScaler("cpu", init_scale=4.0)):
        scaler.scale(torch.ones(()))
        params = parameters(1.0, bad)
        optimizer: Any = OneShot(params, fused)
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        sides.append([[param, param.grad] for param in params] + [scaler.get_scale()])
        if isinstance(scaler, GradScaler):
            found = [(p.group, p.index) for p in scaler.overflow_report().totals]
            assert found == ([(1, 0)] if bad == math.inf else [])
    assert_same(*sides)


def test_a_report_consumes_no_iterator() -> None:
    scaler, params = started(), parameters(math.inf)
    optimizer: Any = OneShot(params, fused=False)
    for count in (1, 2):
        scaler.step(optimizer)
        scaler.update()
        optimizer.param_groups = [{"params": iter(params)}]
        assert [p.infinities for p in scaler.overflow_report().totals] == [count]


def test_new_parameters_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, params = started(), parameters(1.0)
    optimizer: Any = Bare(params)
    scaler.unscale_(optimizer)
    scaler.update()
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    scaler.unscale_(optimizer)
    scaler.update()
    params[:] = parameters(1.0)
    with pytest.raises(RuntimeError, match="cannot capture a change of an optimizer's parameters"):
        scaler.unscale_(optimizer)
    assert params[0].grad.tolist() == [1.0, 1.0, 2.0]


def test_copies_start_afresh() -> None:
    scaler = started()
    params = parameters(math.inf)
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler.name_parameters([("a", params[0])])
    scaler.step(optimizer)
    scaler.update()
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.overflow_report().totals == ()
        twin.scale(torch.ones(()))
        set_values(params, math.nan)
        twin.step(optimizer)
        twin.update()
        assert summary(twin.overflow_report()) == [("group 0, parameter 0", "nan", 1, 0, 1)]
    assert [p.name for p in scaler.overflow_report().totals] == ["a"]


def test_names_that_are_partly_missing() -> None:
    scaler = started()
    params = parameters(math.nan, math.inf)
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler.name_parameters([("first", params[0])])
    scaler.step(optimizer)
    names = [p.name for p in scaler.overflow_report().parameters]
    assert names == ["first", "group 0, parameter 1"]


def test_names_that_do_not_match_the_optimizer() -> None:
    scaler = started()
    params, others = parameters(math.nan), parameters(1.0)
    scaler.name_parameters([("other", others[0])])
    optimizer = torch.optim.SGD(params, lr=1.0)
    with pytest.raises(ValueError, match="none of the optimizers' 1 parameters"):
        scaler.health(optimizer)
    scaler.step(optimizer)
    with pytest.raises(ValueError, match="none of the optimizers' 1 parameters"):
        scaler.overflow_report()
    scaler.name_parameters([("mine", params[0])])
    assert scaler.overflow_report().parameters[0].name == "mine"
    # Some of several optimizers may have no names.
    unnamed = torch.optim.SGD(parameters(math.inf), lr=1.0)
    scaler.step(unnamed)
    names = [p.name for p in scaler.overflow_report().parameters]
    assert names == ["mine", "group 0, parameter 0"]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (7, TypeError, "torch.nn.Module or pairs"),
        ("weight", TypeError, "torch.nn.Module or pairs"),
        ([torch.zeros(2)], TypeError, "parameter, as from .* got Tensor"),
        ([("a", 3)], TypeError, "got str and int"),
        ([(3, torch.zeros(2))], TypeError, "got int and Tensor"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], ValueError, "the name 'a'"),
    ],
)
@pytest.mark.parametrize("track", [None, "overflow"])
def test_bad_names(track: str | None, given: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        started(track).name_parameters(given)


@pytest.mark.parametrize("way", ["module", "pairs", "another module"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_names_and_counts_outlive_a_conversion_by_swapping(when: str, way: str) -> None:
    model = net()
    scaler = started()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if way == "module":
            scaler.name_parameters(model)
        elif way == "pairs":
            scaler.name_parameters(model.named_parameters())
        else:
            scaler.name_parameters(torch.nn.Sequential(*model))  # which is gone at once
        if when == "before":
            model.double()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        model[2].bias.grad[0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        del param
        model.to(torch.float32 if when == "before" else torch.float64)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        model.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    (row,) = scaler.overflow_report().parameters
    assert (row.name, row.nans) == ("2.bias", 2)


def test_the_last_name_counts() -> None:
    model, scaler = net(), started()
    model[2].weight = torch.nn.Parameter(torch.ones(4, 3))
    model[0].weight = model[2].weight  # one parameter in two modules
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    for param in model[0].parameters():
        param.grad = torch.full_like(param, math.inf)
    scaler.step(optimizer)

    def names() -> list[str]:
        return [p.name for p in scaler.overflow_report().parameters]

    scaler.name_parameters(model)
    assert names() == ["0.weight", "0.bias"]
    scaler.name_parameters(torch.nn.ModuleDict({"own": model[0]}))
    assert names() == ["own.weight", "own.bias"]
    scaler.name_parameters([("given", model[0].weight)])
    assert names() == ["given", "own.bias"]
    scaler.name_parameters(model)
    assert names() == ["0.weight", "0.bias"]


def test_a_parameter_that_replaces_another_in_its_module_has_the_name() -> None:
    model, scaler = net(), started()
    scaler.name_parameters(model)
    model[2].bias = torch.nn.Parameter(torch.zeros(2))
    model[2].bias.grad = torch.full((2,), math.inf)
    scaler.step(torch.optim.SGD([model[2].bias], lr=1.0))
    assert scaler.overflow_report().parameters == ()  # of an optimizer that is gone
    optimizer = torch.optim.SGD([model[2].bias], lr=1.0)
    scaler.update()
    scaler.step(optimizer)
    assert [p.name for p in scaler.overflow_report().parameters] == ["2.bias"]


def test_pairs_are_forgotten_with_their_parameters() -> None:
    scaler = started()
    model = net()
    alive = weakref.ref(model[0].weight)
    scaler.name_parameters(model.named_parameters())
    del model
    gc.collect()
    scaler.name_parameters(net())  # the next call
    assert alive() is None


def test_names_do_not_keep_parameters() -> None:
    scaler = started()
    model = net()
    alive = weakref.ref(model[0].weight)
    scaler.name_parameters(model)
    del model
    gc.collect()
    assert alive() is None
