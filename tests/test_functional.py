"""The functional ops: torch's bits, behaviour as custom ops, and bad input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.comparison import FLOATS, assert_same
from support.gradients import make_gradient
from support.kernels import flag as f32
from support.models import exact_norm
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from ampfast import functional

OPS = torch.ops.ampfast
INT32_MAX = 2**31 - 1
torch_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


def i32(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_flags_of_one_element_may_have_dimensions(shape: tuple[int, ...], kind: Any) -> None:
    found = torch.zeros(shape)
    functional.unscale_(kind(), found, f32(math.nan))
    functional.check_(kind(), found)
    assert found.item() == 0.0
    functional.unscale_(kind([torch.tensor([2.0, math.inf])]), found, torch.full(shape, 0.5))
    assert found.shape == shape
    assert found.item() == 1.0
    scale = functional.update_scale_(
        torch.full(shape, 4.0), torch.zeros(shape, dtype=torch.int32), found, 2.0, 0.5, 3
    )
    assert_same(scale, torch.full(shape, 2.0))


SCALES = (1.0, 3.0, 65536.0, 0.0, 1e-45, 2.0**127, 3e38, math.inf, math.nan)
FACTORS = ((2.0, 0.5), (1.1, 0.9), (1.0000000001, 0.0), (1e30, 1e-30))
UPDATES = [
    (scale, tracker, found, *factors, interval)
    for scale in SCALES
    for tracker in (0, 1, 4)
    for found in (0.0, -0.0, 1.0, 2.0, 0.5, math.nan)
    for factors in FACTORS
    for interval in (1, 2, 5, 6, 0, -1, 2**40)
    # A tracker beyond the interval is a deliberate difference.
    if not 0 < interval < tracker + 1
] + [(3.0, INT32_MAX, found, 2.0, 0.5, 0) for found in (0.0, 1.0)]


def test_update_scale_as_torch() -> None:
    for scale, tracker, found, *rest in UPDATES:
        ours = (f32(scale), i32(tracker), f32(found))
        theirs = (f32(scale), i32(tracker), f32(found))
        assert functional.update_scale_(*ours, *rest) is ours[0]
        torch._amp_update_scale_(*theirs, *rest)
        assert_same(ours, theirs, f"update_scale_{(scale, tracker, found, *rest)}")


def op_cases(dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    grads = [torch.randn(4, 3).to(dtype), torch.randn(5).to(dtype)]
    state = (f32(8.0), i32(1))
    return {
        "unscale_": (OPS.unscale_.default, (grads, f32(0), f32(0.5))),
        "check_": (OPS.check_.default, (grads, f32(0))),
        "update_scale_": (OPS.update_scale_.default, (*state, f32(0), 2.0, 0.5, 3)),
        "grad_norm": (OPS.grad_norm.default, (grads, 2.0, f32(0.5))),
        "plain grad_norm": (OPS.grad_norm.default, (grads, 2.0, None)),
    }


@pytest.mark.parametrize("dtype", [*FLOATS, None], ids=str)
@pytest.mark.parametrize("name", op_cases(torch.float32))
def test_opcheck(name: str, dtype: torch.dtype | None) -> None:
    op, arguments = op_cases(dtype or torch.float32)[name]
    if dtype is None and name != "update_scale_":
        arguments = ([], *arguments[1:])
    torch.library.opcheck(op, arguments)


def whole_step(
    grads: list[torch.Tensor], found: torch.Tensor, scale: torch.Tensor, tracker: torch.Tensor
) -> tuple[Any, ...]:
    """Every op once, between other work that depends on its outputs."""
    scaled = [g * scale.to(g.dtype) for g in grads]
    functional.check_(scaled, found)
    functional.unscale_(scaled, found, scale.reciprocal())
    result = [g + found.to(g.dtype) * functional.grad_norm(scaled) for g in scaled]
    updated = functional.update_scale_(scale, tracker, found, 2.0, 0.5, 2)
    return result, scaled, updated * 3


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)]
)
def test_compiled_whole(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(whole_step, fullgraph=True, backend=backend)
    for bad in (1.0, math.inf):
        arguments, twins = (
            ([torch.arange(1, 6.0), torch.tensor([[bad, 2.0]])], f32(0), f32(4.0), i32(1))
            for _ in range(2)
        )
        assert_same(compiled(*arguments), whole_step(*twins), "results")
        assert_same(arguments, twins, "arguments")
        assert arguments[1].item() == float(bad == math.inf)


def test_autograd_sees_the_same_writes_as_with_torch() -> None:
    # torch's update bumps the version of the scale, its unscaling that of no gradient.
    for call in (torch._amp_update_scale_, functional.update_scale_):
        scale = f32(2.0)
        product = torch.ones(3, requires_grad=True) * scale
        call(scale, i32(0), f32(1), 2.0, 0.5, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
    for call in (torch_unscale_, functional.unscale_):
        gradient, leaf = torch.full((2,), 4.0), torch.ones(2, requires_grad=True)
        product = leaf * gradient
        call([gradient], f32(0), f32(0.5))
        product.sum().backward()
        assert leaf.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("call", [torch_unscale_, functional.unscale_])
def test_gradients_are_accepted_as_in_torch(call: Callable[..., None]) -> None:
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            leaf = torch.full((3,), 4.0, requires_grad=True)
            call([leaf], f32(0), f32(0.5))
        assert leaf.tolist() == [2.0] * 3
        assert leaf.is_leaf
    with torch.inference_mode():
        gradient = torch.full((3,), 4.0)
        call([gradient], f32(0), f32(0.5))
    call([gradient], f32(0), f32(0.5))
    assert gradient.tolist() == [1.0] * 3
    functional.check_([gradient], found := f32(0))
    assert found.item() == 0.0
    call([negated := torch.tensor([4.0, -2.0])], found, torch._neg_view(f32(0.5)))
    assert (negated.tolist(), found.item()) == ([-2.0, 1.0], 0.0)
    meta = [torch.ones(3, device="meta"), torch.ones((), dtype=torch.float16, device="meta")]
    call(meta, f32(0, "meta"), f32(1, "meta"))
    functional.check_(meta, f32(0, "meta"))
    inner = torch.ones(3)
    call([TwoTensor(inner, inner.clone())], found, f32(0.5))
    assert (inner.tolist(), found.item()) == ([0.5] * 3, 0.0)


@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_functional_norm(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    for layout in ("contiguous", "every_other", "long", "empty", "expanded"):
        for dtype in FLOATS:
            grads = [make_gradient(layout, dtype, seed) for seed in range(3)]
            for order in (2.0, math.inf, "inf", 3):
                exact = exact_norm(grads, 1.0, float(order))
                norm = functional.grad_norm(grads, order)
                assert norm.item() == pytest.approx(exact, rel=1e-6)
                norm = functional.grad_norm(grads, order, torch.tensor(0.5))
                assert norm.item() == pytest.approx(exact / 2, rel=1e-6)
                wide = dtype == torch.float64
                assert norm.dtype == (torch.float64 if wide else torch.float32)
    assert_same(functional.grad_norm([]), torch.tensor(0.0))


Arguments = dict[str, Any]


def good(name: str) -> Arguments:
    grads = {"grads": [torch.full((3,), 4.0), torch.full((2,), 6.0).double()]}
    found = {"found_inf": f32(0)}
    state = {"current_scale": f32(8.0), "growth_tracker": torch.tensor(1, dtype=torch.int32)}
    rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    return {
        "unscale_": {**grads, **found, "inv_scale": f32(0.5)},
        "check_": {**grads, **found},
        "update_scale_": {**state, **found, **rule},
        "grad_norm": {**grads, "norm_type": 2.0, "inv_scale": f32(0.5)},
    }[name]


def wrong_arguments() -> Iterator[tuple[str, str, Any, Any, str]]:
    """Op, argument, a value for it, the error, and what the error says."""
    for name in ("unscale_", "check_", "update_scale_"):
        for argument, value in good(name).items():
            if not isinstance(value, torch.Tensor):
                continue
            for dtype, text in (
                *((torch.float64, "float64|double"), (torch.float16, "float16|half")),
                *((torch.int64, "int64|long"), (torch.bool, "bool")),
            ):
                yield name, argument, value.to(dtype), RuntimeError, f"(?i:{text})"
            for shape, text in (((2,), "2,?"), ((0,), "0,?"), ((3, 1), "3, 1")):
                yield (
                    name,
                    argument,
                    value.expand(shape).clone(),
                    RuntimeError,
                    rf"[(\[]{text}[)\]]",
                )
            yield name, argument, value.to("meta"), (RuntimeError, ValueError), "meta"
            for wrong in (1.0, None, "1"):
                yield name, argument, wrong, TypeError, type(wrong).__name__
    first, elsewhere = torch.full((3,), 4.0), torch.ones(3, device="meta")
    for name in ("unscale_", "check_", "grad_norm"):
        for grads in (torch.ones(3), None, 3.0):
            yield name, "grads", grads, TypeError, type(grads).__name__
        for wrong in (None, 3.0, "grad", [torch.ones(1)]):
            yield name, "grads", [first, wrong], TypeError, type(wrong).__name__
        for grads in ([first, elsewhere], [elsewhere, first]):
            yield name, "grads", grads, (RuntimeError, ValueError), "meta"
    for name in ("unscale_", "check_"):
        expanded = torch.ones(1).expand(3)
        yield name, "grads", [first, expanded], RuntimeError, "one element of the written-to"
        for wrong in (
            *(torch.ones(3, dtype=d) for d in (torch.int32, torch.bool)),
            torch.ones(3).to_sparse(),
        ):
            # torch's op takes those with gaps, one by one.
            for regular in (first, torch.full((3, 2), 4.0)[:, 0]):
                yield name, "grads", [regular, wrong], NotImplementedError, ""
    yield "grad_norm", "inv_scale", torch.ones(2), RuntimeError, "inv_scale must be a one-element"
    for argument, wrong in (
        *(("growth_interval", 1.5), ("growth_interval", "2"), ("growth_factor", "2")),
    ):
        yield "update_scale_", argument, wrong, TypeError, type(wrong).__name__


def contents(arguments: Arguments) -> list[torch.Tensor]:
    tensors = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    return [t.clone() for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]


@pytest.mark.parametrize("side", [functional, OPS], ids=["function", "op of compiled code"])
def test_shrunk_gradients_are_refused_before_any_is_written(side: Any) -> None:
    good, found = torch.full((3,), 4.0), f32(0)
    bad = torch.ones(3)._neg_view() if side is functional else torch.ones(3, dtype=torch.cfloat)
    bad.untyped_storage().resize_(8)
    for call, more in ((side.unscale_, (found, f32(0.5))), (side.check_, (found,))):
        with pytest.raises(RuntimeError, match="a gradient was freed or resized"):
            call([good, bad], *more)
    assert (good.tolist(), found.item()) == ([4.0] * 3, 0.0)


@pytest.mark.parametrize("name", ["unscale_", "check_", "update_scale_", "grad_norm"])
def test_wrong_arguments(name: str) -> None:
    """They are refused before anything is written."""
    for _, argument, value, error, text in (each for each in wrong_arguments() if each[0] == name):
        arguments = {**good(name), argument: value}
        before = contents(arguments)
        with pytest.raises(error, match=text or None) as raised:
            getattr(functional, name)(*arguments.values())
        assert_same(contents(arguments), before, "arguments after the error")
        assert not text or argument in str(raised.value) or "written-to" in text, raised.value
