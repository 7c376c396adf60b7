"""Norms of each parameter's gradient, kept on the device until they are asked for."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from support.comparison import FLOATS, HookedUnscale, assert_same, started
from support.steps import take_step

import ampfast
from ampfast import GradScaler, StepGuard

SHAPES = ((5_000,), (3, 7), (), (70_000,))

KINDS: dict[str, Any] = {
    "plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "masters": lambda params: ampfast.master_weights_(torch.optim.AdamW(params, lr=0.1)),
}
WAYS = ("step", "unscale", "clip", "clip 3")
BY_KIND = pytest.mark.parametrize(
    ("kind", "way"),
    # Only fused optimizers clip in their step.
    [*itertools.product(KINDS, WAYS), ("fused", "defer")],
)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]


def fill(params: list[torch.nn.Parameter], seed: int, scale: float) -> list[float]:
    """Sets gradients, which are scaled; returns the norms of the unscaled ones."""
    generator, norms = torch.Generator().manual_seed(seed), []
    for number, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator) * 2.0**number * scale
        param.grad = grad.to(param.dtype)
        norms.append(float(param.grad.double().norm()) / scale)
    return norms


def last_norms(scaler: Any) -> list[float]:
    return [each.last for each in scaler.grad_norms().parameters]


@pytest.mark.parametrize("backend", ["cpu", "aten", "launched"])
@BY_KIND
def test_norms_of_unscaled_gradients_before_clipping(
    kind: str, way: str, backend: str, request: pytest.FixtureRequest
) -> None:
    params = parameters(torch.bfloat16 if kind == "masters" else torch.float32)
    optimizer = KINDS[kind](params)
    if backend == "launched":
        request.getfixturevalue("launcher")
    scaler = started(GradScaler, track="norms", backend="aten" if backend == "aten" else None)
    for step in range(3):
        expected = fill(params, step, 8.0)
        scaler.scale(torch.ones(()))
        take_step(scaler, optimizer, way=way)
        # torch's ops round a product to its dtype first.
        assert last_norms(scaler) == pytest.approx(expected, rel=1e-6)


def test_last_mean_and_largest_of_the_last_128_steps() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = KINDS["plain"]([param]), started(GradScaler, track="norms")
    scaler.name_parameters(model := torch.nn.ParameterDict({"weight": param}))
    for norm in (1e6, *range(1, 129)):
        param.grad = torch.tensor([0.0, norm * scaler.get_scale()])
        take_step(scaler, optimizer)
    [found] = scaler.grad_norms().parameters
    assert model and (found.name, found.last, found.largest) == ("weight", 128, 128)
    assert found.mean == 129 / 2


@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_steps_that_overflow_and_parameters_without_gradient(backend: str) -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(5)]
    optimizer = KINDS["plain"](params)
    scaler = started(GradScaler, track="norms", backend=backend)
    for values in ((3.0, None, 1.0, None, 2.0), (math.inf, None, math.nan, 4.0, 0.0)):
        for param, value in zip(params, values, strict=True):
            param.grad = None if value is None else torch.tensor([8.0 * value, 0.0])
        take_step(scaler, optimizer)
    rows = [(e.last, e.mean, e.largest) for e in scaler.grad_norms().parameters]
    bad = [(math.inf, 3.0, 3.0), (0.0, math.nan, math.nan), (math.nan, 1.0, 1.0)]
    assert_same(rows, [*bad, (4.0, 4.0, 4.0), (0.0, 1.0, 2.0)])
    assert [each.kind for each in scaler.overflow_report().parameters] == ["inf", "nan"]


@pytest.mark.parametrize("dtype", [*FLOATS, "sparse"], ids=str)
def test_dtypes_and_copies(dtype: Any) -> None:
    params = parameters(torch.float32 if dtype == "sparse" else dtype)
    optimizer = KINDS["plain"](params)
    scaler = started(GradScaler, 4.0, track="norms", allow_fp16=True, skip_above=1e9)
    scaler.skip_above = None  # which leaves the norms
    guard = StepGuard("cpu", track="norms", allow_fp16=True)
    for each in (scaler, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler)), guard):
        each.scale(torch.ones(()))
        expected = fill(params, 1, each.get_scale())
        if dtype == "sparse":
            params[1].grad = params[1].grad.to_sparse()
        take_step(each, optimizer)
        assert last_norms(each) == pytest.approx(expected, rel=1e-6)


def test_several_optimizers_and_a_joint_clip() -> None:
    params = parameters()
    expected = fill(params, 1, 8.0)
    optimizers = [KINDS["plain"](params[:1]), KINDS["fused"](params[1:])]
    scaler = started(GradScaler, track="norms")
    scaler.clip_grad_norm_(optimizers, 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    found = scaler.grad_norms().parameters
    assert [each.last for each in found] == pytest.approx(expected, rel=1e-6)
    assert [(e.optimizer, e.optimizer_type, e.group, e.index) for e in found] == [
        (0, "SGD", 0, 0),
        *((1, "AdamW", 0, index) for index in range(3)),
    ]


def test_norms_begin_anew_with_other_parameters() -> None:
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer, scaler = KINDS["plain"]([first]), started(GradScaler, track="norms")
    first.grad = torch.tensor([16.0])
    take_step(scaler, optimizer)
    optimizer.add_param_group({"params": [second]})
    first.grad, second.grad = torch.tensor([32.0]), torch.tensor([8.0])
    take_step(scaler, optimizer)
    old, new = scaler.grad_norms().parameters
    assert (old.last, old.mean, old.largest) == (4.0, 4.0, 4.0)
    assert (new.last, new.mean, new.largest) == (1.0, 1.0, 1.0)


def test_the_largest_are_printed_first() -> None:
    scaler = started(GradScaler, track="norms")
    assert str(scaler.grad_norms()) == "No norms so far."
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(4)]
    for param, value in zip(params, (1.0, math.nan, 3.0, math.inf), strict=True):
        param.grad = torch.tensor([8.0 * value])
    optimizer = KINDS["plain"](params)
    take_step(scaler, optimizer)
    model = torch.nn.ParameterDict(zip("abcd", params, strict=True))
    scaler.name_parameters(model)
    assert [line.split() for line in str(scaler.grad_norms()).splitlines()] == [
        ["parameter", "last", "norm", "mean", "largest"],
        ["b", "nan", "nan", "nan"],
        ["d", "inf", "nan", "nan"],
        ["c", "3", "3", "3"],
        ["a", "1", "1", "1"],
    ]


def test_what_is_refused() -> None:
    for track in (None, "overflow", "modules"):
        with pytest.raises(RuntimeError, match="track='norms'"):
            started(GradScaler, track=track).grad_norms()
    disabled = GradScaler("cpu", enabled=False, track="norms")
    assert disabled.grad_norms().parameters == ()


def test_where_a_hook_is_overridden_only_a_clip_measures() -> None:
    params = parameters()
    optimizer, scaler = KINDS["plain"](params), started(HookedUnscale, track="norms")
    for way in ("step", "unscale"):
        fill(params, 1, 8.0)
        take_step(scaler, optimizer, way=way)
        with pytest.raises(RuntimeError, match=r"Unscale overrides a hook, .* clip_grad_norm_\(\)"):
            scaler.grad_norms()
    expected = fill(params, 2, 8.0)
    take_step(scaler, optimizer, way="clip")
    assert last_norms(scaler) == pytest.approx(expected, rel=1e-6)
