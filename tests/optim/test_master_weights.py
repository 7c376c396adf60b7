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
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from support.comparison import assert_same, started
from support.gradients import filled
from support.steps import host_reads, small_model, take_step, through_file
from torch import Tensor, nn

import ampfast

HALVES = (torch.float16, torch.bfloat16)
BAD = {2: math.inf, 5: math.nan}

Make = Callable[[list[Tensor]], Any]


class Dropping(torch.optim.SGD):
    """Drops gradients in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


MORE: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9},
}
VARIANTS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def optimizers() -> dict[str, Make]:
    """Every optimizer of torch with a dense step, in its variants; and one that drops gradients."""
    found: dict[str, Make] = {"Dropping": partial(Dropping, lr=0.01, momentum=0.9)}
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and name not in ("Optimizer", "LBFGS", "SparseAdam"):
            keywords = inspect.signature(kind).parameters
            make = partial(kind, lr=0.01, **MORE.get(name, {}))
            options = {each: more for each, more in VARIANTS.items() if {*more} <= {*keywords}}
            for each, more in (options or {"only": {}}).items():
                found[f"{name}-{each}"] = partial(make, **more)
    if (muon := found.pop("Muon-only", None)) is not None:
        found["Muon"] = lambda params: muon([param for param in params if param.dim() == 2])
    return found


OPTIMIZERS = optimizers()
FEW = ("SGD-plain", "AdamW-foreach", "AdamW-fused", "SGD-fused", "Dropping")


class Gain(nn.Module):
    """Stays in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((7,), 1.5))

    def forward(self, values: Tensor) -> Tensor:
        return (values.tanh() * self.weight).to(values.dtype)


def model_of(dtype: torch.dtype, turned: bool = True) -> nn.Module:
    model: Any = small_model(1).to(dtype)
    model[1] = Gain()
    if turned:
        model[2].weight.data = model[2].weight.data.t().contiguous().t()
    return model


def loss_of(model: nn.Module, seed: int) -> Tensor:
    if isinstance(model, nn.Embedding):
        return model(torch.tensor([1, 3, 1])).float().square().sum()
    values = filled((5, 8), next(model.parameters()).dtype, seed)
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
        take_step(self.scaler, self.optimizer)

    def stepped(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def weights(self) -> list[Tensor]:
        masters = self.optimizer.master_weights
        return [masters.get(p, p.detach().float()) for p in self.model.parameters()]


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


def seen_of(side: Ours, weights: bool = True) -> list[Any]:
    params = side.stepped()
    seen: list[Any] = [[param.detach() for param in side.model.parameters()]]
    seen += [side.scaler.get_scale(), [param.grad is None for param in params]]
    state = [side.optimizer.state.get(param, {}) for param in params]
    return [*seen, side.weights(), state] if weights else seen


def follow(ours: Ours, hand: Ours, seeds: Iterable[int] = range(9)) -> None:
    """Trains both, and compares all after each step."""
    for seed in seeds:
        for each in (ours, hand):
            each.backward(seed, BAD.get(seed))
            each.step()
        assert_same(seen_of(ours), seen_of(hand), f"step {seed}")


def both(make: Make, dtype: torch.dtype, scaler: Any = None) -> tuple[Ours, ByHand]:
    models = [model_of(dtype, turned=scaler is None) for _ in range(2)]
    return Ours(models[0], make, scaler), ByHand(models[1], make, scaler)


def ours_of(name: str, dtype: torch.dtype = torch.float16, steps: int = 0) -> Ours:
    ours = Ours(model_of(dtype), OPTIMIZERS[name])
    for seed in range(steps):
        ours.backward(seed)
        ours.step()
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
    ours, hand = both(OPTIMIZERS[name], dtype)
    follow(ours, hand)
    assert ours.scaler.get_scale() == 12.0
    masters = ours.optimizer.master_weights
    assert not all(torch.equal(masters[p], p.float()) for p in masters), "low bits must be in use"
    kind, original = type(ours.optimizer), type(hand.optimizer)
    assert ampfast.master_weights_(ours.optimizer) is ours.optimizer
    assert type(ours.optimizer) is kind
    assert kind.__mro__[1:] == (ampfast.MasterWeights, *original.__mro__)
    assert kind.__name__ == original.__name__


class Program:
    """Random events of a training; its last layer's weight thaws and its bias is added later."""

    EVENTS = ("nothing", "edit", "convert", "replace", "thaw", "add", "clear", "groups")
    EVENTS += ("copied", "pickled", "load")
    WAYS = ("step", "together", "clip", "deferred", "unscaled", "bare")

    def __init__(self, name: str, dtype: torch.dtype, seed: int) -> None:
        self.chance = random.Random(f"{name} {dtype} {seed}")
        self.takes_later = name != "SGD-fused"
        self.kept: list[Any] = []
        models = [model_of(dtype) for _ in range(2)]
        for model in models:
            model[2].weight.requires_grad_(False)
        scalers = [
            # A power of two: copies of fused optimizers multiply by its inverse.
            ampfast.GradScaler("cpu", init_scale=64.0, growth_interval=3, track=track)
            for track in (self.chance.choice([None, "overflow", "norms"]), None)
        ]
        make = OPTIMIZERS[name]
        self.ours = Ours(models[0], lambda params: make(params[:-1]), scalers[0])
        self.hand = ByHand(models[1], lambda params: make(params[:-1]), scalers[1])

    def happen(self, event: str) -> None:
        ours, sides = self.ours, (self.ours, self.hand)
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
        elif event == "thaw" and self.takes_later:
            for side in sides:
                side.model[2].weight.requires_grad_(True)
        elif event == "add" and self.takes_later and len(ours.optimizer.param_groups) == 1:
            ours.model[2].bias.grad = None
            masters = self.hand.masters
            for side, one in ((ours, ours.model[2].bias), (self.hand, [*masters.values()][-1])):
                side.optimizer.add_param_group({"params": [one], "lr": 0.2})
        elif event == "clear":
            for side in sides:
                side.optimizer.state.clear()
        elif event == "groups":
            (group, *more) = ours.optimizer.param_groups
            ours.optimizer.param_groups[:] = [self.chance.choice([dict, Group])(group), *more]
        elif event in ("copied", "pickled"):
            copied = copy.deepcopy if event == "copied" else pickled
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
        norms: list[Tensor] = []
        for side in (ours, hand):
            if way == "unscaled":
                side.scaler.unscale_(side.optimizer)
                norms.append(nn.utils.clip_grad_norm_(side.stepped(), 0.05))
            elif way in ("clip", "deferred"):
                # Copies of fused optimizers have lost it, as torch's.
                can_defer = getattr(ours.optimizer, "_step_supports_amp_scaling", False)
                clip = partial(side.scaler.clip_grad_norm_, in_place=way == "clip" or not can_defer)
                assert_same(side.scaler.grad_norm(side.optimizer), clip(side.optimizer, 0.05))
                norms.append(side.scaler.grad_norm(side.optimizer))
        if norms:
            assert_same(*norms, "norm")
            assert_same(*([param.grad for param in side.stepped()] for side in (ours, hand)))
        if way == "together":
            ours.scaler.step_and_update(ours.optimizer)
        else:
            ours.step()
        hand.step()

    def run(self) -> None:
        chance, bad = self.chance, math.inf
        for turn in range(30):
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
            assert_same(seen_of(self.ours, bad is None), seen_of(self.hand, bad is None))
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


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("make", [partial(torch.optim.LBFGS, max_iter=3), OPTIMIZERS["SGD-plain"]])
def test_closures(make: Make, keyword: bool) -> None:
    ours, hand = both(make, torch.bfloat16, ampfast.GradScaler("cpu", enabled=False))
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
        assert_same(seen_of(ours, False), seen_of(hand, False))


def test_what_is_no_closure_is_passed_on() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None, times: float = 1.0) -> Any:
            seen.append((closure, times))

    seen: list[Any] = []
    optimizer: Any = ampfast.master_weights_(Own([torch.nn.Parameter(torch.ones(3).half())]))
    optimizer.step(None, 2.0)
    optimizer.step(3.0)
    assert seen == [(None, 2.0), (3.0, 1.0)]


def test_hooks_run_once_around_a_step_of_any_class() -> None:
    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None, rate: float = 0.5) -> None:
            (param,) = self.param_groups[0]["params"]
            for _ in range(1 if closure is None else 2):
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
        step_by(each, [param])
        compiled = torch.compile(each.step, backend="eager")
        compiled(lambda param=param: param.grad.mul_(2), 0.25)
    assert calls == [[-0.5] * 3, [-2.0] * 3] * 2


@pytest.mark.parametrize("way", ["step", "unscale", "defer", "together"])
def test_the_host_reads_nothing_of_a_fused_step(way: str) -> None:
    ours = ours_of("AdamW-fused", steps=1)
    ours.backward(1)
    assert host_reads(partial(take_step, ours.scaler, ours.optimizer, way=way)) == 0


def test_float32_memory_is_used_again_unless_someone_holds_it() -> None:
    ours = ours_of("AdamW-fused", steps=1)
    params, held = list(ours.model.parameters()), []

    def next_addresses() -> list[int]:
        ours.backward(3)
        ours.step()
        return [param.grad.data_ptr() for param in params if param.dtype in HALVES]

    before = next_addresses()
    assert next_addresses() == before
    for hold in (Tensor.numpy, Tensor.t, lambda grad: grad):
        held.append(hold(params[0].grad))
        values = [torch.as_tensor(each).clone() for each in held]
        after = next_addresses()
        assert not set(after) & set(before)
        assert_same([torch.as_tensor(each) for each in held], values)
        before = after


# Checkpoints


def test_a_checkpoint_of_parameters_that_are_frozen_here() -> None:
    saved = through_file(ours_of("AdamW-foreach", steps=1).optimizer.state_dict())
    optimizer = ours_of("AdamW-foreach").optimizer
    for param in optimizer.param_groups[0]["params"]:
        param.requires_grad_(False)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})
    optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict()["state"], saved["state"])


def test_hooks_of_checkpoints() -> None:
    """They see parameters in the groups, and master weights in the checkpoint."""
    optimizer = ours_of("AdamW-plain", torch.bfloat16, 1).optimizer
    first, seen = optimizer.param_groups[0]["params"][0], []
    master = optimizer.master_weights[first].clone()

    def loaded(optimizer: Any) -> None:
        seen.append(first in optimizer.state)
        seen.append(torch.equal(optimizer.master_weights[first], master))

    optimizer.register_state_dict_post_hook(lambda _, saved: {"optimizer": saved})
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved["optimizer"])
    optimizer.register_load_state_dict_post_hook(loaded)
    saved = copy.deepcopy(optimizer.state_dict())
    assert_same(saved["optimizer"]["state"][0]["master_param"], master)
    optimizer.step()
    assert not torch.equal(optimizer.master_weights[first], master)
    optimizer.load_state_dict(saved)
    assert seen == [True, True]


UNLIKE: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda weight: torch.zeros(5), r"\(7,\), got tensor\(\[0"),
    (lambda weight: 3.0, r"got 3\.0"),
]


@pytest.mark.parametrize(("change", "text"), UNLIKE, ids=[text for _, text in UNLIKE])
def test_what_is_no_master_weight_is_refused_before_loading(
    change: Callable[[Tensor], Any], text: str
) -> None:
    optimizer = ours_of("AdamW-plain", torch.bfloat16, 1).optimizer
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 7.0
    wrong["state"][0]["exp_avg"].fill_(7.0)
    wrong["state"][1]["master_param"] = change(wrong["state"][1]["master_param"])
    with pytest.raises(ValueError, match=f"(?s)of parameter 1 must be .*{text}"):
        optimizer.load_state_dict(wrong)
    assert_same(optimizer.state_dict(), before)


def test_named_checkpoints_without_master_weights() -> None:
    """torch drops them as it loads a flat one, and frozen parameters need none."""
    api = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    options = api.StateDictOptions(flatten_optimizer_state_dict=True)
    ours = ours_of("AdamW-foreach", steps=1)
    load = partial(api.set_optimizer_state_dict, ours.model, ours.optimizer, options=options)
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict"):
        load(api.get_optimizer_state_dict(ours.model, ours.optimizer, options=options))
    frozen = model_of(torch.float16).requires_grad_(False)
    optimizer = ampfast.master_weights_(torch.optim.SGD(frozen.parameters(), lr=0.1))
    named = api.get_optimizer_state_dict(frozen, optimizer, options=options)
    api.set_optimizer_state_dict(frozen, optimizer, named, options=options)


# Parameters and gradients of other kinds


ONES = torch.ones(2, dtype=torch.bfloat16)
UNUSUAL: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode()(lambda: nn.Parameter(ONES + 0, requires_grad=False)),
    "sparse": lambda: nn.Parameter(torch.eye(2, dtype=torch.bfloat16).to_sparse()),
    "jagged": lambda: nn.Parameter(torch.nested.nested_tensor([ONES], layout=torch.jagged)),
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
    scaler = started(scale=1.0, track="overflow")
    for expected in (1 - 1.5 * 2**-10, 1 - 3.25 * 2**-10):
        param.grad = torch.ones_like(param)
        scaler.clip_grad_norm_(optimizer, 10.0)
        scaler.step_and_update(optimizer)
        assert optimizer.master_weights[param].tolist() == [expected] * 2
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
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


def test_an_edit_through_data_is_not_noticed() -> None:
    param = nn.Parameter(ONES.clone())
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD([param], lr=0.5))
    for expected in (0.5, 0.0):
        step_by(optimizer, [param])
        assert param.tolist() == [expected] * 2
        param.data.fill_(7.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(6, 4, sparse=True).half()
    sides = [side(copy.deepcopy(model), partial(kind, lr=0.1)) for side in (Ours, ByHand)]
    follow(*sides, [0, 3, 6])


@pytest.mark.parametrize("kind", [dict, Group])
def test_parameters_that_are_trained_later_and_removed(kind: Any) -> None:
    trained, frozen, other = (nn.Parameter(torch.ones(3).half(), i == 0) for i in range(3))
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD([trained, frozen, other], lr=2**-12))
    optimizer.param_groups[0] = kind(optimizer.param_groups[0])
    assert list(optimizer.master_weights) == [trained]
    other.grad = torch.ones(3).half()
    step_by(optimizer, [trained])
    assert list(optimizer.state_dict()["state"]) == [0, 2]
    for params in ([trained], [trained, other], [trained]):
        optimizer.param_groups[0]["params"] = params
        step_by(optimizer, params)
        assert list(optimizer.master_weights) == params
        if len(params) == 2:
            assert optimizer.master_weights[other].tolist() == [1 - 2**-12] * 3, "from 16 bit again"
    assert optimizer.master_weights[trained].tolist() == [1 - 4 * 2**-12] * 3
    references = weakref.ref(other), weakref.ref(optimizer)
    del params, other, optimizer
    gc.collect()
    assert [each() for each in references] == [None, None], "nothing keeps them alive"


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


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: nn.Linear(1, 1), TypeError, "takes a torch.optim.Optimizer, got torch.nn.*Linear"),
    (lambda: Wrapper(plain_sgd()), TypeError, "pass the inner one"),
    (partial(plain_sgd, flat=1), TypeError, "flat parameter of FSDP1"),
    (partial(torch.optim.Adam, [ONES], differentiable=True), ValueError, "differentiable=True"),
    (partial(plain_sgd, step=None), RuntimeError, "before the scheduler or trainer"),
    (with_a_hook_that_fails, KeyError, "by a hook"),
    (plain_sgd, RuntimeError, "cannot capture master_weights_"),
]


@pytest.mark.parametrize(("make", "error", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_refusals_change_nothing(
    make: Callable[[], Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = make()
    monkeypatch.setattr("ampfast.backends.cuda_graphs.is_capturing", lambda: "capture" in text)
    kind, before = type(optimizer), dict(vars(optimizer))
    with pytest.raises(error, match=text):
        ampfast.master_weights_(optimizer)
    assert type(optimizer) is kind
    assert vars(optimizer).keys() == before.keys()
    assert all(value is before[key] for key, value in vars(optimizer).items())


def test_errors_of_a_step_change_nothing() -> None:
    ours, hand = both(OPTIMIZERS["SGD-plain"], torch.float16)
    follow(ours, hand, range(1))
    first, third, group = ours.model[0], ours.model[2].weight, ours.optimizer.param_groups[0]

    def resized(data: Tensor) -> None:
        third.grad, third.data = None, data

    wrongs: list[tuple[str, Any, Any, Any]] = [
        (r"parameter 0 is torch\.float32", first.to, torch.float32, torch.float16),
        (r"parameter 3 is .* of shape \(1, 7\)", resized, third.data[:1], third.data),
        ("True", partial(group.__setitem__, "differentiable"), True, False),
    ]
    for text, change, wrong, right in wrongs:
        ours.backward(1)
        change(wrong)
        with pytest.raises((RuntimeError, ValueError), match=text):
            ours.scaler.step(ours.optimizer)
        change(right)
        ours.scaler.update()
        ours.optimizer.zero_grad()
    follow(ours, hand, range(2, 4))


def reaches(line: int, call: Callable[[], Any]) -> bool:
    """Whether a call runs so many lines of the package; the last one is interrupted."""
    package, tracing, count = os.path.dirname(ampfast.__file__), sys.gettrace(), 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(package):
            return None
        count += event == "line"
        if count == line:
            sys.settrace(tracing)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        # Where the end of a `with torch.no_grad()` is interrupted, gradients stay off.
        with torch.enable_grad():
            call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracing)
    return False


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("name", ["AdamW-plain", "AdamW-fused"])
@pytest.mark.parametrize("way", ["step", "closure", "load"])
def test_an_interrupt_at_any_line_restores(way: str, name: str, edited: bool) -> None:
    def with_gradients(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(5, generator=generator).half()
        return torch.zeros(())

    for line in range(1, 10_000):
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
        if not reaches(line, call):
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
    assert line > 50


class OwnList(torch.optim.SGD):
    """Steps a list of its own."""

    def __init__(self, params: list[Any]) -> None:
        super().__init__(params, lr=0.1)
        self.mine = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.mine:
            if param.grad is not None:
                param.sub_(param.grad.to(param.dtype), alpha=0.5)


@pytest.mark.parametrize("kind", [nn.Parameter, Subclassed])
def test_an_optimizer_that_steps_a_list_of_its_own_is_refused(kind: Any) -> None:
    full = nn.Parameter(torch.ones(2))
    params = [kind(torch.ones(size, dtype=torch.bfloat16)) for size in (5, 3)]
    optimizer: Any = ampfast.master_weights_(OwnList([full, *params]))
    step_by(optimizer, [full])  # of what has no master weight
    assert full.tolist() == [0.5] * 2
    with pytest.raises(RuntimeError, match="step changed a parameter while a master weight"):
        step_by(optimizer, params[1:])
    assert params[1].tolist() == [0.5] * 3, "as the optimizer left it"
    assert [p for p in optimizer.param_groups[0]["params"] if p.dtype is torch.float32] == [full]
    optimizer.mine = []
    optimizer.step()
    assert optimizer.master_weights[params[1]].tolist() == [0.5] * 3, "parameters win"
