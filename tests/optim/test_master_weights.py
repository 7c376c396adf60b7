"""Optimizers with float32 master weights, against master weights written by hand, bit for bit."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import os
import pickle
import random
import sys
import warnings
import weakref
from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.steps import host_reads, take_step, through_file
from torch import Tensor, nn

import ampfast

HALVES = (torch.float16, torch.bfloat16)
STEPS = 9
BAD = {2: math.inf, 5: math.nan}

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


class Dropping(torch.optim.SGD):
    """Drops gradients in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


class Abstract(ABC, torch.optim.SGD):
    """The base of pytorch-optimizer's classes is such a one."""

    loaded = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.loaded += 1


KINDS: dict[str, Make] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "asgd": partial(torch.optim.ASGD, lr=0.1),
}
HAVE_FUSED = ("sgd", "momentum", "adam", "adamw", "adagrad")
VARIANTS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
# Every optimizer of torch.optim with a dense step, and its variants; and some of others.
OPTIMIZERS: dict[str, Make] = {
    f"{name}-{variant}": partial(make, **options)
    for name, make in KINDS.items()
    for variant, options in VARIANTS.items()
    if variant != "fused" or name in HAVE_FUSED
}
OPTIMIZERS["adafactor"] = partial(torch.optim.Adafactor, lr=0.01)
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda params: torch.optim.Muon([p for p in params if p.dim() == 2])
for each in (Dropping, Abstract):
    OPTIMIZERS[each.__name__.lower()] = partial(each, lr=0.01, momentum=0.9)
FEW = ("momentum-plain", "adamw-foreach", "adamw-fused", "momentum-fused", "dropping", "abstract")


class Gain(nn.Module):
    """Stays in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((7,), 1.5))

    def forward(self, values: Tensor) -> Tensor:
        return (values.tanh() * self.weight).to(values.dtype)


def small_model(dtype: torch.dtype, turned: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 7).to(dtype), Gain(), nn.Linear(7, 3).to(dtype))
    if turned:
        model[2].weight.data = model[2].weight.data.t().contiguous().t()
    return model


def loss_of(model: nn.Module, seed: int) -> Tensor:
    if isinstance(model, nn.Embedding):
        return model(torch.tensor([1, 3, 1])).float().square().sum()
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    values = torch.randn(5, 8, generator=generator).to(first.dtype)
    return model(values).float().square().mean()


class Ours:
    """A model under `master_weights_` and our scaler."""

    kind: Any = ampfast.GradScaler

    def __init__(self, model: nn.Module, make: Make, scaler: Any = None) -> None:
        self.model = model
        self.optimizer = self.made(make)
        # Fused optimizers divide by it, and the inverse of 48 is no float32.
        self.scaler = scaler or self.kind("cpu", init_scale=48.0)

    def made(self, make: Make) -> Any:
        return ampfast.master_weights_(make(list(self.model.parameters())))

    def backward(self, seed: int, bad: float | None = None, missing: int | None = None) -> Tensor:
        self.optimizer.zero_grad(set_to_none=seed % 3 != 1)
        loss = loss_of(self.model, seed)
        self.scaler.scale(loss).backward()
        params = list(self.model.parameters())
        if bad is not None:
            params[0].grad.view(-1)[3] = bad
        if missing is not None:
            params[missing].grad = None
        return loss

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, seed: int, bad: float | None = None) -> None:
        self.backward(seed, bad)
        self.step()

    def stepped(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def params(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]

    def weights(self) -> list[Tensor]:
        masters = self.optimizer.master_weights
        return [masters.get(p, p.detach().float()) for p in self.model.parameters()]

    def state(self) -> list[Any]:
        return [self.optimizer.state.get(param, {}) for param in self.stepped()]


class ByHand(Ours):
    """Master weights by hand: an optimizer of float32 copies, and torch's scaler."""

    kind = torch.amp.GradScaler

    def made(self, make: Make) -> Any:
        params = list(self.model.parameters())
        wide = [p.detach().float().requires_grad_() if p.dtype in HALVES else p for p in params]
        self.masters = dict(zip(params, wide, strict=True))
        self.written: dict[Tensor, Tensor] = {}
        return make(wide)

    def backward(self, seed: int, bad: float | None = None, missing: int | None = None) -> Tensor:
        self.model.zero_grad()
        loss = super().backward(seed, bad, missing)
        self.widen()
        return loss

    @torch.no_grad()
    def widen(self) -> None:
        stepped = set(map(id, self.stepped()))
        for param, master in self.masters.items():
            if master is not param:
                # Where the parameter was edited, it wins, or where it had no master weight yet.
                differs = master.to(param.dtype).view(torch.int16) != param.view(torch.int16)
                differs |= not param.requires_grad or id(master) not in stepped
                master.copy_(torch.where(differs, param.float(), master))
                master.grad = None if param.grad is None else param.grad.float()
        self.written = {p: m for p, m in self.masters.items() if p is not m and m.grad is not None}

    def step(self) -> None:
        grads = [param.grad.to_dense() for param in self.stepped() if param.grad is not None]
        super().step()
        if all(grad.isfinite().all() for grad in grads):
            self.round()

    @torch.no_grad()
    def round(self) -> None:
        for param, master in self.written.items():
            param.copy_(master)

    def weights(self) -> list[Tensor]:
        return [master.detach() for master in self.masters.values()]


def assert_equal(ours: Ours, hand: Ours, weights: bool = True) -> None:
    assert_same(ours.params(), hand.params())
    assert_same(ours.scaler.get_scale(), hand.scaler.get_scale(), "scale")
    dropped = [[param.grad is None for param in side.stepped()] for side in (ours, hand)]
    assert dropped[0] == dropped[1]
    if weights:
        assert_same(ours.weights(), hand.weights(), "masters")
        assert_same(ours.state(), hand.state(), "state")


def follow(ours: Ours, hand: Ours, seeds: Iterable[int] = range(STEPS)) -> None:
    """Trains both, and compares all after each step."""
    for seed in seeds:
        ours.train(seed, BAD.get(seed))
        hand.train(seed, BAD.get(seed))
        assert_equal(ours, hand)


def both(
    make: str | Make, dtype: torch.dtype = torch.float16, scaler: Any = None, turned: bool = True
) -> tuple[Ours, ByHand]:
    """Both sides, with an optimizer of `OPTIMIZERS` or the one that is made."""
    make = OPTIMIZERS[make] if isinstance(make, str) else make
    models = (small_model(dtype, turned) for _ in range(2))
    return Ours(next(models), make, scaler), ByHand(next(models), make, scaler)


def ours_of(name: str, dtype: torch.dtype = torch.float16, steps: int = 0) -> Ours:
    ours, _ = both(name, dtype)
    for seed in range(steps):
        ours.train(seed)
    return ours


def step_by(optimizer: Any, params: list[Any], value: float = 1.0) -> None:
    for param in params:
        param.grad = torch.full_like(param, value)
    optimizer.step()


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Group(dict[str, Any]):
    pass


class Subclassed(nn.Parameter):
    pass


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, dtype: torch.dtype) -> None:
    ours, hand = both(name, dtype)
    follow(ours, hand)
    assert ours.scaler.get_scale() == 12.0
    assert isinstance(ours.optimizer, ampfast.MasterWeights)
    masters = ours.optimizer.master_weights
    assert not all(torch.equal(masters[p], p.float()) for p in masters), "low bits must be in use"
    assert not any(weight.requires_grad for weight in masters.values())
    with pytest.raises(KeyError, match="no 16-bit parameter that this optimizer trains"):
        masters[nn.Parameter(torch.ones(1).half())]
    kind, original = type(ours.optimizer), type(hand.optimizer)
    assert ampfast.master_weights_(ours.optimizer) is ours.optimizer
    assert type(ours.optimizer) is kind
    assert kind.__mro__[1:] == (ampfast.MasterWeights, *original.__mro__)
    assert kind.__name__ == original.__name__


class Program:
    """Random events of a training; its last layer's weight thaws and its bias is added later."""

    EVENTS = ("nothing", "edit", "convert", "replace", "thaw", "add", "clear", "state", "groups")
    EVENTS += ("copy", "pickle", "load")
    WAYS = ("step", "together", "clip", "deferred", "unscaled", "bare")

    def __init__(self, name: str, dtype: torch.dtype, seed: int) -> None:
        self.chance = random.Random(f"{name} {dtype} {seed}")
        self.takes_later = name != "momentum-fused"
        self.kept: list[Any] = []

        def make(params: list[Tensor]) -> torch.optim.Optimizer:
            return OPTIMIZERS[name](params[:-1])

        models = [small_model(dtype) for _ in range(2)]
        for model in models:
            model[2].weight.requires_grad_(False)
        scalers = [
            ampfast.GradScaler("cpu", init_scale=64.0, growth_interval=3, track=track)
            for track in (self.chance.choice([None, "overflow", "norms"]), None)
        ]
        self.ours = Ours(models[0], make, scalers[0])
        self.hand = ByHand(models[1], make, scalers[1])  # whose norms are in float64, too

    def happen(self, event: str) -> None:
        ours, sides = self.ours, (self.ours, self.hand)
        if event in ("thaw", "add") and not self.takes_later:
            return
        if event in ("edit", "replace"):
            place = self.chance.randrange(3)
            for side in sides:
                param = list(side.model[0].parameters())[place % 2]
                with torch.no_grad():
                    param[:3] = torch.tensor([0.0, -0.0, 0.125][place])
                if event == "replace":
                    param.data = param.data.clone().fill_(0.75)
        elif event == "convert":
            dtype = self.chance.choice(HALVES)
            for side in sides:
                side.model[0].to(dtype), side.model[2].to(dtype)
        elif event == "thaw":
            for side in sides:
                side.model[2].weight.requires_grad_(True)
        elif event == "add" and len(ours.optimizer.param_groups) == 1:
            ours.model[2].bias.grad = None
            masters = self.hand.masters
            for side, one in ((ours, ours.model[2].bias), (self.hand, [*masters.values()][-1])):
                side.optimizer.add_param_group({"params": [one], "lr": 0.2})
        elif event == "clear":
            for side in sides:
                side.optimizer.state.clear()
        elif event == "state":
            for side in sides:
                state, first = side.optimizer.state, side.stepped()[0]
                state[first] = {k: v if k == "step" else v * 2 for k, v in state[first].items()}
        elif event == "groups":
            (group, *more) = ours.optimizer.param_groups
            kind, held = self.chance.choice([dict, Group]), self.chance.choice([tuple, list])
            ours.optimizer.param_groups[:] = [kind(group, params=held(group["params"])), *more]
        elif event in ("copy", "pickle"):
            copied = copy.deepcopy if event == "copy" else pickled
            ours.model, ours.optimizer = copied((ours.model, ours.optimizer))
        elif event == "load":
            ours.model.zero_grad()
            things = [ours.model, ours.optimizer]
            states = through_file([thing.state_dict() for thing in things])
            if self.chance.random() < 0.8:  # or as loaded before the first step, by Accelerate
                loss_of(ours.model, 99).backward()
                ours.optimizer.step()
            for each in (ours.optimizer.state_dict(), states[1]):
                masters = [entry.get("master_param") for entry in each["state"].values()]
                self.kept.append((masters, copy.deepcopy(masters)))
            for number in self.chance.choice([(0, 1), (1, 0)]):
                things[number].load_state_dict(states[number])

    def step(self, way: str) -> None:
        ours, hand = self.ours, self.hand
        if way == "bare":
            ours.optimizer.step()
            hand.optimizer.step()
            hand.round()
            return
        if way == "unscaled":
            for side in (ours, hand):
                side.scaler.unscale_(side.optimizer)
            norms = [nn.utils.clip_grad_norm_(side.stepped(), 0.05) for side in (ours, hand)]
        elif way in ("clip", "deferred"):
            norms = [ours.scaler.grad_norm(ours.optimizer)]
            # Copies of fused optimizers have lost it, as torch's.
            can_defer = getattr(ours.optimizer, "_step_supports_amp_scaling", False)
            in_place = way == "clip" or not can_defer
            norms += [ours.scaler.clip_grad_norm_(ours.optimizer, 0.05, in_place=in_place)]
            norms += [hand.scaler.clip_grad_norm_(hand.optimizer, 0.05, in_place=in_place)]
            assert_same(norms[0], norms[1], "norm before")
        if way in ("unscaled", "clip", "deferred"):
            assert_same(norms[-2], norms[-1], "norm")
            grads = [[param.grad for param in side.stepped()] for side in (ours, hand)]
            assert_same(*grads, "gradients")
        if way == "together":
            ours.scaler.step_and_update(ours.optimizer)
        else:
            ours.step()
        hand.step()

    def run(self, steps: int = 30) -> None:
        chance, bad = self.chance, math.inf
        for turn in range(steps):
            # A plain step that is skipped sees no edit, so that two of them might cancel out.
            event = "nothing" if bad is not None else chance.choice(self.EVENTS)
            self.happen(event)
            way = chance.choice(self.WAYS)
            is_good = turn == 0 or event == "clear" or way == "bare"
            bad = None if is_good else chance.choice([None] * 4 + [math.inf, math.nan])
            missing = None if is_good or bad else chance.choice([None, None, 1])
            for side in (self.ours, self.hand):
                scaler = side.scaler
                if way == "bare":
                    side.scaler = ampfast.GradScaler("cpu", enabled=False)
                side.backward(turn, bad, missing)
                side.scaler = scaler
            self.step(way)
            assert_equal(self.ours, self.hand, bad is None)
        for now, then in self.kept:
            assert_same(now, then, "master weights in state dicts")


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", FEW)
def test_random_programs(
    name: str, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    for seed in range(4):
        Program(name, dtype, seed).run()


CLOSURES: dict[str, Make] = {
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("name", CLOSURES)
def test_closures(name: str, keyword: bool) -> None:
    off = ampfast.GradScaler("cpu", enabled=False)
    ours, hand = both(CLOSURES[name], torch.bfloat16, off, turned=False)
    first = next(ours.model.parameters())

    def our_loss(seed: int) -> Tensor:
        assert ours.stepped()[0] is first
        return ours.backward(seed)

    def their_loss(seed: int) -> Tensor:
        hand.round()
        return hand.backward(seed)

    for seed in range(4):
        closure, step = partial(our_loss, seed), ours.optimizer.step
        loss = step(closure=closure) if keyword else step(closure)
        assert_same(loss, hand.optimizer.step(partial(their_loss, seed)))
        hand.round()
        assert_same(ours.params(), hand.params())
        assert ours.stepped()[0] is first


def test_hooks_run_once_around_a_step_of_any_class() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: list[Tensor]) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None, rate: float = 0.5, times: int = 1) -> None:
            (param,) = self.param_groups[0]["params"]
            for _ in range(times):
                if closure is not None:
                    closure()
                param.sub_(rate * param.grad)

    calls = []
    original: Any = Own([nn.Parameter(torch.zeros(3, dtype=torch.float16))])
    signature = inspect.signature(original.step)
    optimizer: Any = ampfast.master_weights_(original)
    for each in (optimizer, copy.deepcopy(optimizer)):
        assert inspect.signature(each.step) == signature
        (param,) = each.param_groups[0]["params"]
        each.register_step_post_hook(lambda *_, param=param: calls.append(param.tolist()))
        param.grad = torch.ones_like(param)
        each.step()
        compiled = torch.compile(each.step, backend="eager")
        compiled(lambda param=param: param.grad.mul_(2), 0.25, times=2)
    assert calls == [[-0.5] * 3, [-2.0] * 3] * 2


# Checkpoints


@pytest.mark.parametrize("names", [True, False])
def test_a_master_weight_that_was_rounded_warns(names: bool) -> None:
    params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]
    given: Any = zip("abc", params, strict=True) if names else params
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD(given, lr=0.5))
    rounded = copy.deepcopy(optimizer.state_dict())
    rounded["param_groups"][0]["lr"] = 7.0
    for index, dtype in ((1, torch.bfloat16), (2, torch.float16)):
        rounded["state"][index]["master_param"] = torch.ones(3, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(UserWarning):
            optimizer.load_state_dict(rounded)
    assert optimizer.param_groups[0]["lr"] == 0.5, "refused before anything is loaded"
    told = f"parameter {'b' if names else '1'} and 1 more in torch.bfloat16"
    with pytest.warns(UserWarning, match=told) as warned:
        optimizer.load_state_dict(rounded)
    assert [warning.filename for warning in warned] == [__file__]
    assert optimizer.master_weights[params[1]].dtype is torch.float32
    assert not optimizer.state, "no entries without state"


def test_a_checkpoint_of_parameters_that_are_frozen_here() -> None:
    saved = through_file(ours_of("adamw-foreach", steps=1).optimizer.state_dict())
    frozen = small_model(torch.float16).requires_grad_(False)
    optimizer: Any = OPTIMIZERS["adamw-foreach"](list(frozen.parameters()))
    held = ampfast.master_weights_(optimizer).state
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})
    assert not optimizer.state_dict()["state"]
    optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict()["state"], saved["state"])
    assert not held, "the state of before is left alone"


def test_hooks_of_checkpoints() -> None:
    """They see parameters in the groups, and master weights in the checkpoint."""
    optimizer = ours_of("adamw-plain", torch.bfloat16, 1).optimizer
    first, seen = optimizer.param_groups[0]["params"][0], []

    def wrapped(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        seen.append("master_param" in saved["state"][0])
        return {"optimizer": saved}

    def unwrapped(optimizer: Any, saved: dict[str, Any]) -> Any:
        seen.append(optimizer.param_groups[0]["params"][0] is first)
        return saved["optimizer"]

    def loaded(optimizer: Any) -> None:
        seen.append(first in optimizer.state)
        seen.append(torch.equal(optimizer.master_weights[first], master))

    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    optimizer.register_state_dict_post_hook(wrapped)
    optimizer.register_load_state_dict_pre_hook(unwrapped)
    optimizer.register_load_state_dict_post_hook(loaded)
    master, saved = optimizer.master_weights[first].clone(), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    assert not torch.equal(optimizer.master_weights[first], master)
    optimizer.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [True] * 8


# Parameters and gradients of other kinds


def made_in_inference() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)


ONES = torch.ones(2, dtype=torch.bfloat16)
UNUSUAL: dict[str, Callable[[], Any]] = {
    "inference": made_in_inference,
    "sparse": lambda: nn.Parameter(torch.eye(2, dtype=torch.bfloat16).to_sparse()),
    "jagged": lambda: nn.Parameter(
        torch.nested.nested_tensor([ONES, ONES[:1]], layout=torch.jagged)
    ),
    "uninitialized": lambda: nn.UninitializedParameter(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_parameter_that_is_never_stepped(kind: str) -> None:
    unusual, param = UNUSUAL[kind](), nn.Parameter(ONES.clone())
    optimizer: Any = torch.optim.SGD([unusual, param], lr=2**-10, momentum=0.5)
    step_by(optimizer, [param])  # has state when it is converted
    param.data.fill_(1)
    optimizer = ampfast.master_weights_(optimizer)
    assert optimizer.state[param]["momentum_buffer"].dtype is torch.float32
    scaler = ampfast.GradScaler("cpu", init_scale=1.0, track="overflow")
    scaler.scale(torch.ones(()))
    expected = 1.0
    for momentum in (1.5, 1.75, 1.875):
        param.grad = torch.ones_like(param)
        scaler.clip_grad_norm_(optimizer, 10.0)
        scaler.step_and_update(optimizer)
        expected -= momentum * 2**-10
        assert optimizer.master_weights[param].tolist() == [expected] * 2
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.zero_grad(set_to_none=False)
    assert [id(key) for key in optimizer.master_weights] == [id(param)]
    if kind == "uninitialized":
        unusual.materialize((3,))
        unusual.data.fill_(1)
        step_by(optimizer, [unusual])
        assert optimizer.master_weights[unusual].tolist() == [1 - 2**-10] * 3


@pytest.mark.parametrize("kind", [nn.Parameter, Subclassed])
@pytest.mark.parametrize("seen_as", [Tensor.t, lambda data: data.view(torch.float16)])
def test_data_seen_in_another_way_is_an_edit(seen_as: Any, kind: Any) -> None:
    """At the same address and of the same version."""
    param = kind(torch.arange(4.0).reshape(2, 2).to(torch.bfloat16))
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD([param], lr=0.0))
    step_by(optimizer, [param])
    optimizer.zero_grad()
    param.data = seen_as(param.data)
    expected = param.detach().clone()
    step_by(optimizer, [param])
    assert torch.equal(param.detach(), expected)
    assert torch.equal(optimizer.master_weights[param], expected.float())


def test_zero_grad_gives_zeros_of_grad_dtype() -> None:
    ours = ours_of("momentum-plain", torch.float16, 1)
    first, second, *_ = params = list(ours.model.parameters())
    assert {param.grad.dtype for param in params} == {torch.float32}
    ours.optimizer.zero_grad(set_to_none=False)
    for param in params:
        assert_same(param.grad, torch.zeros_like(param.detach()))
    first.grad.fill_(1.0)
    kept, second.grad = first.grad, None
    ours.optimizer.zero_grad(set_to_none=False)
    assert first.grad is kept, "of 16 bit, as in a bucket"
    assert not kept.any() and second.grad is None
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD([param], lr=0.5))
    param.grad_dtype = torch.float32
    for _ in range(2):
        (param * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert param.grad_dtype is torch.float32
        assert_same(param.grad, torch.zeros(3))
    assert param.tolist() == [-1.0] * 3


@pytest.mark.parametrize("way", ["step", "unscale_", "in_place=False", "step_and_update"])
def test_the_host_reads_nothing_of_a_fused_step(way: str) -> None:
    ours = ours_of("adamw-fused", steps=1)
    ours.backward(1)

    def step() -> None:
        if way == "in_place=False":
            ours.scaler.clip_grad_norm_(ours.optimizer, 1.0, in_place=False)
        take_step(ours.scaler, ours.optimizer, way=way)

    assert host_reads(step) == 0


def test_float32_memory_is_used_again_unless_someone_holds_it() -> None:
    ours = ours_of("adamw-fused", steps=1)
    params, held = list(ours.model.parameters()), []

    def addresses_of_next(seed: int) -> list[int]:
        ours.train(seed)
        return [param.grad.data_ptr() for param in params if param.dtype in HALVES]

    before = addresses_of_next(3)
    assert addresses_of_next(6) == before
    for hold in (Tensor.numpy, Tensor.t, lambda grad: grad):
        held.append(hold(params[0].grad))
        values = [torch.as_tensor(each).clone() for each in held]
        after = addresses_of_next(9)
        assert not set(after) & set(before)
        assert_same([torch.as_tensor(each) for each in held], values)
        before = after


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients(kind: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(6, 4, sparse=True).half()

    ours, hand = (side(make(), partial(kind, lr=0.1)) for side in (Ours, ByHand))
    follow(ours, hand, [0, 3, 6])


@pytest.mark.parametrize("kind", [dict, Group])
def test_parameters_that_are_trained_later_and_removed(kind: Any) -> None:
    trained, frozen, other = (nn.Parameter(torch.ones(3).half(), i == 0) for i in range(3))
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD([trained, frozen, other], lr=2**-12))
    optimizer.param_groups[0] = kind(optimizer.param_groups[0])
    step_by(optimizer, [trained])
    assert list(optimizer.master_weights) == [trained]
    other.grad = torch.ones(3).half()
    assert list(optimizer.master_weights) == [trained, other]
    version = other._version
    step_by(optimizer, [trained])
    assert other._version > version
    assert list(optimizer.state_dict()["state"]) == [0, 2]
    for params in ([trained], [trained, other], [trained]):
        optimizer.param_groups[0]["params"] = params
        step_by(optimizer, params)
        assert list(optimizer.master_weights) == params
        if len(params) == 2:
            assert optimizer.master_weights[other].tolist() == [1 - 2**-12] * 3, "from 16 bit again"
    assert optimizer.master_weights[trained].tolist() == [1 - 5 * 2**-12] * 3
    references = weakref.ref(other), weakref.ref(optimizer)
    del params, other
    gc.collect()
    assert references[0]() is None
    del optimizer
    gc.collect()
    assert references[1]() is None, "nothing keeps an optimizer alive"


# What is refused


class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def plain_sgd(**attributes: Any) -> torch.optim.Optimizer:
    param = nn.Parameter(torch.ones(2).half())
    param._is_flat_param = "flat" in attributes
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    step_by(optimizer, [param])  # so that its state is loaded again
    vars(optimizer).update(attributes)
    return optimizer


def with_a_hook_that_fails() -> torch.optim.Optimizer:
    optimizer = plain_sgd()
    optimizer.register_load_state_dict_pre_hook(lambda *_: {}["by a hook"])
    return optimizer


NEEDED = [(name, f"has an attribute {name} of its own") for name in ("master_weights", "_masters")]
DIFFERENTIABLE = partial(torch.optim.Adam, differentiable=True)
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: nn.Linear(1, 1), TypeError, "takes a torch.optim.Optimizer, got torch.nn.*Linear"),
    (lambda: Wrapper(plain_sgd()), TypeError, "pass the inner one"),
    (lambda: plain_sgd(flat=1), TypeError, "flat parameter of FSDP1"),
    (lambda: DIFFERENTIABLE([ONES]), ValueError, "group 0 has differentiable=True"),
    (lambda: plain_sgd(step=None), RuntimeError, "before the scheduler or trainer"),
    (with_a_hook_that_fails, KeyError, "by a hook"),
    *((partial(plain_sgd, **{name: 0}), TypeError, text) for name, text in NEEDED),
    (plain_sgd, RuntimeError, "cannot capture master_weights_"),
]


@pytest.mark.parametrize(("make", "error", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_refusals_change_nothing(
    make: Callable[[], Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = make()
    monkeypatch.setattr("ampfast.backends.cuda_graphs.is_capturing", lambda: "capture" in text)
    kind, before = type(optimizer), dict(vars(optimizer))
    state = list(getattr(optimizer, "state", ()))
    with pytest.raises(error, match=text):
        ampfast.master_weights_(optimizer)
    assert type(optimizer) is kind
    assert vars(optimizer).keys() == before.keys()
    assert all(value is before[key] for key, value in vars(optimizer).items())
    assert [id(key) for key in getattr(optimizer, "state", ())] == [id(key) for key in state]


UNLIKE: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda weight: weight.to("meta"), "on meta, "),
    (torch.Tensor.to_sparse, r"torch\.sparse_coo of "),
    (lambda weight: weight.to(torch.complex64), r"torch\.complex64 on "),
    (lambda weight: torch.zeros(5), r"\(5,\), and must be .* \(7,\)"),
    (lambda weight: 3.0, r"3\.0, and must be"),
]


@pytest.mark.parametrize(("change", "text"), UNLIKE, ids=[text for _, text in UNLIKE])
def test_what_is_no_master_weight_is_refused_before_loading(
    change: Callable[[Tensor], Any], text: str
) -> None:
    optimizer = ours_of("adamw-plain", torch.bfloat16, 1).optimizer
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 7.0
    for entry in wrong["state"].values():
        entry["exp_avg"].fill_(7.0)
    wrong["state"][1]["master_param"] = change(wrong["state"][1]["master_param"])
    with pytest.raises(ValueError, match=f"of parameter 1 is .*{text}") as told:
        optimizer.load_state_dict(wrong)
    assert "and must be a dense float32 tensor" in str(told.value)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**before, "param_groups": []})
    assert_same(optimizer.state_dict(), before)


def resized(param: Tensor, data: Tensor) -> None:
    param.grad, param.data = None, data


def test_errors_of_a_step_change_nothing() -> None:
    ours, hand = both("momentum-plain")
    follow(ours, hand, range(1))
    first, third = ours.model[0], ours.model[2].weight
    weight, group = third.data, ours.optimizer.param_groups[0]
    for text, wrong, right in (
        (r"parameter 0 of group 0 is torch\.float32", first.float, first.half),
        (
            r"parameter 3 of group 0 is .* of shape \(1, 7\)",
            *(partial(resized, third, each) for each in (weight[:1], weight)),
        ),
        (
            "differentiable=True",
            *(partial(group.update, differentiable=each) for each in (True, False)),
        ),
    ):
        ours.backward(1)
        wrong()
        with pytest.raises((RuntimeError, ValueError), match=text):
            ours.scaler.step(ours.optimizer)
        right()
        ours.scaler.update()
        assert_same(ours.params(), hand.params())
        ours.optimizer.zero_grad()
    follow(ours, hand, range(2, 4))


@contextmanager
def interrupted(at: int) -> Iterator[list[int]]:
    """An interrupt at a line of the package, by number; the lines so far."""
    package, lines, tracing = os.path.dirname(ampfast.__file__), [0], sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(package):
            return None
        lines[0] += event == "line"
        if lines[0] == at:
            sys.settrace(tracing)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(tracing)


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("name", ["adamw-plain", "adamw-fused"])
@pytest.mark.parametrize("way", ["step", "closure", "load"])
def test_an_interrupt_at_any_line_restores(way: str, name: str, edited: bool) -> None:
    def with_gradients(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(5, generator=generator).half()
        return torch.zeros(())

    for at in range(1, 10_000):
        params = [nn.Parameter(torch.linspace(1, 2, 5).half()) for _ in range(2)]
        optimizer: Any = OPTIMIZERS[name](params[:1])
        optimizer.add_param_group({"params": params[1:]})
        ampfast.master_weights_(optimizer)
        with_gradients(0)
        optimizer.step()
        state, stored = optimizer.state, copy.deepcopy(optimizer.state_dict())
        with_gradients(1)
        with torch.no_grad():
            params[0].mul_(2 if edited else 1)
        gradients = [param.grad.float() for param in params]
        call = {
            "step": optimizer.step,
            "closure": partial(optimizer.step, partial(with_gradients, 2)),
            "load": partial(optimizer.load_state_dict, stored),
        }[way]
        try:
            # Where the end of a `with torch.no_grad()` is interrupted, gradients stay off.
            with torch.enable_grad(), interrupted(at) as lines:
                call()
        except KeyboardInterrupt:
            pass
        else:
            break
        grouped = [id(param) for group in optimizer.param_groups for param in group["params"]]
        assert grouped == [id(param) for param in optimizer.state] == [id(p) for p in params]
        assert way == "load" or optimizer.state is state
        if way != "closure":
            assert_same([param.grad.float() for param in params], gradients)
        before = [param.tolist() for param in params]
        with_gradients(3)
        params[0].grad = None  # a gradient of the failed step is not stepped later
        optimizer.step()
        assert [p.tolist() != each for p, each in zip(params, before, strict=True)] == [0, 1]
        assert all(torch.equal(p, optimizer.master_weights[p].half()) for p in params)
    assert lines[0] == at - 1 > 50


# Optimizers unlike torch's own


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


@pytest.mark.parametrize("param", [nn.Parameter, Subclassed])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_an_optimizer_that_steps_a_list_of_its_own_is_refused(
    backend: str, param: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    full = nn.Parameter(torch.ones(2))
    params = [param(torch.ones(size, dtype=torch.bfloat16)) for size in (5, 3)]
    optimizer: Any = ampfast.master_weights_(OwnList([full, *params], lr=0.1))
    step_by(optimizer, [full])  # of what has no master weight
    assert full.tolist() == [0.5] * 2
    with pytest.raises(RuntimeError, match="step changed parameter 2 while a master weight"):
        step_by(optimizer, params[1:])
    assert params[1].tolist() == [0.5] * 3, "as the optimizer left it"
    assert [p for p in optimizer.param_groups[0]["params"] if p.dtype is torch.float32] == [full]
    optimizer.mine = []
    optimizer.step()
    assert optimizer.master_weights[params[1]].tolist() == [0.5] * 3, "parameters win"
    optimizer = ampfast.master_weights_(OwnList(params[:1], lr=0.1))  # of one parameter alone
    with pytest.raises(RuntimeError, match="step changed parameter 0 while a master weight"):
        step_by(optimizer, params[:1])


def test_an_own_class_keeps_its_methods_and_may_be_derived_from() -> None:
    optimizer = ours_of("abstract", steps=1).optimizer
    optimizer.load_state_dict(through_file(optimizer.state_dict()))
    assert optimizer.loaded == 1

    class Derived(type(optimizer)):  # type: ignore[misc]
        def step(self, closure: Any = None) -> str:
            super().step(closure)
            return "derived"

    optimizer.__class__ = Derived
    assert optimizer.step() == "derived"


@pytest.mark.parametrize("flat", [False, True])
def test_named_checkpoints(flat: bool) -> None:
    """torch drops master weights as it loads a flat one."""
    api = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    options = api.StateDictOptions(flatten_optimizer_state_dict=flat)
    ours, resumed = ours_of("adamw-foreach", steps=3), ours_of("adamw-foreach")
    named = api.get_optimizer_state_dict(ours.model, ours.optimizer, options=options)
    resumed.model.load_state_dict(ours.model.state_dict())
    load = partial(api.set_optimizer_state_dict, resumed.model, resumed.optimizer)
    if flat:
        with pytest.raises(ValueError, match="flatten_optimizer_state_dict"):
            load(named, options=options)
        frozen = small_model(torch.float16).requires_grad_(False)
        optimizer = ampfast.master_weights_(torch.optim.SGD(frozen.parameters(), lr=0.1))
        named = api.get_optimizer_state_dict(frozen, optimizer, options=options)
        api.set_optimizer_state_dict(frozen, optimizer, named, options=options)  # needs none
        return
    load(copy.deepcopy(named), options=options)
    assert_same(resumed.optimizer.state_dict()["state"], ours.optimizer.state_dict()["state"])
