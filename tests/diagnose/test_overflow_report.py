"""Reports of overflows, and names of parameters in them."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.captures import pretend_capture
from support.comparison import Hooked, started
from support.gradients import parameter_with
from support.steps import take_step
from torch.testing._internal.two_tensor import TwoTensor

from ampfast import GradScaler, StepGuard
from ampfast.diagnose.overflow_report import OverflowReport

INF, NAN = math.inf, math.nan
NONE = OverflowReport(None, (), ())


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


@pytest.fixture(params=["cpu", "aten"])
def scaler(request: pytest.FixtureRequest) -> GradScaler:
    return started(track="overflow", backend=request.param)


def parameters(*values: float | None, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Parameter of three elements for each value, which is in the middle of its gradient."""
    found = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in values]
    set_values(found, *values)
    return found


def set_values(params: list[Any], *values: float | None) -> None:
    for param, value in zip(params, values, strict=True):
        param.grad = None if value is None else torch.tensor([1.0, value, 2.0], dtype=param.dtype)


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=1.0)


def report_of(scaler: GradScaler, *optimizers: Any) -> OverflowReport:
    """Report after a step of these."""
    take_step(scaler, *optimizers)
    return scaler.overflow_report()


def summary(report: OverflowReport) -> list[tuple[str, str, int, int, int]]:
    return [(p.name, p.kind, p.step, p.infinities, p.nans) for p in report.totals]


def counts(report: OverflowReport) -> list[tuple[int, int, int]]:
    return [(p.index, p.infinities, p.nans) for p in report.totals]


def kinds(report: OverflowReport) -> list[tuple[int, str]]:
    return [(p.index, p.kind) for p in report.parameters]


def names(report: OverflowReport) -> list[str]:
    return [p.name for p in report.parameters]


def test_no_overflow(scaler: GradScaler) -> None:
    assert scaler.overflow_report() == NONE
    report = report_of(scaler, sgd(parameters(1.0, 2.0)))
    assert report == NONE
    assert str(report) == "No infinite or NaN gradients so far."
    # A gradient without elements beside another.
    optimizer = sgd([parameter_with(torch.zeros(0)), *parameters(INF)])
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == INF
    assert counts(report_of(scaler, optimizer)) == [(1, 1, 0)]


def test_a_pass_by_an_overridden_hook_is_marked() -> None:
    scaler = started(Hooked, track="overflow")
    assert kinds(report_of(scaler, sgd(parameters(INF)))) == [(0, "inf")]

    class Keeps(GradScaler):
        def _unscale_grads_(self, optimizer: Any, inverse: Any, found: Any, fp16: bool) -> Any:
            return {found.device: found}

    scaler = started(Keeps, track="overflow")
    with pytest.raises(RuntimeError, match="knows nothing: Keeps overrides a hook"):
        report_of(scaler, sgd(parameters(INF)))


@pytest.mark.parametrize("fused", [False, True])
def test_names_kinds_and_counts(scaler: GradScaler, fused: bool) -> None:
    params = parameters(None, None, None, None)
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = torch.optim.Adam(groups, fused=fused)
    for values in (
        (1.0, 1.0, INF, 1.0),
        (1.0, 1.0, 1.0, 1.0),
        (1.0, None, -INF, NAN),
        (1.0, None, NAN, 1.0),
        (1.0, 1.0, 1.0, 1.0),
    ):
        set_values(params, *values)
        report = report_of(scaler, optimizer)
    assert report.step == 3
    assert [(p.group, p.index, p.kind) for p in report.parameters] == [(1, 1, "nan")]
    assert summary(report) == [
        ("group 1, parameter 1", "nan", 3, 2, 1),
        ("group 1, parameter 2", "nan", 2, 0, 1),
    ]
    assert report.totals[0].optimizer_type == "Adam" and report.totals[0].optimizer == 0
    model = torch.nn.ParameterDict(zip("abcd", params, strict=True))
    scaler.name_parameters(model)
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


def test_the_loss_is_named_where_all_parameters_overflow(scaler: GradScaler) -> None:
    params = parameters(INF, NAN, None)
    params[2].requires_grad_(False)
    report = report_of(scaler, sgd(params), sgd(parameters(1.0)))
    assert report.is_everywhere
    told = (
        "These are all trainable parameters of their optimizers: the loss or a forward activation"
    )
    line = str(report).splitlines()[1]
    assert line.startswith(f"{told} was not finite, or the loss times the scale was not.")
    assert OverflowReport.of_all([report, report]).is_everywhere
    assert not OverflowReport.of_all([report, NONE]).is_everywhere
    assert not report_of(scaler, sgd(parameters(INF, 1.0))).is_everywhere
    assert not report_of(scaler, sgd(parameters(INF))).is_everywhere


@pytest.mark.parametrize("backend", ["cpu", "aten", "launched"])
def test_lists_that_change_keep_their_rows(backend: str, request: pytest.FixtureRequest) -> None:
    """An unused parameter shifts later ones in the list, not in the rows."""
    if backend == "launched":
        request.getfixturevalue("launcher")
    scaler = started(track="overflow", backend="aten" if backend == "aten" else "cpu")
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 4, 5, 3)]
    optimizer = sgd(params)
    memory, places = torch.ones(64), (0, 16, 32, 0)  # the last is in the memory of the first
    lists = [((0, 1, 2), 1), ((0, 2), 2), ((2,), 2), ((1, 2), 1)]
    for used, bad in lists + [((i,), i) for i in (0, 3, 0, 3)]:
        for i, param in enumerate(params):
            param.grad = memory[places[i] :][: param.numel()] if i in used else None
        memory.fill_(1.0)
        memory[places[bad]] = INF
        assert kinds(report_of(scaler, optimizer)) == [(bad, "inf")]
    totals = [(each.index, each.infinities) for each in scaler.overflow_report().totals]
    assert totals == [(index, 2) for index in range(4)]


def test_several_optimizers_and_dtypes() -> None:
    scaler = started(track="overflow", allow_fp16=True)
    first = parameters(1.0, NAN) + parameters(INF, dtype=torch.float16)
    second = parameters(INF, dtype=torch.float64) + parameters(1.0, dtype=torch.bfloat16)
    optimizers = [sgd(first), torch.optim.Adagrad(second)]
    scaler.step_and_update(*optimizers)
    rows = scaler.overflow_report().parameters
    assert [(p.optimizer, p.optimizer_type, p.index, p.kind) for p in rows] == [
        *((0, "SGD", 1, "nan"), (0, "SGD", 2, "inf")),
        (1, "Adagrad", 0, "inf"),
    ]
    for param in first + second:
        param.grad = torch.ones_like(param)
    second[1].grad[0] = NAN
    report = report_of(scaler, *optimizers)
    assert [(p.optimizer, p.index) for p in report.parameters] == [(1, 1)] and report.step == 1


def test_an_optimizer_that_had_no_gradients_has_no_overflows() -> None:
    guard, idle = StepGuard(track="overflow"), sgd(parameters(None))
    assert report_of(guard, idle) == NONE
    assert kinds(report_of(guard, idle, sgd(parameters(INF)))) == [(0, "inf")]


def test_a_deleted_optimizer_is_not_reported_and_keeps_no_parameters() -> None:
    scaler = started(track="overflow")

    def train() -> Any:
        scaler.name_parameters(model := net())
        for param in model.parameters():
            param.grad = torch.full_like(param, INF)
        assert names(report_of(scaler, sgd(model.parameters())))[0] == "0.weight"
        return weakref.ref(model[0].weight)

    weight = train()
    gc.collect()
    assert weight() is None and scaler.overflow_report() == NONE
    other = sgd(parameters(NAN))
    assert [p.optimizer for p in report_of(scaler, other).totals] == [1]


def test_irregular_gradients() -> None:
    scaler, sparse = started(track="overflow"), torch.nn.Parameter(torch.zeros(4, 2))
    values = [[1.0, 2.0], [INF, 1.0]]
    sparse.grad = torch.sparse_coo_tensor([[1, 3]], values, (4, 2), check_invariants=True)
    strided = torch.tensor([[1.0, 9.0], [NAN, 9.0]])[:, 0]
    dense = [parameter_with(each) for each in (strided, torch.ones(6)[::2], torch.ones(0))]
    pair = TwoTensor(torch.tensor([INF]), torch.tensor([INF]))  # a subclass is not tracked
    twin = torch.nn.Parameter(pair)
    twin.grad = pair.clone()
    optimizer = torch.optim.SGD([sparse, *dense, twin], lr=1.0, foreach=False)
    scaler.unscale_(optimizer)
    assert kinds(scaler.overflow_report()) == [(0, "inf"), (1, "nan")]


def test_a_scale_of_zero_makes_zeros_infinite_as_others() -> None:
    scaler = started(track="overflow")
    scaler._scale = torch.zeros(())
    optimizer = sgd([parameter_with(torch.tensor(values)) for values in ([0.0], [0.0, 1.0])])
    assert kinds(report_of(scaler, optimizer)) == [(0, "inf"), (1, "inf")]


def test_parameters_that_are_added_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, params = started(track="overflow"), parameters(INF, 1.0)
    optimizer: Any = SimpleNamespace(param_groups=[{"params": params}], step=lambda: None)
    report_of(scaler, optimizer)
    params += parameters(NAN)
    set_values(params[:2], 1.0, INF)
    # Before a pass over the new parameter, and after, which begins to count anew.
    assert counts(scaler.overflow_report()) == [(0, 1, 0)]
    assert counts(report_of(scaler, optimizer)) == [(1, 1, 0), (2, 0, 1)]
    # Others in their place, in equal number.
    params[:] = parameters(1.0, 1.0, 1.0)
    assert report_of(scaler, optimizer).totals == ()
    pretend_capture(monkeypatch)
    params += parameters(1.0)
    with pytest.raises(RuntimeError, match="cannot capture a change of an optimizer's parameters"):
        scaler.unscale_(optimizer)


def test_names_that_do_not_match_the_optimizer() -> None:
    scaler, params = started(track="overflow"), parameters(NAN, INF)
    scaler.name_parameters(net())
    optimizer = sgd(params)
    assert names(report_of(scaler, optimizer)) == [f"group 0, parameter {i}" for i in range(2)]
    # Some parameters, and all of some optimizers, may have no names.
    scaler.name_parameters(model := torch.nn.ParameterDict({"mine": params[0]}))
    assert names(scaler.overflow_report()) == ["mine", "group 0, parameter 1"] and model
    set_values(params, NAN, INF)
    report = report_of(scaler, optimizer, unnamed := sgd(parameters(INF)))
    assert names(report)[2:] == ["group 0, parameter 0"] and unnamed


def test_what_is_refused() -> None:
    given: Any = net().named_parameters()
    for track in (None, "overflow"):
        with pytest.raises(TypeError, match=r"takes a torch.nn.Module, got generator"):
            started(track=track).name_parameters(given)
    for wrong in ("all", "Overflow", "", 3, True, ["overflow"]):
        with pytest.raises(ValueError, match="track must be"):
            GradScaler("cpu", track=wrong)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="made with track='overflow'"):
        started().overflow_report()


def test_the_last_name_counts() -> None:
    model, scaler = net(), started(track="overflow")
    model[0].weight = model[2].weight = torch.nn.Parameter(torch.ones(4, 3))  # of two modules
    optimizer = sgd(model[0].parameters())
    for param in model[0].parameters():
        param.grad = torch.full_like(param, INF)
    scaler.step(optimizer)
    for given, expected in (
        (model, ["0.weight", "0.bias"]),
        (torch.nn.ModuleDict({"own": model[0]}), ["own.weight", "own.bias"]),
        (model, ["0.weight", "0.bias"]),
    ):
        scaler.name_parameters(given)
        assert names(scaler.overflow_report()) == expected
    scaler.update()
    model[0].bias = optimizer.param_groups[0]["params"][1] = parameter_with(torch.full((4,), INF))
    assert names(report_of(scaler, optimizer)) == ["0.weight", "0.bias"]
