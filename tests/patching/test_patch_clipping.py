"""`patch(clip_grad_norm=True)`: names of torch's functions, and the scalers made under it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from originals import TORCH, is_patched, run
from support.comparison import assert_same
from torch import nn

import ampfast
from ampfast import clip_grad, functional

NAMES = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_")
# In tuples, where patch() does not look.
TORCHS = tuple(getattr(nn.utils, name) for name in NAMES)
STAND_INS = tuple(getattr(clip_grad, f"stand_in_{name}") for name in NAMES)
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
    yield
    ampfast.unpatch()
    assert held() == TORCHS


def test_every_name(module: Callable[..., ModuleType]) -> None:
    code = """
        from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_
        from torch.nn.utils.clip_grad import clip_grad_norm_ as clip, _get_total_norm as norm_of
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
    assert patch.kept == [f"torch.nn.utils.clip_grad.{name}" for name in PARTS]
    ampfast.unpatch()
    assert vars(user) == before and not is_patched()


def test_it_is_off_by_default() -> None:
    with ampfast.patch() as patch:
        assert held() == TORCHS
        assert not REPLACED & set(patch.replaced)


def test_a_second_patch_adds_it() -> None:
    with ampfast.patch() as outer:
        inner = ampfast.patch(clip_grad_norm=True)
        again = ampfast.patch(clip_grad_norm=True)
        assert ampfast.patch().replaced == inner.replaced == again.replaced
        assert all(outer.replaced.count(name) == 1 for name in REPLACED)
        assert held() == STAND_INS
    assert held() == TORCHS
    with inner:
        assert held() == STAND_INS


def test_names_taken_while_patched_are_restored(module: Callable[..., ModuleType]) -> None:
    with ampfast.patch(clip_grad_norm=True):
        user = module("user", f"from torch.nn.utils import {', '.join(NAMES)}")
        ours = module("own", f"from ampfast.functional import {', '.join(NAMES)}")
        assert tuple(getattr(user, name) for name in NAMES) == STAND_INS
    for name, torchs in zip(NAMES, TORCHS, strict=True):
        assert getattr(user, name) is torchs
        assert getattr(ours, name) is getattr(functional, name)


@pytest.mark.parametrize("name", NAMES)
def test_our_own_names_stay(name: str) -> None:
    torchs, stand_in = TORCHS[NAMES.index(name)], STAND_INS[NAMES.index(name)]
    with ampfast.patch(clip_grad_norm=True):
        assert getattr(clip_grad, f"torch_{name}") is torchs
    assert getattr(functional, name) is getattr(clip_grad, name) is not stand_in
    theirs, ours = (list(inspect.signature(each).parameters) for each in (torchs, stand_in))
    # torch is to get the last one.
    assert ours == theirs or (name, ours) == ("get_total_norm", [*theirs, "dtype"])


def clipped() -> list[Any]:
    """What torchtitan's clipping gives: a norm, and gradients clipped by it."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for number, param in enumerate(params):
        param.grad = torch.full((3,), number + 1.0)
    grads = [param.grad for param in params if param.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, 2.0, foreach=False)
    torch.nn.utils.clip_grads_with_norm_(params, 0.5, norm, foreach=False)
    return [norm, *grads]


def test_its_parts_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = clipped()
    with ampfast.patch(clip_grad_norm=True):
        with monkeypatch.context() as refused:
            for name in NAMES:
                refused.setattr(clip_grad, f"torch_{name}", None)  # the kernels do it
            norm, *grads = clipped()
        torch.testing.assert_close([norm, *grads], theirs)
        with pytest.raises(RuntimeError, match=r"order 2\.0 for gradients .* is non-finite"):
            torch.nn.utils.get_total_norm([torch.tensor([torch.inf])], error_if_nonfinite=True)


def test_torchs_function_takes_what_its_stand_in_does_not() -> None:
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([1.0, 2.0, 2.0])
    with ampfast.patch(clip_grad_norm=True):
        # Of order 3; the norm of torch's own parts, not of ours.
        norm = torch.nn.utils.clip_grad_norm_([param], 1.0, norm_type=3.0)
        assert torch.nn.utils.get_total_norm([torch.ones(8)], 3.0).item() == 2.0
    assert_same(norm, torch.linalg.vector_norm(torch.tensor([1.0, 2.0, 2.0]), 3.0))


def test_a_loop_equals_our_own_clipping() -> None:
    def trained(own: bool) -> list[object]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler, norms = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3), []
        for _ in range(12):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(5, 8)).square().mean()).backward()
            if own:
                norms.append(scaler.clip_grad_norm_(optimizer, 0.1))
            else:
                scaler.unscale_(optimizer)
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            scaler.step(optimizer)
            scaler.update()
        return [norms, [p.detach() for p in model.parameters()], scaler.state_dict()]

    with ampfast.patch(clip_grad_norm=True):
        assert TORCH["amp"] is not torch.amp.GradScaler
        assert_same(trained(False), trained(True))


def test_torchs_deprecated_function_clips_by_it() -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([3.0, 4.0])
    with ampfast.patch(clip_grad_norm=True), pytest.warns(FutureWarning):
        assert nn.utils.clip_grad_norm([param], 1.0).item() == 5.0
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))


def test_an_ampfast_imported_anew_finds_torchs() -> None:
    run(
        """
        import sys, torch
        theirs = [torch.nn.utils.clip_grad_norm_, torch.nn.utils.get_total_norm]
        import ampfast
        ampfast.patch(clip_grad_norm=True)
        for name in [name for name in sys.modules if name.partition(".")[0] == "ampfast"]:
            if not name.endswith("._C") and "triton" not in name:
                del sys.modules[name]
        import ampfast
        assert ampfast.clip_grad.torch_clip_grad_norm_ is theirs[0]
        ampfast.patch(clip_grad_norm=True)
        assert ampfast.clip_grad.torch_get_total_norm is theirs[1]
        assert torch.nn.utils.clip_grad_norm_ is ampfast.clip_grad.stand_in_clip_grad_norm_
        ampfast.unpatch()
        assert torch.nn.utils.clip_grad_norm_ is theirs[0]
        assert torch.nn.utils.get_total_norm is theirs[1]
        """
    )


@pytest.mark.parametrize("torchs", TORCHS, ids=NAMES)
def test_torchs_function_can_be_pickled_while_patched(torchs: Any) -> None:
    names = torchs.__module__, torchs.__qualname__, torchs.__name__
    with ampfast.patch(clip_grad_norm=True):
        saved = pickle.dumps(torchs)
        assert pickle.loads(saved) is torchs
        assert torchs.__name__ == names[2]
    assert (torchs.__module__, torchs.__qualname__, torchs.__name__) == names
    for each in (saved, pickle.dumps(torchs)):
        assert pickle.loads(each) is torchs
    with ampfast.patch(), ampfast.patch(clip_grad_norm=True):
        assert pickle.loads(pickle.dumps(torchs)) is torchs


@pytest.mark.parametrize("name", NAMES)
def test_the_patched_function_can_be_pickled(name: str) -> None:
    with ampfast.patch(clip_grad_norm=True):
        patched = getattr(torch.nn.utils, name)
        assert pickle.loads(pickle.dumps(patched)) is patched
