"""Gradient health against plain comparisons, its table and its plot."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from support.comparison import FLOATS, assert_same
from support.gradients import parameter_with
from support.optimizers import OPTIMIZERS
from support.tracking_reference import edges_of_half, random_list, range_of
from support.twins import side

from ampfast import GradScaler, report, tracking
from ampfast.tracking import GradientHealth, ParameterHealth

BACKENDS = ("cpu", "aten")


def started(scale: float = 4.0, **arguments: Any) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=scale, track="health", allow_fp16=True, **arguments)
    scaler.scale(torch.ones(()))
    return scaler


def optimizer_of(*groups: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Optimizer with a parameter for each gradient."""
    params = [[parameter_with(g) for g in group] for group in groups]
    return torch.optim.SGD([{"params": group} for group in params], lr=0.0)


def check(health: GradientHealth, groups: list[list[torch.Tensor]], scale: float) -> None:
    """Compares rows with the ranges of the scaled gradients."""
    expected = [
        (group, index, range_of(grad))
        for group, grads in enumerate(groups)
        for index, grad in enumerate(grads)
        if grad.numel()
    ]
    assert len(health.parameters) == len(expected)
    for row, (group, index, values) in zip(health.parameters, expected, strict=True):
        elements, nonzero, vanishing, subnormal, overflowing, largest, smallest = values
        assert (row.group, row.index, row.scale) == (group, index, scale)
        counts = (row.elements, row.zeros, row.vanishing, row.subnormal, row.overflowing)
        assert counts == (elements, elements - nonzero, vanishing, subnormal, overflowing)
        assert_same([row.scaled_maximum, row.scaled_minimum], [largest, smallest])
        assert_same(row.absolute_maximum, largest / scale)
        shares = (row.zero_share, row.vanishing_share, row.subnormal_share, row.overflowing_share)
        assert shares == tuple(count / elements for count in counts[1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(12))
def test_random_gradients(backend: str, seed: int) -> None:
    scale = 2.0 ** (seed % 5)
    scaler = started(scale, backend=backend)
    groups = [random_list(10 * seed + i, FLOATS) for i in range(3)]
    optimizer = optimizer_of(*[[g.clone() for g in group] for group in groups])
    scaler.step(optimizer)
    scaler.update()
    check(scaler.health(), groups, scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_of_float16(backend: str, dtype: torch.dtype) -> None:
    edges = edges_of_half(dtype)
    grads = [edges, *edges.split(1)]
    scaler = started(backend=backend)
    scaler.unscale_(optimizer := optimizer_of([g.clone() for g in grads]))
    check(scaler.health(), [grads], 4.0)
    assert optimizer.param_groups[0]["params"][0].grad is not None


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("explicit", [False, True])
def test_every_way_to_step(kind: str, explicit: bool) -> None:
    run = side(GradScaler, kind, init_scale=2.0**12, track="health")
    for seed in range(4):
        run.optimizer.zero_grad()
        run.scaler.scale(run.loss(seed)).backward()
        grads = [p.grad.clone() for p in run.model.parameters()]
        if seed == 3:
            run.scaler.step_and_update(run.optimizer)
            assert len(run.scaler.health().parameters) == len(grads)
            break
        if explicit:
            run.scaler.unscale_(run.optimizer)
        run.scaler.step(run.optimizer)
        run.scaler.update()
    found = [(p.elements, p.scaled_maximum) for p in run.scaler.health().parameters]
    assert found == [(g.numel(), g.double().abs().max().item()) for g in grads]


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_is_tracked(backend: str, in_place: bool, norm_type: float) -> None:
    scaler = started(backend=backend)
    grads = [torch.tensor([1.0, 0.0, 2.0**-20]), torch.tensor([3.0, 2.0**-30])]
    for bad, kind in ((1.0, None), (math.inf, "inf"), (math.nan, "nan")):
        params = [parameter_with(g.clone()) for g in grads]
        params[1].grad[0] = bad
        expected = [p.grad.clone() for p in params]
        optimizer: Any = torch.optim.Adam(params, lr=0.0, fused=not in_place)
        scaler.clip_grad_norm_(optimizer, 1e-3, norm_type, in_place=in_place)
        scaler.step(optimizer)
        scaler.update(4.0)
        check(scaler.health(), [expected], 4.0)
        found = [(p.index, p.kind) for p in scaler.overflow_report().parameters]
        assert found == ([(1, kind)] if kind else [])
        del optimizer


def test_the_scale_is_that_of_the_gradients() -> None:
    scaler = started(8.0, growth_interval=1)
    optimizer = optimizer_of([torch.tensor([2.0, -16.0])])
    for scale in (8.0, 16.0):
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([2.0, -16.0])
        scaler.step_and_update(optimizer)
        assert scaler.get_scale() == 2 * scale
        [row] = scaler.health().parameters
        assert (row.scale, row.scaled_maximum, row.absolute_maximum) == (scale, 16.0, 16.0 / scale)
    scaler.update(math.inf)
    scaler.unscale_(optimizer)
    assert scaler.health().parameters[0].scale == math.inf


def test_only_the_last_iteration_counts() -> None:
    scaler = started()
    first, second = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([first, second], lr=0.0)
    other = optimizer_of([torch.full((7,), math.nan)])
    for seed, used in enumerate([(first, second), (second,), (first,), ()]):
        first.grad = second.grad = None
        for param in used:
            param.grad = torch.full_like(param, seed + 1.0)
        if used:
            scaler.step(optimizer)
        else:
            scaler.unscale_(optimizer)
        if not seed:
            scaler.step(other)
        scaler.update(4.0)
        rows = scaler.health().parameters
        assert [(p.optimizer, p.elements) for p in rows] == [
            *((0, p.numel()) for p in used),
            (1, 7),
        ]
        assert all(p.scaled_maximum == seed + 1.0 for p in rows if p.optimizer == 0)


def test_irregular_gradients() -> None:
    scaler = started()
    sparse = torch.nn.Parameter(torch.zeros(4, 2))
    indices = torch.tensor([[1, 3]])
    values = torch.tensor([[1.0, 0.0], [2.0**-30, 1e6]])
    sparse.grad = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)
    strided = torch.tensor([[1.0, 9.0], [math.nan, 9.0], [2.0**-20, 9.0]])[:, 0]
    params = [sparse, parameter_with(strided), parameter_with(torch.ones(0))]
    optimizer = torch.optim.SGD(params, lr=0.0)
    expected = [range_of(values), range_of(strided)]
    scaler.unscale_(optimizer)
    rows = scaler.health().parameters
    assert [p.index for p in rows] == [0, 1]
    for row, (elements, nonzero, vanishing, subnormal, over, _, _) in zip(
        rows, expected, strict=True
    ):
        counts = (row.elements, row.zeros, row.vanishing, row.subnormal, row.overflowing)
        assert counts == (elements, elements - nonzero, vanishing, subnormal, over)


def test_nothing_measured() -> None:
    health = started().health()
    assert health == GradientHealth(())
    assert str(health) == "No gradients measured so far."
    with pytest.raises(ValueError, match="nothing to plot"):
        report.plot_health(health)


def row(name: str, low: float, high: float, **counts: int) -> ParameterHealth:
    return ParameterHealth(
        *(name, 0, "Adam", 0, 0),
        **{"elements": 20_000, "zeros": 0, "vanishing": 0, "subnormal": 0, "overflowing": 0}
        | counts,
        scaled_maximum=high,
        scaled_minimum=low,
        scale=1024.0,
    )


def test_table_is_worst_first() -> None:
    fine, tiny = row("fine", 1.0, 4.0), row("tiny", 1e-9, 1.0, vanishing=1, subnormal=10_000)
    large = row("large", 1.0, math.inf, overflowing=50, zeros=2)
    lines = str(GradientHealth((fine, tiny, large))).splitlines()
    assert [line.split()[0] for line in lines] == ["parameter", "large", "tiny", "fine"]
    assert lines[0].split()[1:4] == ["elements", "max", "scaled"]
    assert lines[1].split()[1:] == ["20,000", "inf", "inf", "1", "0.01%", "-", "-", "0.25%", "1024"]
    assert lines[2].split()[5:] == ["-", "<0.01%", "50.00%", "-", "1024"]
    assert len({len(line) for line in lines}) == 1
    many = str(GradientHealth(tuple(row(f"layer {i}", 1.0, 2.0) for i in range(100))))
    assert many.endswith(f"... and {100 - tracking.MOST_LINES} more")


def test_rows_are_plain_data() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        row("a", 1.0, 2.0).elements = 3  # type: ignore[misc]
    assert math.isnan(dataclasses.replace(row("a", 1.0, 2.0), scale=0.0).absolute_maximum)


def layers(count: int) -> GradientHealth:
    """Layers from large to small; some overflow, vanish, or have no finite value."""
    rows = []
    for i in range(count):
        middle = 14 - 36 * i / count
        low, high = 2.0 ** (middle - 12), 2.0 ** (middle + 6)
        counts = {"overflowing": int(high > 65504), "vanishing": int(low < 2.0**-24)}
        rows.append(row(f"encoder.layer.{i}.attention.output.dense.weight", low, high, **counts))
    if count > 2:
        rows[1] = row("has.nan", 1.0, math.nan, overflowing=1)
        rows[2] = row("all.zero", 0.0, 0.0, zeros=20_000)
    return GradientHealth(tuple(rows))


@pytest.mark.parametrize("count", [1, 3, 30, 200])
def test_plot(count: int, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "health.png"
    figure = report.plot_health(layers(count), path)
    assert path.stat().st_size > 10_000
    [panel] = figure.axes
    bars = [patch for patch in panel.patches if patch.get_height() < 0.9]
    assert len(bars) == (count - 1 if count > 2 else count)
    first = bars[0]
    assert (first.get_x(), first.get_x() + first.get_width()) == (2.0, 20.0)
    spans = sorted((p.get_x(), p.get_width()) for p in panel.patches if p not in bars)
    assert spans == [(-24, 10), (-14, 30)]
    marks = [line.get_marker() for line in panel.lines]
    assert marks == (["x", "o"] if count > 2 else []), "not finite, all zero"


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot_health(layers(3))
    with pytest.raises(TypeError, match="must be a GradientHealth, got int"):
        report.plot_health(3)  # type: ignore[arg-type]
