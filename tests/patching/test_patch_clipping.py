"""`patch(clip_grad_norm=True)`: names of torch's function, and the scalers made under it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from originals import TORCH, is_patched, run
from support.comparison import assert_same
from torch import nn

import ampfast
from ampfast import clip_grad, functional

# In a tuple, where patch() does not look.
TORCHS = (nn.utils.clip_grad_norm_, nn.utils.clip_grad._get_total_norm)
NAMES = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")


def held() -> list[object]:
    return [nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    assert held() == [TORCHS[0]] * 2
    yield
    ampfast.unpatch()
    assert held() == [TORCHS[0]] * 2


def test_every_name(module: Callable[..., ModuleType]) -> None:
    code = """
        from torch.nn.utils import clip_grad_norm_, get_total_norm
        from torch.nn.utils.clip_grad import clip_grad_norm_ as clip
        held = [clip]
    """
    user = module("user", code)
    before = dict(vars(user))
    patch = ampfast.patch(clip_grad_norm=True)
    assert is_patched()
    assert held() == [clip_grad.stand_in] * 2
    assert user.clip_grad_norm_ is user.clip is clip_grad.stand_in
    assert user.get_total_norm is nn.utils.clip_grad._get_total_norm is TORCHS[1]
    assert {*NAMES, "user.clip", "user.clip_grad_norm_"} <= set(patch.replaced)
    ampfast.unpatch()
    assert vars(user) == before and not is_patched()


def test_it_is_off_by_default() -> None:
    with ampfast.patch() as patch:
        assert held() == [TORCHS[0]] * 2
        assert not set(NAMES) & set(patch.replaced)


def test_a_second_patch_adds_it() -> None:
    with ampfast.patch() as outer:
        inner = ampfast.patch(clip_grad_norm=True)
        again = ampfast.patch(clip_grad_norm=True)
        assert ampfast.patch().replaced == inner.replaced == again.replaced
        assert outer.replaced.count(NAMES[0]) == 1
        assert held() == [clip_grad.stand_in] * 2
    assert held() == [TORCHS[0]] * 2
    with inner:
        assert held() == [clip_grad.stand_in] * 2


def test_names_taken_while_patched_are_restored(module: Callable[..., ModuleType]) -> None:
    with ampfast.patch(clip_grad_norm=True):
        user = module("user", "from torch.nn.utils import clip_grad_norm_")
        ours = module("own", "from ampfast.functional import clip_grad_norm_ as ours")
    assert user.clip_grad_norm_ is TORCHS[0]
    assert ours.ours is functional.clip_grad_norm_


def test_our_own_names_stay() -> None:
    with ampfast.patch(clip_grad_norm=True):
        assert ampfast.clip_grad.torch_clip_grad_norm_ is TORCHS[0]
    assert functional.clip_grad_norm_ is clip_grad.clip_grad_norm_ is not clip_grad.stand_in
    names = [list(inspect.signature(each).parameters) for each in (clip_grad.stand_in, TORCHS[0])]
    assert names[0] == names[1]


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
        theirs = [torch.nn.utils.clip_grad_norm_]
        import ampfast
        ampfast.patch(clip_grad_norm=True)
        for name in [name for name in sys.modules if name.partition(".")[0] == "ampfast"]:
            if not name.endswith("._C") and "triton" not in name:
                del sys.modules[name]
        import ampfast
        assert ampfast.clip_grad.torch_clip_grad_norm_ is theirs[0]
        ampfast.patch(clip_grad_norm=True)
        assert torch.nn.utils.clip_grad_norm_ is ampfast.clip_grad.stand_in
        ampfast.unpatch()
        assert torch.nn.utils.clip_grad_norm_ is theirs[0]
        """
    )


def test_torchs_function_can_be_pickled_while_patched() -> None:
    names = TORCHS[0].__module__, TORCHS[0].__qualname__, TORCHS[0].__name__
    with ampfast.patch(clip_grad_norm=True):
        saved = pickle.dumps(TORCHS[0])
        assert pickle.loads(saved) is TORCHS[0]
        assert TORCHS[0].__name__ == names[2]
    assert (TORCHS[0].__module__, TORCHS[0].__qualname__, TORCHS[0].__name__) == names
    for each in (saved, pickle.dumps(TORCHS[0])):
        assert pickle.loads(each) is TORCHS[0]
    with ampfast.patch(), ampfast.patch(clip_grad_norm=True):
        assert pickle.loads(pickle.dumps(TORCHS[0])) is TORCHS[0]


def test_the_patched_function_can_be_pickled() -> None:
    with ampfast.patch(clip_grad_norm=True):
        patched = torch.nn.utils.clip_grad_norm_
        assert pickle.loads(pickle.dumps(patched)) is patched
