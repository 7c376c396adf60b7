"""Master weights of optimizers that are unlike torch's own, and what they are not bit for bit."""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import pytest
import torch
from support.comparison import assert_same
from torch import Tensor, nn

import ampfast

State = TypeVar("State")


class Subclassed(nn.Parameter):
    pass


class Group(dict[str, Any]):
    pass


def parameters(kind: Any = nn.Parameter, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(2)
    return [kind(torch.randn(size, generator=generator).to(dtype)) for size in (5, 3, 4)]


def gradients(params: list[Any], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


class ByHand:
    """Float32 copies, their optimizer, and the 16-bit parameters to which they are rounded."""

    def __init__(self, params: list[nn.Parameter], make: Callable[[list[Any]], Any]) -> None:
        self.params = params
        self.weights = [p.detach().float().requires_grad_() for p in params]
        self.optimizer = make(self.weights)

    def step(self, grads: list[Tensor | None]) -> None:
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.grad = None if grad is None else grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for param, weight, grad in zip(self.params, self.weights, grads, strict=True):
                if grad is not None:
                    param.copy_(weight)


def assert_equal(optimizer: Any, params: list[nn.Parameter], hand: ByHand) -> None:
    assert_same([p.detach() for p in params], [p.detach() for p in hand.params])
    masters = [optimizer.master_weights[p] for p in params]
    assert_same(masters, [w.detach() for w in hand.weights], "master weights")
    state = [optimizer.state.get(p, {}) for p in params]
    assert_same(state, [hand.optimizer.state.get(w, {}) for w in hand.weights], "state")


def assert_steps_equal(optimizer: Any, params: list[Any], hand: ByHand, *seeds: int) -> None:
    for seed in seeds or range(3):
        grads = gradients(params, seed)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        hand.step([*grads])
        assert_equal(optimizer, params, hand)


class Dropping(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.drop()
        return loss

    def drop(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


class Zeroing(Dropping):
    def drop(self) -> None:
        self.zero_grad()


@pytest.mark.parametrize("usual", [True, False])
@pytest.mark.parametrize("param", [nn.Parameter, Subclassed])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("kind", [Dropping, Zeroing])
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_a_step_drops(
    scaled: bool, kind: Any, backend: str, param: Any, usual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parameters are written, and theirs are dropped, too, as by the optimizer alone."""
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    dtype = torch.float16 if scaled else torch.bfloat16
    make = partial(kind, lr=0.01, momentum=0.9)
    params, hand = parameters(param, dtype), ByHand(parameters(dtype=dtype), make)
    optimizer = ampfast.master_weights_(make(params))
    scaler = ampfast.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    if not usual:
        optimizer.param_groups[0] = Group(optimizer.param_groups[0])
    for seed in range(4):
        grads: list[Tensor | None] = [*gradients(params, seed)]
        if seed % 2:
            grads[1] = None
        for each, grad in zip(params, grads, strict=True):
            if grad is not None:
                scaler.scale((each * grad).sum()).backward()  # adds to a gradient that was left
        scaler.step(optimizer)
        scaler.update()
        hand.step(grads)
        assert_equal(optimizer, params, hand)
        assert [each.grad for each in params] == [None] * 3


class Adding(torch.optim.SGD):
    """Adds a group at the end of its first step, as what thaws layers one after another."""

    def __init__(self, params: Any, added: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.added = added

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if len(self.param_groups) == 1:
            self.add_param_group({"params": [self.added]})
        return loss


def test_a_group_that_a_step_adds_has_master_weights_from_the_next_on() -> None:
    params, by_hand = parameters(), [each.detach().float() for each in parameters()]
    optimizer = ampfast.master_weights_(Adding(params[:2], params[2], lr=0.01, momentum=0.9))
    hand = torch.optim.SGD(by_hand, lr=0.01, momentum=0.9)
    for seed in range(4):
        grads = gradients(params, seed)
        for number, (each, grad) in enumerate(zip(params, grads, strict=True)):
            each.grad = grad.clone()
            by_hand[number].grad = None if number == 2 and seed == 0 else grad.float()
        optimizer.step()
        hand.step()
        assert_same([each.detach() for each in params], [each.bfloat16() for each in by_hand])


class Twice(torch.optim.Optimizer):
    """Steps once for each of two calls of its closure."""

    def __init__(self, params: list[Any], clears: bool = False) -> None:
        super().__init__(params, {})
        self.clears = clears

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        for _ in range(2):
            with torch.enable_grad():
                closure()
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=2**-10)
                    if self.clears:
                        param.grad = None


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_between_two_calls_of_a_closure(clears: bool) -> None:
    """None is stepped again that the second call did not make, and none adds up."""
    params = parameters()
    before = [p.detach().float() for p in params]
    optimizer = ampfast.master_weights_(Twice(params, clears))
    calls = [params, params[1:]]

    def closure() -> None:
        if not clears:
            optimizer.zero_grad()
        for param in calls.pop(0):
            param.sum().backward()

    optimizer.step(closure)
    expected = [weight - times * 2**-10 for weight, times in zip(before, (1, 2, 2), strict=True)]
    assert_same([optimizer.master_weights[p] for p in params], expected)
    assert_same([p.detach() for p in params], [weight.bfloat16() for weight in expected])


class OwnList(torch.optim.SGD):
    """Steps a list of its own."""

    def __init__(self, params: list[Any], **options: Any) -> None:
        super().__init__(params, **options)
        self.mine = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.mine:
            if param.grad is not None:
                param.sub_(param.grad.to(param.dtype), alpha=0.5)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("param", [nn.Parameter, Subclassed])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_an_optimizer_that_steps_a_list_of_its_own_is_refused(
    backend: str, param: Any, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    full = nn.Parameter(torch.ones(2))
    params = parameters(param)
    if not dense:
        params[0].data = torch.zeros(5, 2, dtype=torch.bfloat16)[:, 0]
    optimizer: Any = ampfast.master_weights_(OwnList([full, *params], lr=0.1))
    before = [p.tolist() for p in params]
    full.grad = torch.ones(2)
    optimizer.step()  # of what has no master weight
    assert full.tolist() == [0.5] * 2
    params[1].grad = torch.ones_like(params[1])
    with pytest.raises(
        RuntimeError, match="step changed parameter 2 while a master weight"
    ) as told:
        optimizer.step()
    assert "param_groups" in str(told.value)
    assert [p.tolist() for p in params] != before, "as the optimizer left them"
    before = [p.tolist() for p in params]
    assert [p for p in optimizer.param_groups[0]["params"] if p.dtype is torch.float32] == [full]
    optimizer.mine = []
    optimizer.step()
    masters = [optimizer.master_weights[p] for p in params]
    assert [each.tolist() for each in masters] == before, "parameters win"
    optimizer = ampfast.master_weights_(OwnList(params[:1], lr=0.1))  # of one parameter alone
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match="step changed parameter 0 while a master weight"):
        optimizer.step()


def test_parameters_that_share_a_version_are_no_edits() -> None:
    def pieces() -> list[nn.Parameter]:
        flat = torch.cat([p.detach() for p in parameters()])
        return [nn.Parameter(piece) for piece in flat.split([5, 3, 4])]

    params = pieces()
    with torch.no_grad():
        params[2].mul_(1)
    assert params[0]._version == params[2]._version != 0
    make = partial(torch.optim.SGD, lr=0.01)
    optimizer, hand = ampfast.master_weights_(make(params)), ByHand(parameters(), make)
    assert_steps_equal(optimizer, params, hand)


class Abstract(ABC, torch.optim.Optimizer):
    """The base of pytorch-optimizer's classes is such a one."""

    loaded = zeroed = 0

    def __init__(self, params: list[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @abstractmethod
    def rate(self) -> float: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["mean"] = torch.zeros_like(param)
                    state["mean"].lerp_(param.grad, 0.5)
                    param.sub_(state["mean"], alpha=self.rate() * group["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["own"] == 3
        super().load_state_dict(state_dict)
        self.loaded += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "loaded": self.loaded}


class Concrete(Abstract):
    def rate(self) -> float:
        return 2.0


class Parametric(Generic[State], torch.optim.SGD):
    """Generic has no `__dict__` either."""


OF_OTHER_BASES: dict[str, Callable[[list[Any]], Any]] = {
    "abstract": Concrete,
    "generic": partial(Parametric, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("name", OF_OTHER_BASES)
def test_classes_whose_first_base_is_no_optimizer(name: str) -> None:
    make = OF_OTHER_BASES[name]
    params = parameters()
    optimizer = make(params)
    kind = type(optimizer)
    assert ampfast.master_weights_(optimizer) is optimizer
    assert isinstance(optimizer, kind) and isinstance(optimizer, ampfast.MasterWeights)
    assert type(optimizer).__mro__[1:] == (ampfast.MasterWeights, *kind.__mro__)
    hand = ByHand(parameters(), make)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    for seed in range(6):
        if seed == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            assert "master_param" in saved["state"][0]
            params = [nn.Parameter(p.detach().clone()) for p in params]
            optimizer = ampfast.master_weights_(make(params))
            optimizer.load_state_dict(saved)
        if seed == 3:
            params, optimizer = copy.deepcopy((params, optimizer))
        if seed == 4:
            params, optimizer = pickle.loads(pickle.dumps((params, optimizer)))
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is None or p.grad.dtype is torch.bfloat16 for p in params)
        assert_steps_equal(optimizer, params, hand, seed)
    assert calls == ["step"] * 2
    if name == "abstract":
        assert (optimizer.loaded, optimizer.zeroed) == (1, 2), "its own methods run, too"


def test_a_class_that_derives_from_one_with_master_weights() -> None:
    optimizer = ampfast.master_weights_(Concrete(parameters()))

    class Derived(type(optimizer)):  # type: ignore[misc]
        def step(self, closure: Any = None) -> str:
            super().step(closure)
            return "derived"

    optimizer.__class__ = Derived
    (first, *_) = optimizer.param_groups[0]["params"]
    before = first.detach().clone()
    first.grad = torch.ones_like(first)
    assert optimizer.step() == "derived"
    assert not torch.equal(first, before)


def small_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).bfloat16()


def trained(model: nn.Module, optimizer: Any, seeds: range) -> None:
    params = list(model.parameters())
    for seed in seeds:
        for param, grad in zip(params, gradients(params, seed), strict=True):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("flat", [False, True])
def test_named_checkpoints(flat: bool, momentum: float) -> None:
    """torch drops master weights as it loads a flat one, which is refused unless they are given."""
    api = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    options = api.StateDictOptions(flatten_optimizer_state_dict=flat)

    def make(model: nn.Module) -> Any:
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
        return ampfast.master_weights_(sgd)

    model = small_model()
    optimizer = make(model)
    trained(model, optimizer, range(3))
    saved = copy.deepcopy(api.get_optimizer_state_dict(model, optimizer, options=options))
    resumed = small_model()
    resumed.load_state_dict(model.state_dict())
    resuming = make(resumed)

    def load() -> None:
        api.set_optimizer_state_dict(resumed, resuming, saved, options=options)

    if flat:
        before = copy.deepcopy(resuming.state_dict())
        with pytest.raises(ValueError, match="flatten_optimizer_state_dict"):
            load()
        after = resuming.state_dict()
        assert_same(after["state"][0]["master_param"], before["state"][0]["master_param"])

        def add_master_weights(_: Any, named: dict[str, Any]) -> None:
            for name, entry in named["state"].items():
                entry["master_param"] = saved[f"state.{name}.master_param"]

        resuming.register_load_state_dict_pre_hook(add_master_weights)
    load()
    assert_same(resuming.state_dict()["state"], optimizer.state_dict()["state"])
    for each, its in ((model, optimizer), (resumed, resuming)):
        trained(each, its, range(3, 6))
    assert_same(resuming.state_dict()["state"], optimizer.state_dict()["state"])
    assert_same(resumed.state_dict(), model.state_dict())


def test_named_checkpoints_without_master_weights() -> None:
    api = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    frozen, wide = small_model().requires_grad_(False), small_model().float()
    for model, flat in ((frozen, False), (wide, True)):
        options = api.StateDictOptions(flatten_optimizer_state_dict=flat)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = ampfast.master_weights_(sgd)
        if model is wide:
            trained(model, optimizer, range(1))
        saved = copy.deepcopy(api.get_optimizer_state_dict(model, optimizer, options=options))
        if model is wide:
            trained(model, optimizer, range(1, 2))
        api.set_optimizer_state_dict(model, optimizer, saved, options=options)
        assert_same(api.get_optimizer_state_dict(model, optimizer, options=options), saved)
        assert len(optimizer.master_weights) == 0


@pytest.mark.parametrize("scale", [3000.0, 4096.0])
def test_a_fused_step_multiplies_with_the_inverse_of_the_scale(scale: float) -> None:
    """As torch's `unscale_` does; its own fused kernels divide, which a power of two hides."""
    make = partial(torch.optim.AdamW, lr=0.01, fused=True)
    params = parameters(dtype=torch.float16)
    optimizer = ampfast.master_weights_(make(params))
    hand = ByHand(parameters(dtype=torch.float16), make)
    scaler = ampfast.GradScaler("cpu", init_scale=scale)
    inverse = torch.tensor(scale).double().reciprocal().float()
    for seed in range(4):
        grads = gradients(params, seed)
        scaler.scale(torch.ones(()))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        scaler.step(optimizer)
        scaler.update()
        hand.step([grad.float() * inverse for grad in grads])
        assert_equal(optimizer, params, hand)


def test_state_that_a_constructor_made_is_refilled_in_float32() -> None:
    make = partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1)
    params = parameters()
    optimizer = ampfast.master_weights_(make(params))
    for entry in optimizer.state.values():
        assert entry["sum"].dtype is torch.float32
        entry["sum"].fill_(0.1)
    hand = ByHand(parameters(), make)
    assert_steps_equal(optimizer, params, hand)
