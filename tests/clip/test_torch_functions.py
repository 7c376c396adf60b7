"""`functional.clip_grad_norm_` and its parts beside torch's: the tests of test_nn, anew."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.comparison import assert_same, outcome
from support.gradients import make_gradient, parameter_with
from support.launchers import ReferenceLauncher
from support.models import clip_by_hand, exact_norm
from support.steps import host_reads
from torch import Tensor
from torch.nn import utils

from ampfast import functional

INF = math.inf
ORDERS = pytest.mark.parametrize("order", [0.5, 1.5, 2, 4, "inf"])


def with_grads(*grads: Tensor) -> list[torch.nn.Parameter]:
    return [parameter_with(grad.clone()) for grad in grads]


def layer() -> list[torch.nn.Parameter]:
    """Ten times ten weights and as many biases, whose gradients rise from 1."""
    return with_grads(torch.arange(1.0, 101).view(10, 10), torch.arange(3.0, 13) / 3)


def pair() -> list[torch.nn.Parameter]:
    return with_grads(torch.tensor([3.0, 4.0]))


def both(call: Callable[[Any, Any], Any], make: Callable[[], list[Any]] = pair) -> list[Any]:
    """Outcome of a call with functions and parameters, and gradients after it: ours, torch's."""
    found = []
    for side in (functional, utils):
        params = make()
        found.append((outcome(partial(call, side, params)), [p.grad for p in params]))
    return found


@pytest.mark.parametrize("side", [utils, functional], ids=["torch", "ours"])
@ORDERS
@pytest.mark.parametrize("foreach", [None, False, True])
def test_the_two_parts_are_the_whole(side: Any, order: Any, foreach: bool | None) -> None:
    params, others = layer(), layer()
    norm = side.clip_grad_norm_(params, 2.0, order, foreach=foreach)
    total = side.get_total_norm([p.grad for p in others], order, foreach=foreach)
    side.clip_grads_with_norm_(others, 2.0, total, foreach=foreach)
    assert_same(total, norm)
    for ours, theirs in zip(params, others, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=3e-7, atol=0)
    assert_same(
        side.get_total_norm(params[0].grad, order), side.get_total_norm([params[0].grad], order)
    )


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_norm_in_another_dtype(order: Any, dtype: torch.dtype) -> None:
    grads = [grad.bfloat16() for grad in (torch.rand(300), torch.rand(7, 3))]
    norm = functional.get_total_norm(grads, order, dtype=dtype)
    whole = torch.cat([grad.double().flatten() for grad in grads])
    exact = torch.linalg.vector_norm(whole, float(order))
    assert norm.dtype == functional.get_total_norm([], order, dtype=dtype).dtype == dtype
    # The kernels add up squares of 16-bit values in float32, in short runs.
    rtol = max(2 * torch.finfo(dtype).eps, 1e-8)
    torch.testing.assert_close(norm.double(), exact, rtol=rtol, atol=0)
    assert functional.get_total_norm(grads, order).dtype == torch.bfloat16


class Logged(Tensor):
    """A subclass."""


LAYOUTS = ["overlapping", "every_other", "empty", "transposed", "scalar"]
IRREGULAR: dict[str, Callable[[], Tensor]] = {
    **{layout: partial(make_gradient, layout) for layout in LAYOUTS},
    "sparse": lambda: torch.eye(3).to_sparse(),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "subclass": lambda: torch.ones(3).as_subclass(Logged),
    "negative": lambda: torch._neg_view(torch.ones(3)),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
@pytest.mark.parametrize("kind", IRREGULAR)
def test_irregular_gradients_and_layouts(kind: str, order: float) -> None:
    def make() -> list[Any]:
        irregular = torch.nn.Parameter(torch.empty_like(IRREGULAR[kind]().to_dense()))
        irregular.grad = IRREGULAR[kind]()
        return [*with_grads(torch.full((2,), 3.0)), irregular]

    ours, theirs = both(lambda side, params: side.clip_grad_norm_(params, 1.0, order), make)
    if kind not in (*LAYOUTS, "complex"):  # by torch's function
        assert_same(ours[0].comparable(), theirs[0].comparable())
    assert repr(ours[0].error) == repr(theirs[0].error)
    if theirs[0].error is None and kind != "meta":
        torch.testing.assert_close(ours[0].value, theirs[0].value, rtol=1e-6, atol=0)
    if kind not in ("sparse", "meta"):
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        *((3, 1.0), ([3], 1.0), ([None], 1.0)),
        *(("params", limit) for limit in ("one", None, torch.tensor(1.0), torch.ones(2))),
        *(("params", limit) for limit in (-1.0, -INF, math.nan)),
        *(("params", 1.0, order) for order in ("two", None, -INF)),
        *(("params", "one", "two"), ("params", "1.0", "2.0")),
    ],
    ids=str,
)
def test_arguments_are_refused_as_by_torch(arguments: tuple[Any, ...]) -> None:
    def call(side: Any, params: Any) -> Any:
        given = [params if each == "params" else each for each in arguments]
        return side.clip_grad_norm_(*given)

    (ours, our_grads), (theirs, their_grads) = both(call)
    assert repr(ours.error) == repr(theirs.error)
    if theirs.error is None:
        torch.testing.assert_close(ours.value, theirs.value)
    torch.testing.assert_close(our_grads, their_grads, equal_nan=True)


def test_shared_memory_and_unreal_norms_are_torchs(launcher: ReferenceLauncher) -> None:
    for call in (
        lambda side, params: side.clip_grad_norm_(params * 2, 1.0),
        lambda side, params: side.clip_grads_with_norm_(params * 2, 1.0, torch.tensor(5.0)),
        lambda side, params: side.clip_grads_with_norm_(params, 1.0, torch.tensor([2.0])),
        lambda side, params: side.clip_grads_with_norm_(params, 1.0, torch.tensor(2.0 + 1.0j)),
    ):
        ours, theirs = both(call, layer)
        assert_same([ours[0].comparable(), ours[1]], [theirs[0].comparable(), theirs[1]])
    assert launcher.launches == []


def test_the_host_reads_nothing() -> None:
    params = with_grads(torch.ones(5), torch.ones(7, dtype=torch.bfloat16))
    assert host_reads(lambda: functional.clip_grad_norm_(params, 1.0)) == 0
    assert host_reads(lambda: functional.clip_grad_norm_(params[1:], 1.0)) == 0
    norm = functional.get_total_norm([p.grad for p in params])
    assert host_reads(lambda: functional.clip_grads_with_norm_(params, 1.0, norm)) == 0


def test_no_parameters_and_zeros() -> None:
    for side in (functional, utils):
        assert_same(side.clip_grad_norm_([], 1.0), torch.tensor(0.0))
        assert_same(side.get_total_norm([]), torch.tensor(0.0))
        side.clip_grads_with_norm_([], 1.0, torch.tensor(1.0))
        with pytest.warns(UserWarning, match="empty generator") as seen:
            side.clip_grad_norm_((p for p in ()), 1.0)
        assert seen[0].filename == __file__
        zeros = with_grads(torch.zeros(3, 4), torch.zeros(2))
        assert side.clip_grad_norm_(zeros, 1.0, 0.5, True).item() == 0.0
        one, other = layer()[0], layer()[0]
        assert_same(side.clip_grad_norm_(one, 2.0), side.clip_grad_norm_([other], 2.0))
        assert_same(one.grad, other.grad)


def test_a_copy_on_write_leaves_the_original() -> None:
    original = torch.tensor([3.0, 4.0])
    functional.clip_grads_with_norm_(parameter_with(original._lazy_clone()), 1.0, torch.tensor(5.0))
    assert_same(original, torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("clips", [True, False])
def test_launches_and_bytes(launcher: ReferenceLauncher, clips: bool) -> None:
    def launches(call: Callable[[], Any]) -> list[str]:
        launcher.launches.clear()
        call()
        return launcher.launches

    params = with_grads(*(torch.full((n,), 8.0) for n in (5, 5000, 1)))
    before, size, limit = [p.grad.clone() for p in params], 4 * 5006, 1.0 if clips else 1e4
    norm = functional.clip_grad_norm_(params, limit)
    assert launcher.launches == ["check", "unscale"]
    assert (launcher.read, launcher.written) == ((2 * size, size) if clips else (size, 0))
    clip_by_hand(expected := with_grads(*before), norm, limit)
    assert_same([p.grad for p in params], [p.grad for p in expected])
    assert launches(lambda: functional.clip_grad_norm_(params, INF)) == ["check"]
    params = with_grads(*before)
    raising = partial(functional.clip_grad_norm_, error_if_nonfinite=True)
    assert launches(lambda: raising(params, 1.0)) == ["check", "check", "unscale"]
    parts, norm = with_grads(torch.ones(3).half()), torch.tensor(2.0)
    by_norm = partial(functional.clip_grads_with_norm_, parts, 1.0, norm)
    assert launches(by_norm) == ["clip", "unscale"]
    assert parts[0].grad._version == 1


def test_an_error_of_a_launch_is_raised(launcher: Any, monkeypatch: Any) -> None:
    failing = Mock(side_effect=RuntimeError("a CUDA graph cannot capture this"))
    monkeypatch.setattr(launcher, "multi_tensor", failing)
    with pytest.raises(RuntimeError, match="cannot capture"):
        functional.clip_grad_norm_(pair(), 1.0)


def test_a_coefficient_of_1_reads_and_writes_nothing() -> None:
    """Not even a signalling NaN in memory that nobody may write, nor a subnormal, changes."""
    params = with_grads(torch.tensor([1e-40, 1.0]))
    params[0].grad.numpy().flags.writeable = False
    for limit in (10.0, INF):
        functional.clip_grad_norm_(params, limit)
        functional.clip_grads_with_norm_(params, limit, torch.tensor(1.0))
    assert_same(params[0].grad, torch.tensor([1e-40, 1.0]))


def test_a_norm_beyond_float16_clips_by_its_value() -> None:
    """torch divides by the infinite norm, which makes all gradients 0."""
    large = torch.full((16,), 2.0**15, dtype=torch.float16)
    ours, theirs = with_grads(large), with_grads(large)
    norm = functional.clip_grad_norm_(ours, 4.0)
    assert_same(norm, utils.clip_grad_norm_(theirs, 4.0))
    assert norm.isinf() and norm.dtype is torch.float16
    assert not theirs[0].grad.any()
    assert_same(ours[0].grad, torch.ones_like(large))
    with pytest.raises(RuntimeError, match="is non-finite"):
        functional.clip_grad_norm_(with_grads(large), 4.0, error_if_nonfinite=True)


@pytest.mark.parametrize("seed", range(40))
def test_random_lists_beside_torch_and_the_rule_in_float64(seed: int) -> None:
    """Of small whole numbers, whose squares add up exactly."""
    chance = random.Random(seed)
    dtypes = chance.choice([(torch.float32,), (torch.float32, torch.float64, torch.bfloat16)])

    def grad() -> Tensor:
        drawn = torch.randint(-8, 9, (chance.choice((1, 3, 33, 5000)),))
        drawn = drawn.to(chance.choice(dtypes))
        if chance.random() < 0.05:
            drawn[chance.randrange(len(drawn))] = chance.choice([INF, math.nan])
        return drawn

    params = with_grads(*(grad() for _ in range(chance.randint(1, 6))))
    theirs, rule = (with_grads(*(p.grad for p in params)) for _ in range(2))
    limit, order = chance.choice([0.5, 4.0, 1e6]), chance.choice([2, "inf"])
    given = chance.choice([params, iter(params), tuple(params), params[::-1]])
    norm = functional.clip_grad_norm_(given, limit, order)
    exact = torch.tensor(exact_norm([p.grad for p in rule], 1.0, float(order)), dtype=torch.float64)
    wide = norm.dtype if norm.dtype is torch.float64 else torch.float32
    assert_same(norm, exact.to(wide).to(norm.dtype))
    clip_by_hand(rule, exact.to(wide), limit)
    assert_same([p.grad for p in params], [p.grad for p in rule])
    # torch rounds the norm of 16-bit gradients, and the coefficient, to 16 bits.
    loose = 0.02 if torch.bfloat16 in {p.dtype for p in params} else 1e-5
    close = partial(torch.testing.assert_close, equal_nan=True, rtol=loose, atol=loose)
    close(norm, utils.clip_grad_norm_(theirs, limit, order))
    close([p.grad for p in params], [p.grad for p in theirs])
