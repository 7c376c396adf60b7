"""Clipping by the scaler: norms, gradients, trainings, stages and refused calls."""

from __future__ import annotations

import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support.comparison import FLOATS, assert_same, started
from support.gradients import WRITABLE_LAYOUTS, make_gradient, parameter_with, sgd_with
from support.models import (
    assert_clipped,
    assert_norm,
    clip_by_hand,
    coefficient_of,
    exact_norm,
    grads_in,
    unscaled,
)
from support.optimizers import OPTIMIZERS, Legacy
from support.steps import TAKE_GRAD_SCALE
from torch.testing._internal.two_tensor import TwoTensor

from ampfast import GradScaler, Sigmas, functional

INF = math.inf
ORDERS = (2.0, INF, 1.0, 3.0)
# In "overlapping" shared elements are unscaled once per alias.
CLIPPED_LAYOUTS = [layout for layout in WRITABLE_LAYOUTS if layout != "overlapping"]
# Exact, inexact, and one that is large but has a finite inverse.
SCALES = (2.0**12, 3.0, 1e-3)


def scaler_for(scale: float, **arguments: object) -> GradScaler:
    return started(scale=scale, allow_fp16=True, **arguments)


def six(*more: float) -> torch.optim.SGD:
    """Norm of 5 at a scale of 8."""
    return sgd_with(torch.tensor([24.0, 32.0, *more]))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_norm_and_gradients(backend: str, dtype: torch.dtype, order: float, scale: float) -> None:
    power = (3 if dtype is torch.float16 else 40) * (-1 if scale < 1 else 1)
    for layout in CLIPPED_LAYOUTS:
        for max_norm, size in ((0.7, 1.0), (1e9, 2.0**power)):
            grads = [make_gradient(layout, dtype, seed).mul_(size) for seed in range(3)]
            optimizer = sgd_with(*grads)
            before = [grad.clone() for grad in grads_in(optimizer)]
            version = max(grad._version for grad in grads_in(optimizer))
            norm = scaler_for(scale, backend=backend).clip_grad_norm_(optimizer, max_norm, order)
            # Autograd sees that a clip writes, as with torch's.
            if max_norm < 1 and layout != "empty":
                assert min(grad._version for grad in grads_in(optimizer)) > version
            assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            exact = exact_norm(before, scale, order)
            if order == 2.0:
                assert_norm(norm, exact)
            else:
                # Of the written values, rounded to the dtype.
                assert norm.item() == pytest.approx(exact, rel=max(torch.finfo(dtype).eps, 1e-14))
            assert_clipped(grads_in(optimizer), before, scale, norm, max_norm)


@pytest.mark.parametrize("value", [1 / 3, 1.1, 0.7, 5e-3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_of_equal_values(capability: str, dtype: torch.dtype, value: float) -> None:
    # All rounding errors have the same sign here.
    grads = [torch.full((size,), value, dtype=dtype) for size in (1, 100_003, 17, 64, 16_385)]
    assert_norm(scaler_for(3.0).grad_norm(sgd_with(*grads)), exact_norm(grads, 3.0))
    assert_norm(functional.grad_norm(grads), exact_norm(grads, 1.0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_clipped_gradients_on_every_instruction_set(capability: str, dtype: torch.dtype) -> None:
    for size in (1, 15, 16, 17, 33, 16 * 1024 + 5):
        optimizer = sgd_with(torch.randn(size + 1).to(dtype)[1:])
        before = [grad.clone() for grad in grads_in(optimizer)]
        norm = scaler_for(3.0).clip_grad_norm_(optimizer, 1e-2)
        [written] = unscaled(before, 3.0)
        wide = written.to(torch.promote_types(dtype, torch.float32))
        expected = (wide * coefficient_of(norm, 1e-2).to(wide.dtype)).to(dtype)
        assert_same(grads_in(optimizer)[0], expected)


# Stages


def clip(scaler: GradScaler, optimizer: Any) -> torch.Tensor:
    return scaler.clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize("first", [GradScaler.unscale_, clip])
@pytest.mark.parametrize("then", [GradScaler.unscale_, clip])
def test_stages(first: Callable, then: Callable) -> None:
    scaler, optimizer, other = GradScaler("cpu"), six(), six()
    for call in (clip, GradScaler.grad_norm):
        with pytest.raises(AssertionError, match="but _scale is None") as refused:
            call(scaler, optimizer)
        assert "whose scale() was given the loss must" in refused.value.__notes__[0]
    scaler.scale(torch.ones(()))
    first(scaler, optimizer)
    before = [grad.clone() for grad in grads_in(optimizer, other)]
    with pytest.raises(RuntimeError, match=r"^unscale_\(\) has already been called on this opt"):
        then(scaler, optimizer)
    with pytest.raises(RuntimeError, match="has already been called") as raised:
        clip(scaler, [other, optimizer])
    assert "clip_grad_norm_" in raised.value.__notes__[0]
    assert "accumulate over several backward" in raised.value.__notes__[0]
    assert_same(grads_in(optimizer, other), before)
    clip(scaler, other)
    scaler.step(optimizer)
    for given in (optimizer, [six(), optimizer]):
        with pytest.raises(RuntimeError, match=r"^unscale_\(\) is being called after step\(\)\."):
            clip(scaler, given)
    with pytest.raises(RuntimeError, match=r"^grad_norm\(\) is being called after step\(\)\."):
        scaler.grad_norm(optimizer)
    scaler.update()
    then(scaler, optimizer)


@pytest.mark.parametrize(("order", "expected"), [(2.0, 5.0), ("inf", 4.0), (1, 7.0)])
def test_the_norm_alone_changes_nothing(order: Any, expected: float) -> None:
    scaler, optimizer = started(scale=8.0), six()
    before = grads_in(optimizer)[0].clone()
    assert_same(scaler.grad_norm(optimizer, order), torch.tensor(expected))
    assert_same(grads_in(optimizer)[0], before)
    assert scaler._per_optimizer_states == {}
    with pytest.raises(LookupError):
        scaler.found_inf(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 1.0, order).item() == expected
    # Of the current values.
    assert scaler.grad_norm(optimizer, order).item() == pytest.approx(1.0, rel=1e-5)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.history().grad_norm.tolist() == [expected], "that before clipping"
    fused = torch.optim.Adam([parameter_with(torch.tensor([24.0, 32.0]))], fused=True)
    scaler.clip_grad_norm_(fused, 1.0, order, in_place=False)
    assert scaler.grad_norm(fused, order).item() == expected


@pytest.mark.parametrize("order", [2.0, INF, 1.5])
def test_without_gradients(order: float) -> None:
    empty = sgd_with(torch.zeros(0))
    none = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    for optimizer in (empty, none, [none, empty]):
        scaler = started()
        assert_same(scaler.grad_norm(optimizer, order), torch.tensor(0.0))
        assert_same(scaler.clip_grad_norm_(optimizer, 1.0, order), torch.tensor(0.0))
    scaler.step(empty)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(none)


# Bad input

LIMIT = r"must be a Python number, ampfast\.Percentile or .*\(Sigmas is for skip_above\), got"
LOW, ORDER = "max_norm must be at least 0, got", "norm_type must be a number above 0"
NUMBER = 'norm_type must be a Python number or "inf", got'
BAD = [("max_norm", v, ValueError, LOW) for v in (-1.0, -INF, math.nan, -1)]
BAD += [("max_norm", v, TypeError, LIMIT) for v in ("1", None, True, torch.tensor(1.0), [1.0], 1j)]
BAD += [("max_norm", Sigmas(6), TypeError, f"{LIMIT} Sigmas")]
BAD += [("norm_type", v, ValueError, ORDER) for v in (0, -2.0, -INF, math.nan)]
BAD += [("norm_type", v, TypeError, NUMBER) for v in (None, True, torch.ones(()), "fro", "-inf")]
BAD += [
    ("in_place", 0, TypeError, "in_place must"),
    ("in_place", False, ValueError, "SGD does not: create it with fused=True, or use in_"),
]
BAD_OPTIMIZERS = [
    (lambda o: o.param_groups[0]["params"], TypeError, "got Parameter, which has no"),
    (lambda o: iter([o]), TypeError, "which has no param_groups"),
    (lambda o: None, TypeError, "got NoneType"),
    (lambda o: [], ValueError, "the list of optimizers is empty"),
    (lambda o: [o, six(), o], ValueError, "an optimizer is given twice"),
    (lambda o: [o, torch.optim.SGD(o.param_groups)], ValueError, "share a parameter"),
]
BAD += [("optimizer", *row) for row in BAD_OPTIMIZERS]


@pytest.mark.parametrize(("name", "value", "error", "match"), BAD)
def test_bad_arguments(name: str, value: Any, error: type[Exception], match: str) -> None:
    for enabled in (True, False) if (name, value) != ("in_place", False) else (True,):
        scaler, optimizer = started(enabled=enabled), six()
        before = grads_in(optimizer)[0].clone()
        given = {"optimizer": optimizer, "max_norm": 1.0, name: value}
        if name == "optimizer":
            given[name] = value(optimizer)
        with pytest.raises(error, match=match):
            scaler.clip_grad_norm_(**given)
        if name in ("norm_type", "optimizer"):
            with pytest.raises(error, match=match):
                scaler.grad_norm(given["optimizer"], given.get("norm_type", 2.0))
        assert_same(grads_in(optimizer)[0], before)
        assert not enabled or scaler._per_optimizer_states == {}
    if name == "norm_type":
        with pytest.raises(error, match=match):
            functional.grad_norm([torch.ones(2)], value)


class Halting(torch.Tensor):
    """Gradient that unscales, but has no norm."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linalg.vector_norm:
            raise NotImplementedError("no norm")
        return super().__torch_function__(func, types, args, kwargs or {})


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], type[Exception], str]] = {
    "float16": (lambda: torch.ones(2).half(), ValueError, r"^Attempting to unscale FP16"),
    "expanded": (lambda: make_gradient("expanded"), RuntimeError, "single memory location"),
    "inference": (inferred, RuntimeError, "Inplace update to inference tensor"),
    "no norm": (lambda: torch.ones(2).as_subclass(Halting), NotImplementedError, "no norm"),
}
FIRST: dict[str, Callable[[], torch.Tensor]] = {
    "regular": lambda: torch.full((3,), 16.0),
    "strided": lambda: torch.full((3, 4), 8.0)[:, ::2],
    "sparse": lambda: torch.tensor([8.0, 0.0, 32.0]).to_sparse(),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("order", [2.0, INF, 3.0])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_gradients_are_refused_before_any_is_written(
    backend: str, order: float, first: str, kind: str
) -> None:
    make, error, match = REFUSED[kind]
    a, b = sgd_with(FIRST[first]()), sgd_with(torch.full((2,), 8.0), make())
    scaler = started(scale=8.0, backend=backend)
    for optimizers in ([b], [a, b]):
        with pytest.raises(error, match=match):
            scaler.clip_grad_norm_(optimizers, 1.0, order)
        assert_same(grads_in(a)[0].to_dense(), FIRST[first]().to_dense())
        assert_same(grads_in(b)[0], torch.full((2,), 8.0))
    scaler.unscale_(a)


# Hooks and disabled scalers


class Unscaling(GradScaler):
    """Subclass that finds an infinity of its own."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return {key: flag + 1 for key, flag in super()._unscale_grads_(*args).items()}


class Outer(GradScaler):
    """Override that doubles flags, as a sharded scaler sums them."""

    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)
        for flag in self._found_inf_per_device(optimizer).values():
            flag.mul_(2)


@pytest.mark.parametrize("order", [2.0, INF, 3.0])
def test_hooks_decide_and_their_results_are_clipped(order: float) -> None:
    for kind, bad, flag in ((Unscaling, False, 1.0), (Outer, True, 2.0), (Outer, False, 0.0)):
        scaler, optimizer, twin = started(kind, 8.0), six(), six()
        if bad:
            grads_in(optimizer)[0][0] = grads_in(twin)[0][0] = INF
        norm = scaler.clip_grad_norm_(optimizer, 1.0, order)
        assert_same(norm, started(scale=8.0).clip_grad_norm_(twin, 1.0, order))
        assert_same(grads_in(optimizer), grads_in(twin))
        [found] = scaler._found_inf_per_device(optimizer).values()
        assert found.item() == flag
        assert scaler.step_skipped(optimizer) == bool(flag)
        fused = torch.optim.Adam([parameter_with(torch.tensor([24.0, 32.0]))], fused=True)
        with pytest.raises(ValueError, match="in_place=False would bypass this scaler's override"):
            scaler.clip_grad_norm_(fused, 1.0, in_place=False)
        assert_same(grads_in(fused)[0], torch.tensor([24.0, 32.0]))


@pytest.mark.parametrize("max_norm", [2.0, INF])
@pytest.mark.parametrize(("order", "track"), [(2.0, "norms"), (INF, "modules"), (1.0, "overflow")])
def test_a_disabled_scaler_clips(order: float, track: Any, max_norm: float) -> None:
    optimizers = [sgd_with(make_gradient("long", dtype, 3)) for dtype in FLOATS]
    twins = [sgd_with(make_gradient("long", dtype, 3)) for dtype in FLOATS]
    scaler = GradScaler("cpu", enabled=False, track=track)
    norm = scaler.grad_norm(optimizers, order)
    assert norm.item() == pytest.approx(exact_norm(grads_in(*twins), 1.0, order), rel=1e-6)
    for _ in range(2):  # it keeps no record
        assert_same(scaler.clip_grad_norm_(optimizers, max_norm, order, in_place=False), norm)
        clip_by_hand([p for t in twins for p in t.param_groups[0]["params"]], norm, max_norm)
        assert_same(grads_in(*optimizers), grads_in(*twins))
        norm = scaler.grad_norm(optimizers, order)
    scaler.name_parameters(torch.nn.Linear(1, 1))
    assert scaler.overflow_report().step is None


# Gradients without kernels


@pytest.mark.parametrize("order", [2.0, INF, 3.0])
def test_kinds_of_gradients_share_a_norm(order: float) -> None:
    grads, before = (
        [make_gradient("long", torch.float32), make_gradient("every_other", torch.float64)]
        for _ in range(2)
    )
    pair = TwoTensor(torch.tensor([24.0]), torch.tensor([24.0]))
    optimizer = sgd_with(*grads, pair)
    scaler = started(scale=8.0)
    exact = exact_norm([*before, torch.tensor([24.0])], 8.0, order)
    assert scaler.grad_norm(optimizer, order).item() == pytest.approx(exact, rel=1e-6)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, order)
    assert norm.dtype == torch.float64 and type(norm) is torch.Tensor
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    coefficient = coefficient_of(norm, 1.0)
    for grad, was in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, was / 8 * coefficient.to(grad.dtype))
    assert pair.a.item() == pair.b.item() == pytest.approx(3 * coefficient.item())


# With `in_place=False`: gradients stay unchanged, the division of the optimizer clips


def divisor_of(scale: float, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    coefficient = coefficient_of(norm, max_norm)
    return (torch.full_like(coefficient, scale) / coefficient).float()


class Watched(torch.optim.SGD):
    """Optimizer that records `grad_scale` and `found_inf` and takes no step."""

    _step_supports_amp_scaling = True

    def __init__(self, *gradients: torch.Tensor) -> None:
        super().__init__([parameter_with(g) for g in gradients], lr=1.0)
        self.handed: list[tuple[torch.Tensor, Any]] = []

    def step(self, closure: Any = None) -> str:
        self.handed.append((self.grad_scale, self.found_inf))
        return "stepped"


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
@pytest.mark.parametrize("order", [2.0, INF, 1.0])
def test_a_gradient_that_is_not_finite_skips(order: float, bad: float, in_place: bool) -> None:
    strided, grad, ones = make_gradient("every_other"), torch.tensor([1.0, bad]), torch.ones(3)
    strided[1, 2] = bad
    for grads in ([grad], [strided], [ones, strided], [ones.double(), strided]):
        before = [each.clone() for each in grads]
        optimizer, scaler = Watched(*(each.clone() for each in grads)), started(scale=4.0)
        norm = scaler.clip_grad_norm_(optimizer, 1.0, order, in_place=in_place)
        assert_same(norm.float(), torch.tensor(abs(bad)))
        assert scaler.step_skipped(optimizer)
        for flag in scaler._found_inf_per_device(optimizer).values():
            flag.mul_(2.0)  # as of summed ones
        scaler.step(optimizer)
        assert optimizer.handed[0][1].item() == 1.0
        assert (
            in_place or assert_same([g.contiguous() for g in grads_in(optimizer)], before) is None
        )
        scaler.update()
        assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_users_own_grad_scale_is_refused(when: str) -> None:
    gradient = torch.tensor([24.0, 32.0])
    optimizer, scaler = Watched(gradient.clone()), started(scale=8.0)
    if when == "after":
        scaler.clip_grad_norm_(optimizer, 1.0, in_place=False)
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(ValueError, match="sets the grad_scale of Watched, which has one already"):
        if when == "after":
            scaler.step(optimizer)
        else:
            scaler.clip_grad_norm_(optimizer, 1.0, in_place=False)
    assert optimizer.handed == []
    assert_same(grads_in(optimizer), [gradient])
    del optimizer.grad_scale
    if when == "before":
        scaler.clip_grad_norm_(optimizer, 1.0, in_place=False)
    scaler.step(optimizer)
    assert_same(optimizer.handed[0][0], divisor_of(8.0, torch.tensor(5.0), 1.0))


def test_a_deferred_clipping_ends_with_the_iteration() -> None:
    optimizer = Watched(torch.tensor([24.0, 32.0], dtype=torch.float16))  # only read
    scaler = started(scale=8.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0, in_place=False).item() == 5.0
    scaler.step(optimizer)
    scaler.update()
    assert scaler._per_optimizer_states == {}
    scaler.step(optimizer)
    assert optimizer.handed[1][0].item() == 8.0
    scaler.update()
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()


def test_a_legacy_optimizer_gets_written_gradients() -> None:
    gradient = torch.tensor([24.0, 32.0])
    legacy, watched = Legacy([parameter_with(gradient.clone())], lr=1.0), Watched(gradient)
    scaler = started(scale=8.0)
    norm = scaler.clip_grad_norm_([legacy, watched], 1.0, in_place=False)
    expected = torch.tensor([3.0, 4.0]) * coefficient_of(norm, 1.0).float()
    assert_same(grads_in(legacy, watched), [expected, torch.tensor([24.0, 32.0])])
    scaler.step(watched)
    assert_same(watched.handed[0][0], divisor_of(8.0, norm, 1.0))


@pytest.mark.parametrize("kind", TAKE_GRAD_SCALE)
@pytest.mark.parametrize("above", [None, 100.0])
def test_a_gradient_that_overlaps_itself_is_refused(kind: str, above: float | None) -> None:
    """A fused kernel would write behind its memory."""
    optimizer = OPTIMIZERS[kind]([torch.nn.Parameter(torch.zeros(3, 4))])
    [param] = optimizer.param_groups[0]["params"]
    param.grad = torch.arange(1.0, 5.0).expand(3, 4)
    scaler = started(skip_above=above)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        scaler.clip_grad_norm_(optimizer, 1.0, in_place=False)
    assert scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] == {}
    assert param.grad.eq(torch.arange(1.0, 5.0)).all()


def test_gradients_live_as_long_as_their_norm_is_taken() -> None:
    """Though to ask for the groups of another optimizer drops them."""
    scaler, first, other = started(), six(), parameter_with(torch.ones(2))
    (param,) = first.param_groups[0]["params"]
    asked: list[bool] = []

    class Dropping:
        last = -1

        @property
        def param_groups(self) -> Any:
            if len(asked) == self.last:
                param.grad = None
            asked.append(ref() is not None)
            return [{"params": [other]}]

    ref, second = weakref.ref(param.grad), cast(Any, Dropping())
    scaler.grad_norm([first, second])
    second.last = 2 * len(asked) - 1
    scaler.grad_norm([first, second])
    assert param.grad is None and all(asked)
