"""Health of gradients against plain comparisons, and its table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import comparison
from support.comparison import FLOATS, assert_same
from support.gradients import parameter_with
from support.models import edges_of_half, random_list, range_of

from ampfast import GradScaler, health
from ampfast.health import GradientHealth, ParameterHealth


def started(scale: float = 4.0, **arguments: Any) -> GradScaler:
    return comparison.started(GradScaler, scale, allow_fp16=True, **arguments)


def optimizer_of(*groups: list[torch.Tensor], **arguments: Any) -> Any:
    """Optimizer with a parameter for each gradient."""
    params = [[parameter_with(g) for g in group] for group in groups]
    return torch.optim.Adam([{"params": group} for group in params], lr=0.0, **arguments)


def copies(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    return [grad.clone() for grad in grads]


def check(found: GradientHealth, groups: list[list[torch.Tensor]], scale: float) -> None:
    """Compares rows with the ranges of the scaled gradients."""
    expected = [
        (group, index, range_of(grad))
        for group, grads in enumerate(groups)
        for index, grad in enumerate(grads)
        if grad.numel()
    ]
    assert len(found.parameters) == len(expected)
    for row, (group, index, values) in zip(found.parameters, expected, strict=True):
        elements, nonzero, vanishing, subnormal, overflowing, largest, smallest = values
        assert (row.group, row.index, row.scale) == (group, index, scale)
        assert row.name == f"group {group}, parameter {index}"
        counts = (row.elements, row.zeros, row.vanishing, row.subnormal, row.overflowing)
        assert counts == (elements, elements - nonzero, vanishing, subnormal, overflowing)
        assert_same([row.scaled_maximum, row.scaled_minimum], [largest, smallest])
        assert_same(row.absolute_maximum, largest / scale)
        shares = (row.zero_share, row.vanishing_share, row.subnormal_share, row.overflowing_share)
        assert shares == tuple(count / elements for count in counts[1:])


@pytest.mark.parametrize("seed", range(12))
def test_random_gradients(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PART", 1000)
    scale = 2.0 ** (seed % 5)
    groups = [random_list(10 * seed + i, FLOATS) for i in range(3)]
    optimizer = optimizer_of(*map(copies, groups))
    check(started(scale).health(optimizer), groups, scale)
    kept = [param.grad for group in optimizer.param_groups for param in group["params"]]
    assert_same(kept, [grad for group in groups for grad in group])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bounds_of_float16(dtype: torch.dtype) -> None:
    edges = edges_of_half(dtype)
    grads = [edges, *edges.split(1)]
    check(started().health(optimizer_of(copies(grads))), [grads], 4.0)


@pytest.mark.parametrize("way", ["unscale_", "clip_grad_norm_", "deferred clip"])
@pytest.mark.parametrize("scale", [1 / 3, 2.0**12])
def test_what_was_unscaled_counts_as_scaled(scale: float, way: str) -> None:
    scaler = started(scale)
    given = [torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2.0**-16]
    optimizer = optimizer_of(copies(given), fused=way == "deferred clip")
    before = scaler.health(optimizer)
    if way == "unscale_":
        scaler.unscale_(optimizer)
    else:
        scaler.clip_grad_norm_(optimizer, math.inf, in_place=way != "deferred clip")
    (grad,) = (param.grad for param in optimizer.param_groups[0]["params"])
    scaled = grad if way == "deferred clip" else grad.double() * scaler.get_scale()
    after = scaler.health(optimizer)
    check(after, [[scaled]], scaler.get_scale())
    if scale == 2.0**12:
        assert after == before, "exact, by a power of two"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_irregular_gradients() -> None:
    sparse = torch.nn.Parameter(torch.zeros(4, 2))
    # The row 1 is there twice.
    values = torch.tensor([[1.0, 0.0], [2.0**-30, 1e6], [-1.0, 5.0]])
    indices = torch.tensor([[1, 3, 1]])
    sparse.grad = given = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)
    rows_of = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 2.0**-26]])
    compressed = torch.nn.Parameter(rows_of.to_sparse_csr())
    compressed.grad = rows_of.to_sparse_csr()
    strided = torch.tensor([[1.0, 9.0], [math.nan, 9.0], [2.0**-20, 9.0]])[:, 0]
    turned = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    turned.grad = torch.tensor([1 + 0j, 2.0**-20 - 3j]).conj()
    params = [sparse, compressed, parameter_with(strided), turned, parameter_with(torch.ones(0))]
    params.append(parameter_with(torch.ones(3).as_subclass(type("Own", (torch.Tensor,), {}))))
    params.append(torch.nn.Parameter(torch.ones(3)))  # without a gradient
    summed = torch.tensor([0.0, 5.0, 2.0**-30, 1e6])
    parts = torch.tensor([1.0, 0.0, 2.0**-20, 3.0])
    expected = [summed, torch.tensor([2.0, 2.0**-26]), strided, parts]
    check(started().health(torch.optim.SGD(params, lr=0.0)), [expected], 4.0)
    assert sparse.grad is given and not given.is_coalesced()


def test_stages_and_names() -> None:
    scaler, grads = GradScaler("cpu", enabled=False), [torch.tensor([2.0**-20, 3.0])]
    check(scaler.health(optimizer_of(copies(grads))), [grads], 1.0)
    scaler, optimizer = GradScaler("cpu"), optimizer_of([torch.ones(2)])
    with pytest.raises(AssertionError, match="Attempted health but _scale is None"):
        scaler.health(optimizer)
    scaler.scale(torch.ones(()))
    scaler.name_parameters([("weight", optimizer.param_groups[0]["params"][0])])
    assert [row.name for row in scaler.health(optimizer).parameters] == ["weight"]
    scaler.update(0.0)
    assert math.isnan(scaler.health(optimizer).parameters[0].absolute_maximum)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"health\(\) is being called after step"):
        scaler.health(optimizer)
    with pytest.raises(AttributeError, match="param_groups"):
        scaler.health([optimizer])  # type: ignore[arg-type]


def row(name: str, low: float, high: float, **counts: int) -> ParameterHealth:
    return ParameterHealth(
        *(name, 0, 0),
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
    assert many.endswith("... and 60 more")
    assert str(started().health(optimizer_of([]))) == "No gradients."
