"""Clipping by stage: refused calls, and gradients without kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.clipping_reference import clip_by_hand, coefficient_of, exact_norm, grads_of
from support.comparison import FLOATS, assert_same
from support.gradients import make_gradient, parameter_with, sgd_with
from support.scalers import started
from torch.testing._internal.two_tensor import TwoTensor

from ampfast import GradScaler, functional

INF = math.inf


def six(*more: float) -> torch.optim.SGD:
    """Norm of 5 at a scale of 8."""
    return sgd_with(torch.tensor([24.0, 32.0, *more]))


# State machine


CALLS = [GradScaler.unscale_, lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0)]


@pytest.mark.parametrize("first", CALLS, ids=["unscale_", "clip"])
@pytest.mark.parametrize("then", CALLS, ids=["unscale_", "clip"])
def test_unscaling_twice_is_refused(first: Callable, then: Callable) -> None:
    scaler, optimizer, other = started(GradScaler), six(), six()
    first(scaler, optimizer)
    before = [grad.clone() for grad in grads_of(optimizer, other)]
    with pytest.raises(RuntimeError, match=r"^unscale_\(\) has already been called on this opt"):
        then(scaler, optimizer)
    with pytest.raises(RuntimeError, match="has already been called") as raised:
        scaler.clip_grad_norm_([other, optimizer], 1.0)
    assert "clip_grad_norm_" in raised.value.__notes__[0]
    assert_same(grads_of(optimizer, other), before)
    scaler.clip_grad_norm_(other, 1.0)
    scaler.step(optimizer)
    scaler.update()
    then(scaler, optimizer)


def test_clipping_at_a_wrong_time_is_refused() -> None:
    scaler, optimizer = started(GradScaler), six()
    scaler.step(optimizer)
    for call in (
        lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        lambda: scaler.clip_grad_norm_([six(), optimizer], 1.0),
    ):
        with pytest.raises(RuntimeError, match=r"^unscale_\(\) is being called after step\(\)\."):
            call()
    with pytest.raises(RuntimeError, match=r"^grad_norm\(\) is being called after step\(\)\."):
        scaler.grad_norm(optimizer)
    for unused in (lambda s: s.clip_grad_norm_(six(), 1.0), lambda s: s.grad_norm(six())):
        with pytest.raises(AssertionError, match="but _scale is None"):
            unused(GradScaler("cpu"))


def test_the_norm_alone_changes_nothing() -> None:
    scaler, optimizer = started(GradScaler, 8.0), six()
    before = grads_of(optimizer)[0].clone()
    norm = scaler.grad_norm(optimizer)
    assert_same(norm, torch.tensor(5.0))
    assert scaler.grad_norm(optimizer) is not norm
    assert scaler.grad_norm(optimizer, "inf").item() == 4.0
    assert scaler.grad_norm(optimizer, 1).item() == 7.0
    assert_same(grads_of(optimizer)[0], before)
    assert scaler._per_optimizer_states == {}
    with pytest.raises(LookupError):
        scaler.found_inf(optimizer)
    scaler.unscale_(optimizer)
    for _ in range(2):
        assert_same(scaler.grad_norm(optimizer), torch.tensor(5.0))
    assert scaler.grad_norm([optimizer, six()]).item() == pytest.approx(50**0.5)
    assert_same(grads_of(optimizer)[0], before / 8)


@pytest.mark.parametrize("order", [2.0, INF, 3])
def test_the_norm_after_clipping(order: float) -> None:
    scaler, optimizer = started(GradScaler, 8.0), six()
    norm = scaler.clip_grad_norm_(optimizer, 1.0, order)
    assert scaler.grad_norm(optimizer, order).item() == pytest.approx(1.0, rel=1e-5)
    fused = torch.optim.Adam([parameter_with(torch.tensor([24.0, 32.0]))], fused=True)
    assert_same(scaler.clip_grad_norm_(fused, 1.0, order, in_place=False), norm)
    # Of the current values, since the step has yet to clip them.
    assert_same(scaler.grad_norm(fused, order), norm)


@pytest.mark.parametrize("order", [2.0, INF, 1.5])
def test_without_gradients(order: float) -> None:
    empty = sgd_with(torch.zeros(0))
    none = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    for optimizer in (empty, none, [none, empty]):
        scaler = started(GradScaler)
        assert_same(scaler.grad_norm(optimizer, order), torch.tensor(0.0))
        assert_same(scaler.clip_grad_norm_(optimizer, 1.0, order), torch.tensor(0.0))
    scaler.step(empty)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(none)


# Bad input


class Both(NamedTuple):
    """Value, and the error that refuses it."""

    value: Any
    error: type[Exception]
    match: str


LIMIT = r"max_norm must be a Python number, ampfast\.Percentile or ampfast\.ZScore, got"
LOW, ORDER = "max_norm must be at least 0, got", "norm_type must be a number above 0"
BAD_LIMITS = [Both(v, ValueError, LOW) for v in (-1.0, -INF, math.nan, -1)]
BAD_LIMITS += [Both(v, TypeError, LIMIT) for v in ("1", None, True, torch.tensor(1.0), [1.0], 1j)]
BAD_ORDERS = [Both(v, ValueError, ORDER) for v in (0, -2.0, -INF, math.nan, "fro", "2", "-inf", "")]
NUMBER = "norm_type must be a Python number, got"
BAD_ORDERS += [Both(v, TypeError, NUMBER) for v in (None, True, torch.ones(()))]


def refuses(call: Callable[[GradScaler, Any], Any], bad: Both) -> None:
    for enabled in (True, False):
        scaler, optimizer = started(GradScaler, enabled=enabled), six()
        before = grads_of(optimizer)[0].clone()
        with pytest.raises(bad.error, match=bad.match):
            call(scaler, optimizer)
        assert_same(grads_of(optimizer)[0], before)
        assert not enabled or scaler._per_optimizer_states == {}


@pytest.mark.parametrize("bad", BAD_LIMITS, ids=lambda bad: repr(bad.value))
def test_bad_max_norm(bad: Both) -> None:
    refuses(lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, bad.value), bad)


@pytest.mark.parametrize("bad", BAD_ORDERS, ids=lambda bad: repr(bad.value))
def test_bad_norm_type(bad: Both) -> None:
    refuses(lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0, bad.value), bad)
    refuses(lambda scaler, optimizer: scaler.grad_norm(optimizer, bad.value), bad)
    with pytest.raises(bad.error, match=bad.match):
        functional.grad_norm([torch.ones(2)], bad.value)


@pytest.mark.parametrize("method", ["clip_grad_norm_", "grad_norm"])
def test_bad_optimizers(method: str) -> None:
    more = (1.0,) if method == "clip_grad_norm_" else ()
    for make, error, match in (
        (lambda o: list(o.param_groups[0]["params"]), TypeError, "got Parameter, which has no"),
        (lambda o: iter([o]), TypeError, "which has no param_groups"),
        (lambda o: None, TypeError, "got NoneType"),
        (lambda o: [], ValueError, "the list of optimizers is empty"),
        (lambda o: [o, six(), o], ValueError, "the same optimizer is given twice"),
    ):
        bad = Both(None, error, match)
        refuses(lambda scaler, o, make=make: getattr(scaler, method)(make(o), *more), bad)
    refuses(lambda s, o: s.clip_grad_norm_(o, 1.0, in_place=0), Both(0, TypeError, "in_place must"))


def test_gradients_are_refused_before_anything_is_written() -> None:
    good, bad = six(), sgd_with(torch.ones(2, dtype=torch.float16))
    scaler = started(GradScaler, 8.0)
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\."):
        scaler.clip_grad_norm_([good, bad], 1.0)
    assert_same(grads_of(good)[0], torch.tensor([24.0, 32.0]))
    assert scaler.grad_norm(bad).item() == pytest.approx(2**0.5 / 8)
    scaler.clip_grad_norm_(good, 1.0)
    expanded = sgd_with(torch.ones(3), make_gradient("expanded"))
    with pytest.raises(RuntimeError, match="single memory location"):
        started(GradScaler, 8.0).clip_grad_norm_(expanded, 1.0)
    assert_same(grads_of(expanded)[0], torch.ones(3))


@pytest.mark.parametrize("first", ["regular", "strided"])
@pytest.mark.parametrize("order", [2.0, INF, 3.0])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_gradients_of_inference_mode_are_refused_before_others_are_written(
    backend: str, order: float, first: str
) -> None:
    """Refused as by torch's clipping, though not by its unscaling."""
    plain = torch.ones(3) if first == "regular" else torch.ones(3, 4)[:, ::2]
    with torch.inference_mode():
        made = torch.ones(3)
    a, b = sgd_with(plain.clone()), sgd_with(torch.full((2,), 8.0), made)
    scaler = started(GradScaler, 8.0, backend=backend)
    for optimizers in ([b], [a, b]):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            scaler.clip_grad_norm_(optimizers, 1.0, order)
        assert_same(grads_of(a, b), [plain.clone(), torch.full((2,), 8.0), torch.ones(3)])
    scaler.unscale_(b)
    assert_same(grads_of(b), [torch.ones(2), torch.full((3,), 0.125)])
    with torch.inference_mode():
        scaler.clip_grad_norm_(a, 0.5, order)
    assert not torch.equal(grads_of(a)[0], plain)


class Halting(torch.Tensor):
    """Gradient that unscales, but has no norm."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linalg.vector_norm:
            raise NotImplementedError("no norm")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("order", [2.0, INF, 3.0])
def test_a_failing_norm_comes_before_writes(order: float) -> None:
    optimizer = sgd_with(torch.ones(3), torch.full((2,), 8.0).as_subclass(Halting))
    scaler = started(GradScaler, 8.0)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="no norm"):
            scaler.clip_grad_norm_(optimizer, 1.0, order)
    assert_same(grads_of(optimizer)[0], torch.ones(3))
    scaler.unscale_(optimizer)
    assert_same(grads_of(optimizer)[0], torch.full((3,), 0.125))


# Hooks


class Unscaling(GradScaler):
    """Subclass that finds an infinity of its own."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return {key: flag + 1 for key, flag in super()._unscale_grads_(*args).items()}


class Outer(GradScaler):
    """Override that counts its calls and doubles flags, as a sharded scaler sums them."""

    calls = 0

    def unscale_(self, optimizer: Any) -> None:
        self.calls += 1
        super().unscale_(optimizer)
        for flag in self._found_inf_per_device(optimizer).values():
            flag.mul_(2)


@pytest.mark.parametrize("order", [2.0, INF, 3.0])
def test_hooks_decide_and_their_results_are_clipped(order: float) -> None:
    for kind, bad, flag in ((Unscaling, False, 1.0), (Outer, True, 2.0), (Outer, False, 0.0)):
        scaler, optimizer, twin = started(kind, 8.0), six(), six()
        if bad:
            grads_of(optimizer)[0][0] = grads_of(twin)[0][0] = INF
        norm = scaler.clip_grad_norm_(optimizer, 1.0, order)
        reference = started(GradScaler, 8.0)
        assert_same(norm, reference.clip_grad_norm_(twin, 1.0, order))
        assert_same(grads_of(optimizer), grads_of(twin))
        [found] = scaler._found_inf_per_device(optimizer).values()
        assert found.item() == flag
        assert scaler.step_skipped(optimizer) == bool(flag)
        assert getattr(scaler, "calls", 1) == 1
        with pytest.raises(RuntimeError, match="has already been called"):
            scaler.clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize("kind", [Unscaling, Outer])
def test_hooks_are_not_bypassed(kind: type[GradScaler]) -> None:
    fused = torch.optim.Adam([parameter_with(torch.tensor([24.0, 32.0]))], fused=True)
    scaler = started(kind, 8.0)
    with pytest.raises(ValueError, match="in_place=False would bypass this scaler's override"):
        scaler.clip_grad_norm_(fused, 1.0, in_place=False)
    assert_same(grads_of(fused)[0], torch.tensor([24.0, 32.0]))
    scaler.clip_grad_norm_(fused, 1.0)


# Disabled scalers


@pytest.mark.parametrize("order", [2.0, INF, 1.0])
def test_a_disabled_scaler_clips(order: float) -> None:
    optimizers = [sgd_with(make_gradient("long", dtype, 3)) for dtype in FLOATS]
    twins = [sgd_with(make_gradient("long", dtype, 3)) for dtype in FLOATS]
    scaler = GradScaler("cpu", enabled=False)
    norm = scaler.grad_norm(optimizers, order)
    assert norm.item() == pytest.approx(exact_norm(grads_of(*twins), 1.0, order), rel=1e-6)
    for _ in range(2):  # it keeps no record
        assert_same(scaler.clip_grad_norm_(optimizers, 2.0, order, in_place=False), norm)
        clip_by_hand([p for t in twins for p in t.param_groups[0]["params"]], norm, 2.0)
        assert_same(grads_of(*optimizers), grads_of(*twins))
        norm = scaler.grad_norm(optimizers, order)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


# Gradients without kernels


def test_sparse_gradients_are_coalesced_first() -> None:
    for order, exact in ((2.0, 5.0), (INF, 4.0), (1.0, 7.0)):
        sparse = torch.sparse_coo_tensor([[0, 0, 2]], [8.0, 16.0, 32.0], (4,))
        optimizer, scaler = sgd_with(sparse), started(GradScaler, 8.0)
        assert scaler.grad_norm(optimizer, order).item() == exact
        norm = scaler.clip_grad_norm_(optimizer, 1.0, order)
        assert norm.item() == exact
        expected = torch.tensor([3.0, 0.0, 4.0, 0.0]) * coefficient_of(norm, 1.0).float()
        assert_same(grads_of(optimizer)[0].to_dense(), expected)
        scaler.step(optimizer)
        assert not scaler.step_skipped(optimizer)


@pytest.mark.parametrize("order", [2.0, INF, 3.0])
def test_kinds_of_gradients_share_a_norm(order: float) -> None:
    grads, before = (
        [make_gradient("long", torch.float32), make_gradient("every_other", torch.float64)]
        for _ in range(2)
    )
    pair = TwoTensor(torch.tensor([24.0]), torch.tensor([24.0]))
    optimizer = sgd_with(*grads, pair)
    scaler = started(GradScaler, 8.0)
    exact = exact_norm([*before, torch.tensor([24.0])], 8.0, order)
    assert scaler.grad_norm(optimizer, order).item() == pytest.approx(exact, rel=1e-6)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, order)
    assert norm.dtype == torch.float64 and type(norm) is torch.Tensor
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    coefficient = coefficient_of(norm, 1.0)
    for grad, was in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, was / 8 * coefficient.to(grad.dtype))
    assert pair.a.item() == pair.b.item() == pytest.approx(3 * coefficient.item())


@pytest.mark.parametrize("order", [2.0, INF, 1.0])
def test_an_infinity_of_any_kind_skips(order: float) -> None:
    for bad in (INF, math.nan):
        for regular, other in ((bad, 0.0), (1.0, bad)):
            irregular = make_gradient("every_other")
            irregular[0, 0] = other
            optimizer = sgd_with(torch.tensor([1.0, regular, 1.0]), irregular)
            scaler = started(GradScaler, 8.0)
            assert_same(scaler.clip_grad_norm_(optimizer, 1.0, order), torch.tensor(bad))
            assert scaler.step_skipped(optimizer)
    # As in unscaling, the written value decides: finite gradients whose unscaled values overflow.
    optimizer, scaler = sgd_with(torch.tensor([1e30])), started(GradScaler, 1e-20)
    assert scaler.clip_grad_norm_(optimizer, 1.0, order).item() == INF
    assert scaler.step_skipped(optimizer)


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_an_error_of_one_optimizer_changes_none(order: float) -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [8.0, 32.0], (4,), check_invariants=True)
    for first in (torch.full((3,), 16.0), sparse):
        a, b = sgd_with(first.clone()), sgd_with(torch.ones(2, dtype=torch.complex64))
        scaler = started(GradScaler, 4.0)
        with pytest.raises(NotImplementedError):
            scaler.clip_grad_norm_([a, b], 1.0, order)
        assert_same(grads_of(a)[0].to_dense(), first.to_dense())
        scaler.unscale_(a)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    shared = parameter_with(torch.ones(3))
    a = torch.optim.SGD([shared], lr=1.0)
    b = torch.optim.SGD([parameter_with(torch.ones(3)), shared], lr=1.0)
    scaler = started(GradScaler, 1.0)
    for call in (scaler.clip_grad_norm_, lambda o, _: scaler.grad_norm(o)):
        with pytest.raises(ValueError, match="share a parameter"):
            call([a, b], 1.0)
    assert shared.grad.tolist() == [1.0] * 3


# Norms in the history


def clip(scaler: GradScaler, *optimizers: Any) -> None:
    """Clips the first, whose norm is then another, and measures it with the others."""
    scaler.clip_grad_norm_(optimizers[0], 1.0)
    assert scaler.grad_norm(optimizers[0]).item() == pytest.approx(1.0)
    scaler.grad_norm(list(optimizers))


@pytest.mark.parametrize(("call", "count"), [(clip, 1), (clip, 2), (GradScaler.grad_norm, 1)])
def test_the_history_has_the_norm_before_clipping(call: Callable, count: int) -> None:
    scaler, optimizers = started(GradScaler, 8.0), [six() for _ in range(count)]
    call(scaler, *optimizers)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.history().grad_norm.tolist() == [5.0]


def test_a_norm_is_not_of_the_iteration_after_a_scale_was_set() -> None:
    scaler, optimizer = started(GradScaler, 8.0), six()
    scaler.clip_grad_norm_(optimizer, 1.0)
    for new_scale in (8.0, None):
        scaler.step(optimizer)
        scaler.update(new_scale)
    assert scaler.history().has_norm.tolist() == [True, False]


@pytest.mark.filterwarnings("ignore:Some gradients share memory")
def test_the_norm_of_float16_gradients_that_share_memory() -> None:
    param = parameter_with(torch.full((2,), 8.0, dtype=torch.float16))
    twice = torch.optim.SGD([param, param], lr=0.1)
    # As `unscale_` would do, what they share is divided twice, and counted twice.
    norm = started(GradScaler, 4.0).grad_norm(twice)
    assert norm.item() == pytest.approx(math.sqrt(4 * 0.5**2))
    assert param.grad.eq(8).all()
