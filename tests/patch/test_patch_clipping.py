"""`patch(clip_grad_norm=True)`: names of torch's functions, and the scalers made under it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from originals import TORCH, is_patched
from support.comparison import assert_same
from support.steps import side
from torch import nn

import ampfast
from ampfast import functional

NAMES = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_")
# In tuples, where patch() does not look.
TORCHS = tuple(getattr(nn.utils, name) for name in NAMES)
with ampfast.patch(clip_grad_norm=True):
    STAND_INS = tuple(getattr(nn.utils, name) for name in NAMES)
REPLACED = {f"torch.nn.utils.{name}" for name in NAMES}
REPLACED |= {"torch.nn.utils.clip_grad.clip_grad_norm_"}
PARTS = ["_get_total_norm", "_clip_grads_with_norm_"]


def held() -> tuple[object, ...]:
    assert nn.utils.clip_grad.clip_grad_norm_ is nn.utils.clip_grad_norm_
    assert tuple(getattr(nn.utils.clip_grad, name) for name in PARTS) == TORCHS[1:]
    return tuple(getattr(nn.utils, name) for name in NAMES)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    assert held() == TORCHS
    assert all(ours is not theirs for ours, theirs in zip(STAND_INS, TORCHS, strict=True))
    yield
    ampfast.unpatch()
    assert held() == TORCHS


def test_every_name(module: Callable[..., ModuleType]) -> None:
    code = """
        from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_
        from torch.nn.utils.clip_grad import clip_grad_norm_ as clip, _get_total_norm as norm_of
        from ampfast.functional import get_total_norm as ours
        held = [clip]
    """
    user = module("user", code)
    before = dict(vars(user))
    patch = ampfast.patch(clip_grad_norm=True)
    assert is_patched()
    assert held() == STAND_INS
    assert (user.clip_grad_norm_, user.norm_of, user.clip_grads_with_norm_) == STAND_INS
    assert user.clip is STAND_INS[0] and user.held == [TORCHS[0]]
    users = {f"user.{name}" for name in ("clip", "clip_grad_norm_", "norm_of")}
    assert REPLACED | users | {"user.clip_grads_with_norm_"} <= set(patch.replaced)
    late = module("late", f"from torch.nn.utils import {', '.join(NAMES)}")
    assert tuple(getattr(late, name) for name in NAMES) == STAND_INS
    ampfast.unpatch()
    assert vars(user) == before and not is_patched()
    assert tuple(getattr(late, name) for name in NAMES) == TORCHS
    assert user.ours is functional.get_total_norm


def test_it_is_off_by_default_and_a_second_patch_adds_it() -> None:
    with ampfast.patch() as outer:
        assert held() == TORCHS
        assert not REPLACED & set(outer.replaced)
        inner = ampfast.patch(clip_grad_norm=True)
        again = ampfast.patch(clip_grad_norm=True)
        assert ampfast.patch().replaced == inner.replaced == again.replaced
        assert all(outer.replaced.count(name) == 1 for name in REPLACED)
        assert held() == STAND_INS
    assert held() == TORCHS


@pytest.mark.parametrize(("name", "torchs"), [*zip(NAMES, TORCHS, strict=True)])
def test_signatures_and_pickles(name: str, torchs: Any) -> None:
    stand_in = STAND_INS[NAMES.index(name)]
    theirs, ours = (list(inspect.signature(each).parameters) for each in (torchs, stand_in))
    # torch is to get the last one.
    assert ours == theirs or (name, ours) == ("get_total_norm", [*theirs, "dtype"])
    with ampfast.patch(clip_grad_norm=True):
        assert pickle.loads(pickle.dumps(getattr(nn.utils, name))) is stand_in
    assert pickle.loads(pickle.dumps(torchs)) is torchs


def test_parts_and_arguments_of_torch() -> None:
    def clipped(order: float) -> list[Any]:
        """What torchtitan's clipping gives: a norm, and gradients clipped by it."""
        params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
        for number, param in enumerate(params):
            param.grad = torch.full((3,), number + 1.0)
        grads = [param.grad for param in params if param.grad is not None]
        norm = nn.utils.get_total_norm(grads, order, foreach=False)
        nn.utils.clip_grads_with_norm_(params, 0.5, norm, foreach=False)
        return [norm, *grads, nn.utils.clip_grad_norm_(params, 0.1, norm_type=order)]

    for order in (2.0, 3.0):  # the second is torch's alone
        theirs = clipped(order)
        with ampfast.patch(clip_grad_norm=True):
            torch.testing.assert_close(clipped(order), theirs)
    with (
        pytest.raises(RuntimeError, match=r"order 2\.0 for gradients .* is non-finite"),
        ampfast.patch(clip_grad_norm=True),
    ):
        nn.utils.get_total_norm([torch.tensor([torch.inf])], error_if_nonfinite=True)
    assert held() == TORCHS


def test_a_loop_equals_our_own_clipping() -> None:
    def trained(own: bool) -> list[object]:
        run, norms = side(torch.amp.GradScaler, init_scale=2.0**127, growth_interval=3), []
        for seed in range(12):
            run.optimizer.zero_grad()
            run.scaler.scale(run.loss(seed)).backward()
            if own:
                norms.append(run.scaler.clip_grad_norm_(run.optimizer, 0.1))
            else:
                run.scaler.unscale_(run.optimizer)
                norms.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
            run.scaler.step(run.optimizer)
            run.scaler.update()
        return [norms, run.observe()]

    with ampfast.patch(clip_grad_norm=True):
        assert TORCH["amp"] is not torch.amp.GradScaler
        assert_same(trained(False), trained(True))
