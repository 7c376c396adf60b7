"""Optimizers with float32 master weights, against master weights written by hand, bit for bit."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import itertools
import math
import os
import pickle
import resource
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.outcomes import outcome
from support.requested_kernels import VARIABLE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampfast

HALVES = (torch.float16, torch.bfloat16)
STEPS = 9
BAD = {2: math.inf, 5: math.nan}

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def optimizers() -> dict[str, Make]:
    """Every optimizer of torch.optim with a dense step, and its variants."""
    adam, sgd, adagrad = torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "sgd": (sgd, {"lr": 0.1}),
        "momentum": (sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        "adam": (adam, {"lr": 0.01, "amsgrad": True}),
        "adamw": (torch.optim.AdamW, {"lr": 0.01}),
        "adamax": (torch.optim.Adamax, {"lr": 0.01}),
        "nadam": (torch.optim.NAdam, {"lr": 0.01}),
        "radam": (torch.optim.RAdam, {"lr": 0.01}),
        "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9}),
        "rprop": (torch.optim.Rprop, {"lr": 0.01}),
        "adagrad": (adagrad, {"lr": 0.01}),
        "adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
        "asgd": (torch.optim.ASGD, {"lr": 0.1}),
    }
    variants = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    made: dict[str, Make] = {
        f"{name}-{variant}": partial(kind, **options, **more)
        for name, (kind, options) in kinds.items()
        for variant, more in variants.items()
        if variant != "fused" or kind in (adam, sgd, adagrad, torch.optim.AdamW)
    }
    made["adafactor"] = partial(torch.optim.Adafactor, lr=0.01)
    if hasattr(torch.optim, "Muon"):
        made["muon"] = lambda params: torch.optim.Muon([p for p in params if p.dim() == 2])
    return made


OPTIMIZERS = optimizers()
FEW = ("momentum-plain", "adamw-foreach", "adamw-fused", "momentum-fused")


def small_model(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    if isinstance(model, nn.Embedding):
        return model(torch.tensor([1, 3, 1])).float().square().sum()
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    values = torch.randn(5, 8, generator=generator).to(first.dtype)
    return model(values).float().square().mean()


class Ours:
    """A model under `master_weights_` and our scaler."""

    def __init__(self, model: nn.Module, make: Make, scaler: Any = None, **options: Any) -> None:
        self.model = model
        self.optimizer = self.made(make)
        self.scaler = scaler or self.kind("cpu", init_scale=64.0, **options)

    kind: Any = ampfast.GradScaler

    def made(self, make: Make) -> Any:
        return ampfast.master_weights_(make(list(self.model.parameters())))

    def backward(self, seed: int, bad: float | None = None) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(loss_of(self.model, seed)).backward()
        if bad is not None:
            next(self.model.parameters()).grad.view(-1)[3] = bad

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, seed: int, bad: float | None = None) -> None:
        self.backward(seed, bad)
        self.step()

    def params(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]

    def weights(self) -> list[Tensor]:
        masters = self.optimizer.master_weights
        return [masters[p] if p in masters else p.detach() for p in self.model.parameters()]

    def state(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()["state"]
        kept = {
            index: {name: value for name, value in entry.items() if name != "master_param"}
            for index, entry in state.items()
        }
        return {index: entry for index, entry in kept.items() if entry}


class ByHand(Ours):
    """Master weights by hand: an optimizer of float32 copies, and torch's scaler."""

    kind = torch.amp.GradScaler

    def made(self, make: Make) -> Any:
        params = list(self.model.parameters())
        wide = [p.detach().float().requires_grad_() if p.dtype in HALVES else p for p in params]
        self.floats = wide
        optimizer = make(wide)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.masters = {p: m if id(m) in stepped else p for p, m in zip(params, wide, strict=True)}
        return optimizer

    def backward(self, seed: int, bad: float | None = None) -> None:
        self.model.zero_grad()
        super().backward(seed, bad)
        self.widen()

    def widen(self) -> None:
        for param, master in self.masters.items():
            if master is not param and param.grad is not None:
                master.grad = param.grad.float()

    def step(self) -> None:
        grads = [each.grad for each in self.masters.values() if each.grad is not None]
        super().step()
        if all(grad.to_dense().isfinite().all() for grad in grads):
            self.round()

    @torch.no_grad()
    def round(self) -> None:
        for param, master in self.masters.items():
            if master.grad is not None and master is not param:
                param.copy_(master)

    def weights(self) -> list[Tensor]:
        return [master.detach() for master in self.masters.values()]


def assert_equal(ours: Ours, hand: Ours) -> None:
    assert_same(ours.params(), hand.params())
    assert_same(ours.weights(), hand.weights(), "masters")
    assert_same(ours.state(), hand.state(), "state")
    assert_same(ours.scaler.get_scale(), hand.scaler.get_scale(), "scale")


def follow(ours: Ours, hand: Ours, seeds: Iterable[int] = range(STEPS)) -> None:
    """Trains both, and compares all after each step."""
    for seed in seeds:
        ours.train(seed, BAD.get(seed))
        hand.train(seed, BAD.get(seed))
        assert_equal(ours, hand)


def both(name: str, dtype: torch.dtype, **options: Any) -> tuple[Ours, ByHand]:
    make = OPTIMIZERS[name]
    return Ours(small_model(dtype), make, **options), ByHand(small_model(dtype), make)


def ours_of(name: str, dtype: torch.dtype = torch.float16, steps: int = 0) -> Ours:
    ours, _ = both(name, dtype)
    for seed in range(steps):
        ours.train(seed)
    return ours


def sgd_of(
    count: int = 1, dtype: torch.dtype = torch.bfloat16, lr: float = 0.5, **options: Any
) -> tuple[Any, list[nn.Parameter]]:
    """SGD with master weights of parameters that are 1."""
    params = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(count)]
    return ampfast.master_weights_(torch.optim.SGD(params, lr=lr, **options)), params


def step_by(optimizer: Any, params: list[Any], value: float = 1.0) -> None:
    for param in params:
        param.grad = torch.full_like(param, value)
    optimizer.step()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, dtype: torch.dtype) -> None:
    ours, hand = both(name, dtype)
    follow(ours, hand)
    assert ours.scaler.get_scale() == 16.0
    assert isinstance(ours.optimizer, ampfast.MasterWeights)
    masters = ours.optimizer.master_weights
    assert not all(torch.equal(masters[p], p.float()) for p in masters), "low bits must be in use"


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("name", FEW)
def test_backends_and_step_and_update(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    ours, hand = both(name, torch.float16, track="overflow")
    ours.scaler.name_parameters(ours.model)
    for seed in range(STEPS):
        ours.backward(seed, BAD.get(seed))
        ours.scaler.step_and_update(ours.optimizer)
        hand.train(seed, BAD.get(seed))
        assert_equal(ours, hand)
    overflow = ours.scaler.overflow_report().parameters
    assert [each.name for each in overflow] == ["0.weight"]


CLIPS: list[Any] = list(itertools.product(HALVES, FEW, (True, False)))
CLIPS += [(torch.float16, "adamw-fused", None)]  # by torch, after unscale_


@pytest.mark.parametrize(("dtype", "name", "in_place"), CLIPS, ids=str)
def test_clipping(dtype: torch.dtype, name: str, in_place: bool | None) -> None:
    ours, hand = both(name, dtype)
    scaler = ours.scaler
    if in_place is not None:
        hand.scaler = ampfast.GradScaler("cpu", init_scale=64.0)  # whose norms are in float64, too
    if in_place is False and "fused" not in name:
        ours.train(0)
        with pytest.raises(ValueError, match="fused=True"):
            scaler.clip_grad_norm_(ours.optimizer, 0.05, in_place=False)
        return
    for seed in range(STEPS):
        ours.backward(seed, BAD.get(seed))
        hand.backward(seed, BAD.get(seed))
        if in_place is None:
            scaler.unscale_(ours.optimizer)
            hand.scaler.unscale_(hand.optimizer)
            norm = nn.utils.clip_grad_norm_(ours.model.parameters(), 0.05)
            theirs = nn.utils.clip_grad_norm_(hand.floats, 0.05)
        else:
            before = scaler.grad_norm(ours.optimizer)
            norm = scaler.clip_grad_norm_(ours.optimizer, 0.05, in_place=in_place)
            theirs = hand.scaler.clip_grad_norm_(hand.optimizer, 0.05)
            assert_same(before, theirs, "norm before")
            assert seed in BAD or scaler.grad_norm(ours.optimizer) <= 0.0501
        assert_same(norm, theirs, "norm")
        grads = [p.grad for p in ours.model.parameters()]
        assert_same(grads, [m.grad for m in hand.masters.values()], "gradients")
        ours.step()
        hand.step()
        assert_equal(ours, hand)


@pytest.mark.parametrize(
    ("name", "is_disabled"), [*((name, False) for name in FEW), ("momentum-plain", True)]
)
def test_without_a_scaler(name: str, is_disabled: bool) -> None:
    """Or with one that is disabled, and clips."""
    ours, hand = both(name, torch.bfloat16, enabled=False)
    hand.scaler = ampfast.GradScaler("cpu", enabled=False)
    for seed in range(STEPS):
        ours.backward(seed)
        hand.backward(seed)
        if is_disabled:
            ours.scaler.clip_grad_norm_(ours.optimizer, 0.05)
            hand.scaler.clip_grad_norm_(hand.optimizer, 0.05)
            ours.step()
        else:
            ours.optimizer.step()
        hand.step()
        assert_equal(ours, hand)


def test_a_guard_clips_bfloat16_in_float32() -> None:
    ours, hand = both("momentum-plain", torch.bfloat16)
    ours.scaler, hand.scaler = ampfast.StepGuard("cpu"), torch.amp.GradScaler(enabled=False)
    for seed in range(3):
        ours.backward(seed)
        norm = ours.scaler.clip_grad_norm_(ours.optimizer, 0.01)
        for param in ours.model.parameters():
            assert param.grad.dtype is torch.float32
            assert (param.grad != param.grad.bfloat16()).any(), "not rounded"
        ours.step()
        hand.backward(seed)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(hand.floats, 0.01))
        hand.step()
        torch.testing.assert_close(ours.weights(), hand.weights(), rtol=1e-6, atol=1e-7)


def test_gradients_without_a_scale_are_told_of_the_guard() -> None:
    optimizer = torch.optim.SGD([torch.ones(1).requires_grad_()], lr=0.1)
    with pytest.raises(
        AssertionError, match="Attempted clip_grad_norm_ but _scale is None"
    ) as told:
        ampfast.GradScaler("cpu").clip_grad_norm_(optimizer, 1.0)
    assert "ampfast.StepGuard" in told.value.__notes__[0]


def test_a_factor_beyond_float16_is_no_overflow() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD([param], lr=2.0**-20))
    for clips in (False, True):
        scaler = ampfast.GradScaler("cpu", init_scale=0.25)
        scaler.scale(torch.ones(()))
        param.grad = torch.full((3,), 60000.0, dtype=torch.float16)
        if clips:
            scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        assert not scaler.step_skipped(optimizer)
        assert param.grad.tolist() == [240000.0] * 3
        optimizer.zero_grad()


class Mixed(nn.Module):
    """An embedding tied to the output, a float32 parameter, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 8).half()
        self.frozen = nn.Linear(8, 8).half().requires_grad_(False)
        self.gain = nn.Parameter(torch.full((8,), 1.5))
        self.output = nn.Linear(8, 11, bias=False).half()
        self.output.weight = self.embedding.weight

    def forward(self, _: Tensor) -> Tensor:
        hidden = self.frozen(self.embedding(torch.arange(5)))
        return self.output((hidden * self.gain).half())


@pytest.mark.parametrize("name", FEW[:3])  # torch's fused SGD takes no parameter later
def test_tied_float32_and_thawed_parameters(name: str) -> None:
    make = OPTIMIZERS[name]
    ours, hand = Ours(Mixed(), make), ByHand(Mixed(), make)
    assert len(ours.optimizer.master_weights) == 1
    for seed in range(STEPS):
        if seed == 4:
            ours.model.frozen.requires_grad_(True)
            hand.model.frozen.requires_grad_(True)
        ours.train(seed, BAD.get(seed))
        hand.train(seed, BAD.get(seed))
        assert_same(ours.params(), hand.params())
        assert ours.model.gain.dtype is torch.float32
        assert ours.model.gain not in ours.optimizer.master_weights
    assert len(ours.optimizer.master_weights) == 3
    assert_equal(ours, hand)


@pytest.mark.parametrize("name", FEW)
def test_edits_by_hand_win_element_by_element(name: str) -> None:
    ours, hand = both(name, torch.float16)
    for seed in range(STEPS):
        for param in (next(side.model.parameters()) for side in (ours, hand)):
            if seed in (2, 4, 5):
                with torch.no_grad():
                    param[1, :3] = torch.tensor([0.0, -0.0, 0.125])
            if seed == 7:
                param.data = param.data.clone().fill_(0.75)
        param, master = next(iter(hand.masters.items()))
        with torch.no_grad():
            differs = master.half().view(torch.int16) != param.view(torch.int16)
            master.copy_(torch.where(differs, param.float(), master))
        # A fused step that is skipped must keep the edit.
        ours.train(seed, BAD.get(seed))
        hand.train(seed, BAD.get(seed))
        if seed not in BAD or "fused" in name:
            assert_equal(ours, hand)
        assert_same(ours.params(), hand.params())


CLOSURES: dict[str, Make] = {
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("name", CLOSURES)
def test_closures(name: str, keyword: bool) -> None:
    off = ampfast.GradScaler("cpu", enabled=False)
    ours, hand = (k(small_model(torch.bfloat16), CLOSURES[name], off) for k in (Ours, ByHand))
    for seed in range(4):

        def our_closure(seed: int = seed) -> Tensor:
            assert ours.optimizer.param_groups[0]["params"][0] is next(ours.model.parameters())
            ours.optimizer.zero_grad()
            loss = loss_of(ours.model, seed)
            loss.backward()
            return loss

        def their_closure(seed: int = seed) -> Tensor:
            hand.round()
            hand.model.zero_grad()
            loss = loss_of(hand.model, seed)
            loss.backward()
            hand.widen()
            return loss

        step = ours.optimizer.step
        loss = step(closure=our_closure) if keyword else step(our_closure)
        assert_same(loss, hand.optimizer.step(their_closure))
        hand.round()
        assert_same(ours.params(), hand.params())
        assert ours.optimizer.param_groups[0]["params"][0] is next(ours.model.parameters())


class Positional(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None, times: int = 1, more: int = 0) -> Any:
        for _ in range(times + more):
            loss = super().step(closure)
        return loss


def test_arguments_beside_a_closure() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer: Any = ampfast.master_weights_(Positional([param], lr=1.0))

    def closure() -> Tensor:
        param.grad = torch.ones_like(param)
        return param.sum()

    assert optimizer.step(closure, 2, more=1).item() == -6
    assert param.tolist() == [-3.0] * 3


def test_a_compiled_step_runs_as_it_is() -> None:
    ours, other = (ours_of("adamw-foreach", torch.bfloat16) for _ in range(2))
    compiled = torch.compile(ours.optimizer.step, backend="eager")
    for seed in range(3):
        for each, step in ((ours, compiled), (other, other.optimizer.step)):
            each.optimizer.zero_grad()
            loss_of(each.model, seed).backward()
            step()
        assert_same(ours.params(), other.params())


def test_hooks_and_schedulers_see_the_parameters() -> None:
    ours = ours_of("momentum-foreach")
    first = next(ours.model.parameters())
    seen: list[Tensor] = []

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        assert optimizer.param_groups[0]["params"][0] is first
        seen.append(first.detach().clone())

    ours.optimizer.register_step_pre_hook(hook)
    ours.optimizer.register_step_post_hook(hook)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(ours.optimizer, 0.5)
    before = first.detach().clone()
    ours.train(0)
    scheduler.step()
    assert_same(seen, [before, first.detach()])
    assert not torch.equal(before, first)
    assert ours.optimizer.param_groups[0]["lr"] == 0.05


def test_hooks_run_once_around_a_step_of_any_class() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: list[Tensor]) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None, rate: float = 0.5) -> None:
            (param,) = self.param_groups[0]["params"]
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
    assert calls == [[-0.5] * 3] * 2


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("name", [*FEW, "sgd-plain"])
def test_checkpoints_in_both_orders(name: str, optimizer_first: bool) -> None:
    ours, hand = both(name, torch.float16)
    follow(ours, hand, range(4))
    state = saved(ours.optimizer.state_dict())
    assert state["state"][0]["master_param"].dtype is torch.float32
    model = saved(ours.model.state_dict())
    scaler = ours.scaler.state_dict()
    ours = Ours(small_model(torch.float16), OPTIMIZERS[name])
    ours.train(17)  # other weights
    ours.scaler.load_state_dict(scaler)
    loads = [
        lambda: ours.optimizer.load_state_dict(state),
        lambda: ours.model.load_state_dict(model),
    ]
    for load in loads if optimizer_first else reversed(loads):
        load()
    assert_equal(ours, hand)
    follow(ours, hand, range(4, STEPS))
    # What was loaded is not written.
    assert_same(state["state"][0]["master_param"].half(), model["0.weight"])


@pytest.mark.parametrize("name", ["adamw-foreach", "adamw-fused"])
def test_a_checkpoint_before_the_first_step(name: str) -> None:
    """Accelerate and Transformers load one in `prepare`."""
    ours, hand = both(name, torch.float16)
    ours.optimizer.load_state_dict(saved(ours.optimizer.state_dict()))
    follow(ours, hand, range(1))


class Strict(torch.optim.SGD):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        assert all("momentum_buffer" in entry for entry in self.state.values())


def test_a_checkpoint_has_no_entries_without_state() -> None:
    """Optimizers of others, too, expect what they have saved."""
    params = [nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(2)]
    optimizer: Any = ampfast.master_weights_(Strict(params, lr=0.5, momentum=0.5))
    optimizer.load_state_dict(saved(optimizer.state_dict()))
    step_by(optimizer, params[:1])
    optimizer.load_state_dict(saved(optimizer.state_dict()))
    assert list(optimizer.state) == params[:1]


@pytest.mark.parametrize("way", ["others", "own", "copied", "pickled"])
def test_loading_writes_no_tensor_of_before(way: str) -> None:
    ours = ours_of("adamw-foreach", torch.float16, 1)
    param = next(ours.model.parameters())
    optimizer: Any = ours.optimizer
    first, held = optimizer.state_dict(), optimizer.master_weights[param]
    before, held_before = copy.deepcopy(first), held.clone()
    state, entries = optimizer.state, dict(optimizer.state)
    loaded = first if way == "own" else copy.deepcopy(first)
    if way == "others":
        for value in saved_tensors(loaded):
            value.fill_(5)
    if way in ("copied", "pickled"):
        # The loads of another optimizer that began as this one.
        optimizer = copy.copy(optimizer) if way == "copied" else pickled(optimizer)
    given = copy.deepcopy(loaded)
    optimizer.load_state_dict(loaded)
    assert_same(saved_tensors(first), saved_tensors(before))
    assert_same(held, held_before)
    assert state is not optimizer.state
    assert list(map(id, state)) == list(map(id, entries))
    assert all(state[key] is entry for key, entry in entries.items())
    with torch.no_grad():
        for own in ours.model.parameters():
            own.fill_(0.25)  # wins in the next step, which writes the master weight
    for own in optimizer.param_groups[0]["params"]:
        own.grad = torch.zeros_like(own)
    optimizer.step()
    for weights, expected in ((first, before), (loaded, given)):
        for index, entry in weights["state"].items():
            assert_same(entry["master_param"], expected["state"][index]["master_param"])


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class LargestFloat32(TorchDispatchMode):
    """Notes the bytes of the largest float32 tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype is torch.float32:
            self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("way", ["load", "load state", "convert"])
def test_no_float32_copy_of_a_frozen_parameter_is_made(way: str) -> None:
    def build() -> tuple[list[nn.Parameter], Any]:
        large = nn.Parameter(torch.ones(2**16, dtype=torch.bfloat16), requires_grad=False)
        params = [large, nn.Parameter(torch.ones(8, dtype=torch.bfloat16))]
        return params, torch.optim.SGD(params, lr=2**-10, momentum=0.5)

    params, optimizer = build()
    # With state as of a parameter that was trained before, or without.
    step_by(optimizer, params if way == "load state" else params[1:])
    params[0].grad = None
    if way != "convert":
        trained, (params, optimizer) = optimizer, build()
        ampfast.master_weights_(optimizer)
    with LargestFloat32() as largest:
        if way == "convert":
            ampfast.master_weights_(optimizer)
        else:
            optimizer.load_state_dict(trained.state_dict())
    if way == "load state":
        state = optimizer.state[params[0]]["momentum_buffer"]
        assert (state.dtype, state.shape) == (torch.float32, params[0].shape)
    assert largest.bytes == 4 * (2**16 if way == "load state" else 8)
    assert list(optimizer.master_weights) == params[1:]
    params[0].requires_grad_()
    step_by(optimizer, params)
    assert list(optimizer.master_weights) == [params[1], params[0]]


def test_a_model_without_values_yet_loads_its_own_state() -> None:
    param = nn.Parameter(torch.empty(2, dtype=torch.bfloat16, device="meta"))
    optimizer = ampfast.master_weights_(torch.optim.SGD([param], lr=0.1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.master_weights[param].is_meta
    with_values = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    other = ampfast.master_weights_(torch.optim.SGD([with_values], lr=0.1))
    with pytest.raises(ValueError, match="on meta"):
        other.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.master_weights[param].is_meta


@pytest.mark.parametrize("names", [True, False])
def test_a_master_weight_that_was_rounded_warns(names: bool) -> None:
    params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]
    given: Any = zip("abc", params, strict=True) if names else params
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD(given, lr=0.5))
    exact = copy.deepcopy(optimizer.state_dict())
    rounded = copy.deepcopy(exact)
    for index, dtype in ((1, torch.bfloat16), (2, torch.float16)):
        entry = rounded["state"][index]
        entry["master_param"] = entry["master_param"].to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(exact)
        with pytest.raises(UserWarning):
            optimizer.load_state_dict({**rounded, "param_groups": _with_rate(rounded, 7.0)})
    assert optimizer.param_groups[0]["lr"] == 0.5, "refused before anything is loaded"
    with pytest.warns(UserWarning) as told:
        optimizer.load_state_dict(rounded)
    (warning,) = told
    name = "b" if names else "1"
    assert f"parameter {name} and 1 more in torch.bfloat16" in str(warning.message)
    assert warning.filename == __file__
    assert optimizer.master_weights[params[1]].dtype is torch.float32


def _with_rate(saved: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    return [{**group, "lr": rate} for group in saved["param_groups"]]


class Quantized(Tensor):
    """A tensor without memory of its own, as of quantized weights."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(func)


def inference_made(dtype: torch.dtype) -> Tensor:
    with torch.inference_mode():
        return nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)


UNUSUAL: dict[str, Callable[[torch.dtype], Any]] = {
    "inference": inference_made,
    "sparse": lambda dtype: torch.eye(2, dtype=dtype).to_sparse(),
    "csr": lambda dtype: torch.eye(2, dtype=dtype).to_sparse_csr(),
    "mkldnn": lambda dtype: torch.eye(2, dtype=dtype).to_mkldnn(),
    "nested": lambda dtype: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to(dtype),
    "jagged": lambda dtype: torch.nested.nested_tensor(
        [torch.ones(2, dtype=dtype), torch.ones(3, dtype=dtype)], layout=torch.jagged
    ),
    "quantized": lambda dtype: Quantized(torch.ones(2, dtype=dtype)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", [*UNUSUAL, "uninitialized"])
def test_a_parameter_that_is_never_stepped(
    kind: str, requires_grad: bool, dtype: torch.dtype
) -> None:
    if kind == "quantized" and requires_grad and dtype is torch.bfloat16:
        pytest.skip("is stepped, for all that its optimizer knows")
    unusual: Any
    if kind == "uninitialized":
        unusual = nn.UninitializedParameter(requires_grad, dtype=dtype)
    elif not isinstance(unusual := UNUSUAL[kind](dtype), nn.Parameter):
        unusual = nn.Parameter(unusual, requires_grad=requires_grad)
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))

    def step(optimizer: Any) -> None:
        param.grad = torch.ones_like(param)
        optimizer.step()

    optimizer: Any = torch.optim.SGD([unusual, param], lr=2**-10, momentum=0.5)
    step(optimizer)  # has state when it is converted
    param.data.fill_(1)
    optimizer = ampfast.master_weights_(optimizer)
    step(optimizer)
    expected = 1 - 1.5 * 2**-10
    assert optimizer.master_weights[param].tolist() == [expected] * 2
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(optimizer)
    expected -= 1.75 * 2**-10
    assert optimizer.master_weights[param].tolist() == [expected] * 2
    scaler = ampfast.GradScaler("cpu", init_scale=1.0, track="overflow")
    scaler.scale(torch.ones(()))
    param.grad = torch.ones_like(param)
    scaler.clip_grad_norm_(optimizer, 10.0)
    scaler.step(optimizer)
    expected -= 1.875 * 2**-10
    assert optimizer.master_weights[param].tolist() == [expected] * 2
    optimizer.zero_grad(set_to_none=False)
    assert [id(key) for key in optimizer.master_weights] == [id(param)]


def test_a_parameter_that_is_initialized_later_gets_a_master_weight() -> None:
    param = nn.UninitializedParameter(dtype=torch.bfloat16)
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD([param], lr=2**-10))
    optimizer.step()
    assert len(optimizer.master_weights) == 0
    with pytest.raises(RuntimeError, match="uninitialized"):
        optimizer.load_state_dict(
            {**optimizer.state_dict(), "state": {0: {"master_param": torch.ones(3)}}}
        )
    param.materialize((3,))
    with torch.no_grad():
        param.fill_(1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.master_weights[param].tolist() == [1 - 2**-10] * 3


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_model_can_be_converted_by_swapping(
    swapping: None, dtype: torch.dtype, scaled: bool, left: bool
) -> None:
    sides = []
    for swaps in (True, False):
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        ours, _ = both("adamw-foreach", torch.bfloat16, enabled=scaled, track="overflow")
        ours.train(0)
        ours.train(1)
        if not left:
            ours.optimizer.zero_grad()
        params = list(ours.model.parameters())
        ours.model.to(dtype)
        assert all(a is b for a, b in zip(ours.model.parameters(), params, strict=True))
        if dtype is torch.float64:
            with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is torch\.float64"):
                ours.train(2)
            continue
        ours.train(2)
        sides.append([*(p.detach() for p in params), *ours.weights()])
    if sides:
        assert_same(*sides)


def test_state_of_other_parameters_keeps_its_dtype() -> None:
    params = [nn.Parameter(torch.zeros(3, dtype=d)) for d in (torch.float64, torch.float16)]
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD(params, lr=0.5, momentum=0.5))
    for _ in range(2):
        step_by(optimizer, params)
        optimizer.load_state_dict(saved(optimizer.state_dict()))
        buffers = [optimizer.state[param]["momentum_buffer"] for param in params]
        assert [buffer.dtype for buffer in buffers] == [torch.float64, torch.float32]


def test_a_checkpoint_of_a_thawed_parameter_and_one_that_does_not_fit() -> None:
    ours = ours_of("adamw-foreach", steps=1)
    state = saved(ours.optimizer.state_dict())
    frozen = small_model(torch.float16).requires_grad_(False)
    make = OPTIMIZERS["adamw-foreach"]
    optimizer: Any = ampfast.master_weights_(make(list(frozen.parameters())))
    for _ in range(2):
        for groups in ([], state["param_groups"] * 2):
            before = optimizer.state_dict()["state"]
            with pytest.raises(ValueError, match="different number of parameter groups"):
                optimizer.load_state_dict({**state, "param_groups": groups})
            assert_same(optimizer.state_dict()["state"], before)
        if not before:
            assert len(optimizer.master_weights) == 0
            optimizer.load_state_dict(state)
            frozen.load_state_dict(ours.model.state_dict())
    assert_same(before, state["state"])
    assert before[0]["exp_avg"].dtype is torch.float32


def test_state_is_the_users() -> None:
    ours, hand = both("momentum-foreach", torch.float16)
    for seed in range(6):
        if seed == 2:
            ours.optimizer.state.clear()
            hand.optimizer.state.clear()
        if seed == 4:
            for side in (ours, hand):
                first = side.optimizer.param_groups[0]["params"][0]
                buffer = side.optimizer.state[first]["momentum_buffer"]
                side.optimizer.state[first] = {"momentum_buffer": buffer * 2}
        follow(ours, hand, [seed + 6])
        assert set(map(id, ours.optimizer.state)) == set(map(id, ours.model.parameters()))


def test_a_checkpoint_of_a_plain_optimizer_keeps_float32_state() -> None:
    make = OPTIMIZERS["adamw-foreach"]
    full = small_model(torch.float32)
    plain = make(list(full.parameters()))
    for seed in range(3):
        plain.zero_grad()
        loss_of(full, seed).backward()
        plain.step()
    ours = Ours(small_model(torch.float16), make)
    ours.train(5)
    ours.optimizer.load_state_dict(saved(plain.state_dict()))
    ours.model.load_state_dict(full.state_dict())
    assert_same(ours.state(), plain.state_dict()["state"], "state")
    assert_same(ours.weights(), [p.detach().half().float() for p in full.parameters()])
    for ours_too, theirs in zip(ours.model.parameters(), full.parameters(), strict=True):
        ours.optimizer.master_weights[ours_too].copy_(theirs.detach())
    hand = ByHand(small_model(torch.float16), make)
    hand.model.load_state_dict(full.state_dict())
    hand.optimizer.load_state_dict(saved(plain.state_dict()))
    with torch.no_grad():
        for master, theirs in zip(hand.masters.values(), full.parameters(), strict=True):
            master.copy_(theirs)
    hand.scaler.load_state_dict(ours.scaler.state_dict())
    ours.train(6)
    hand.train(6)
    assert_same(ours.weights(), hand.weights(), "masters")


def test_an_optimizer_in_use_is_converted_with_its_state() -> None:
    model = small_model(torch.bfloat16)
    optimizer: Any = OPTIMIZERS["adamw-plain"](list(model.parameters()))
    loss_of(model, 0).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    ampfast.master_weights_(optimizer)
    after = optimizer.state_dict()["state"]
    for index, param in enumerate(model.parameters()):
        assert_same(after[index]["exp_avg"], before[index]["exp_avg"].float())
        assert_same(after[index]["master_param"], param.detach().float())
    loss_of(model, 1).backward()
    optimizer.step()
    assert len(optimizer.master_weights) == 4


def test_an_added_group() -> None:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params[:2], lr=0.1, momentum=0.9)

    ours, hand = (kind(small_model(torch.float16), make) for kind in (Ours, ByHand))
    ours.train(0)
    hand.train(0)
    hand.masters = dict(zip(hand.model.parameters(), hand.floats, strict=True))
    for side, params in ((ours, list(ours.model.parameters())), (hand, hand.floats)):
        side.optimizer.add_param_group({"params": params[2:], "lr": 0.2})
    follow(ours, hand, [1, 3, 4, 6])
    assert len(ours.optimizer.master_weights) == 4


def test_zero_grad_gives_16_bit_zeros() -> None:
    ours = ours_of("momentum-plain", torch.float16, 1)
    grads = [p.grad for p in ours.model.parameters()]
    assert {grad.dtype for grad in grads} == {torch.float32}
    ours.optimizer.zero_grad(set_to_none=False)
    for param in ours.model.parameters():
        assert_same(param.grad, torch.zeros_like(param.detach()))
    first, second = list(ours.model.parameters())[:2]
    first.grad.fill_(1.0)
    kept, second.grad = first.grad, None
    ours.optimizer.zero_grad(set_to_none=False)
    assert first.grad is kept, "of 16 bit, as in a bucket"
    assert not kept.any()
    assert second.grad is None
    ours.optimizer.zero_grad()
    assert all(p.grad is None for p in ours.model.parameters())


def test_zero_grad_keeps_float32_gradients_of_the_users() -> None:
    optimizer, (param,) = sgd_of()
    param.grad_dtype = torch.float32
    for _ in range(2):
        (param * 2).sum().backward()
        assert param.grad_dtype is torch.float32
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert_same(param.grad, torch.zeros(3))
    assert param.tolist() == [-1.0] * 3


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients(kind: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(6, 4, sparse=True).half()

    ours, hand = (side(make(), partial(kind, lr=0.1)) for side in (Ours, ByHand))
    follow(ours, hand, [0, 1, 3])


def test_memory_order_is_kept() -> None:
    last = torch.randn(2, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last)
    params = [nn.Parameter(each) for each in (last, *torch.randn(2, 3, 5).half())]
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD(params, lr=0.5))
    for turned in (False, True):
        if turned:
            params[1].data = params[1].data.t().contiguous().t()
        for param in params:
            param.grad = torch.randn_like(param)
        masters = optimizer.master_weights
        expected = [masters[p] - 0.5 * p.grad.float() for p in params]
        optimizer.step()
        for param, weight in zip(params, expected, strict=True):
            assert param.grad.stride() == param.stride()
            assert torch.equal(param, weight.to(param.dtype))
            assert_same(optimizer.master_weights[param].contiguous(), weight.contiguous())


def test_no_master_weight_is_made_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _ = sgd_of()
    other = nn.Parameter(torch.ones(3).half())
    optimizer.add_param_group({"params": [other]})
    monkeypatch.setattr("ampfast.capture.is_capturing", lambda: True)
    for call in (optimizer.step, lambda: optimizer.master_weights[other]):
        with pytest.raises(RuntimeError, match="cannot capture the making of master weights"):
            call()
    with pytest.raises(RuntimeError, match="cannot capture master_weights_"):
        ampfast.master_weights_(torch.optim.SGD([other], lr=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_whose_data_was_set_are_left_alone(dtype: torch.dtype) -> None:
    optimizer, (param,) = sgd_of()
    step_by(optimizer, [param])
    held = param.grad.detach()  # one more reference to the memory, as the gradient had
    param.grad.data = torch.full((3,), 7.0, dtype=dtype)
    step_by(optimizer, [param], 2)
    assert param.grad.dtype is torch.float32
    assert param.grad.tolist() == [2.0] * 3
    assert held.tolist() == [1.0] * 3
    assert param.tolist() == [-0.5] * 3


class Subclassed(nn.Parameter):
    pass


@pytest.mark.parametrize("kind", [nn.Parameter, Subclassed])
@pytest.mark.parametrize("seen_as", [torch.Tensor.t, lambda data: data.view(torch.float16)])
def test_data_seen_in_another_way_is_an_edit(
    seen_as: Callable[[Tensor], Tensor], kind: type[nn.Parameter]
) -> None:
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


class Group(dict[str, Any]):
    pass


@pytest.mark.parametrize("kind", [dict, Group])
@pytest.mark.parametrize("params_in", [list, tuple])
def test_groups_that_are_no_plain_dicts_of_lists(kind: Any, params_in: Any) -> None:
    optimizer, (param,) = sgd_of(lr=1.0, momentum=0.5)
    (group,) = optimizer.param_groups
    optimizer.param_groups[0] = kind(group, params=params_in([param]))
    for moved in (0.0, -1.5):
        step_by(optimizer, [param])
        assert param.tolist() == [moved] * 3
    (key,) = optimizer.state
    assert key is param


@pytest.mark.parametrize("kind", [dict, Group])
def test_parameters_that_are_trained_later_get_master_weights(kind: Any) -> None:
    trained, thawed, frozen = (nn.Parameter(torch.ones(3).half(), i == 0) for i in range(3))
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD([trained, thawed, frozen], lr=0.5))
    (group,) = optimizer.param_groups
    optimizer.param_groups[0] = kind(group)

    def saved_after_a_step() -> list[int]:
        step_by(optimizer, [trained])
        state = optimizer.state_dict()["state"]
        return [index for index, entry in state.items() if "master_param" in entry]

    assert saved_after_a_step() == [0]
    thawed.requires_grad_(True)
    assert saved_after_a_step() == [0, 1]
    frozen.grad = torch.ones(3).half()
    assert saved_after_a_step() == [0, 1, 2]
    assert [param[0].item() for param in (trained, thawed, frozen)] == [-0.5, 1.0, 0.5]


def test_entries_of_the_state_that_change_places() -> None:
    def moved(params: list[Tensor], optimizer: Any) -> list[float]:
        for step in range(2):
            for number, param in enumerate(params, 1):
                param.grad = torch.full_like(param, number)
            optimizer.step()
            if step == 0:
                one, other = (optimizer.state.pop(param) for param in params)
                optimizer.state[params[1]], optimizer.state[params[0]] = one, other
        return [param[0].item() for param in params]

    ours, theirs = (
        [nn.Parameter(torch.ones(4, dtype=d)) for _ in range(2)]
        for d in (torch.bfloat16, torch.float32)
    )
    sgd = [torch.optim.SGD(params, lr=1.0, momentum=0.5) for params in (ours, theirs)]
    assert moved(ours, ampfast.master_weights_(sgd[0])) == moved(theirs, sgd[1])


def test_parameters_that_are_removed_are_forgotten() -> None:
    optimizer, (kept, other) = sgd_of(2, lr=2**-10)
    for params in ([kept, other], [kept], [kept, other]):
        optimizer.param_groups[0]["params"] = params
        step_by(optimizer, params)
        assert len(optimizer.master_weights) == len(params)
    assert optimizer.master_weights[kept].tolist() == [1 - 3 * 2**-10] * 3
    assert optimizer.master_weights[other].tolist() == [1 - 2**-10] * 3, "from 16 bit again"
    del params[1]
    optimizer.step()
    reference = weakref.ref(other)
    del other
    gc.collect()
    assert reference() is None


def test_the_view_of_masters_and_a_second_call() -> None:
    ours = ours_of("momentum-plain", torch.float16)
    param = next(ours.model.parameters())
    masters = ours.optimizer.master_weights
    assert next(iter(masters)) is param
    assert masters[param].shape == param.shape
    assert not masters[param].requires_grad
    with pytest.raises(KeyError, match="no 16-bit parameter that this optimizer trains"):
        masters[nn.Parameter(torch.ones(1).half())]
    kind = type(ours.optimizer)
    assert ampfast.master_weights_(ours.optimizer) is ours.optimizer
    assert type(ours.optimizer) is kind
    assert isinstance(ours.optimizer, torch.optim.SGD)
    assert kind.__name__ == "SGD"


def test_torchs_scaler_still_refuses_float16() -> None:
    ours = ours_of("momentum-plain", torch.float16)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0)
    theirs.scale(loss_of(ours.model, 0)).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        theirs.unscale_(ours.optimizer)
    plain = torch.optim.SGD(small_model(torch.float16).parameters(), lr=0.1)
    plain.param_groups[0]["params"][0].grad = torch.zeros(7, 8, dtype=torch.float16)
    ours.scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        ours.scaler.unscale_(plain)


class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def plain_sgd(**attributes: Any) -> torch.optim.Optimizer:
    param = nn.Parameter(torch.ones(2).half())
    param._is_flat_param = "flat" in attributes
    optimizer = torch.optim.SGD([param], lr=0.1)
    vars(optimizer).update(attributes)
    return optimizer


def with_replaced_step() -> torch.optim.Optimizer:
    optimizer = plain_sgd()
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return optimizer


def with_a_hook_that_fails() -> torch.optim.Optimizer:
    def fails(*_: Any) -> None:
        raise ValueError("by a hook")

    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([param], lr=0.1)
    step_by(optimizer, [param])
    optimizer.register_load_state_dict_pre_hook(fails)
    return optimizer


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no_optimizer": (
        lambda: nn.Linear(1, 1),
        TypeError,
        "master_weights_ takes a torch.optim.Optimizer, got torch.nn.modules.linear.Linear",
    ),
    "wrapped": (lambda: Wrapper(plain_sgd()), TypeError, "pass the inner one"),
    "flat": (lambda: plain_sgd(flat=1), TypeError, "flat parameter of FSDP1"),
    "differentiable": (
        lambda: torch.optim.Adam([nn.Parameter(torch.ones(2).half())], differentiable=True),
        ValueError,
        "group 0 has differentiable=True",
    ),
    "replaced": (with_replaced_step, RuntimeError, "before the scheduler or trainer"),
    "hook": (with_a_hook_that_fails, ValueError, "by a hook"),
    **{
        name: (
            partial(plain_sgd, **{name: False}),
            TypeError,
            f"SGD has an attribute {name} of its own",
        )
        for name in ("master_weights", "_masters")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_change_nothing(name: str) -> None:
    make, error, text = REFUSED[name]
    optimizer = make()
    kind, before = type(optimizer), dict(vars(optimizer))
    state = list(getattr(optimizer, "state", ()))
    with pytest.raises(error, match=text):
        ampfast.master_weights_(optimizer)
    assert type(optimizer) is kind
    assert vars(optimizer).keys() == before.keys()
    assert all(value is before[key] for key, value in vars(optimizer).items())
    assert [id(key) for key in getattr(optimizer, "state", ())] == [id(key) for key in state]


UNLIKE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "meta": (lambda weight: weight.to("meta"), "on meta, "),
    "sparse": (torch.Tensor.to_sparse, r"torch\.sparse_coo of "),
    "complex": (lambda weight: weight.to(torch.complex64), r"torch\.complex64 on "),
    "shape": (lambda weight: torch.zeros(5), r"\(5,\), and must be .* \(7,\)"),
    "number": (lambda weight: 3.0, r"3\.0, and must be"),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_what_is_no_master_weight_is_refused_before_loading(kind: str) -> None:
    change, text = UNLIKE[kind]
    ours = ours_of("adamw-plain", torch.bfloat16, 1)
    saved = copy.deepcopy(ours.optimizer.state_dict())
    ours.train(1)
    before = copy.deepcopy(ours.optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    saved["state"][1]["master_param"] = change(saved["state"][1]["master_param"])
    with pytest.raises(ValueError, match=f"of parameter 1 is .*{text}") as told:
        ours.optimizer.load_state_dict(saved)
    assert "and must be a dense float32 tensor" in str(told.value)
    assert_same(saved_tensors(ours.optimizer.state_dict()), saved_tensors(before))
    assert ours.optimizer.param_groups[0]["lr"] == 0.01


def saved_tensors(saved: dict[str, Any]) -> list[Tensor]:
    return [value for entry in saved["state"].values() for value in entry.values()]


def test_hooks_of_checkpoints() -> None:
    """They see parameters in the groups, and master weights in the checkpoint."""
    ours = ours_of("adamw-plain", torch.bfloat16, 1)
    optimizer = ours.optimizer
    seen: list[Any] = []

    def wrapped(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        seen.append("master_param" in saved["state"][0])
        return {"optimizer": saved}

    def unwrapped(optimizer: Any, saved: dict[str, Any]) -> Any:
        seen.append(optimizer.param_groups[0]["params"][0] is params[0])
        return saved["optimizer"]

    def loaded(optimizer: Any) -> None:
        seen.append(set(optimizer.state) == set(params))
        seen.append(optimizer.master_weights[params[0]].tolist() == master.tolist())

    params = list(ours.model.parameters())
    optimizer.register_state_dict_post_hook(wrapped)
    optimizer.register_load_state_dict_pre_hook(unwrapped)
    optimizer.register_load_state_dict_post_hook(loaded)
    master = optimizer.master_weights[params[0]].clone()
    saved = copy.deepcopy(optimizer.state_dict())
    assert list(saved) == ["optimizer"]
    ours.train(1)
    assert optimizer.master_weights[params[0]].tolist() != master.tolist()
    optimizer.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [True, True, True, True, True, True, True, True]


def test_errors_of_a_step_change_nothing() -> None:
    ours = ours_of("momentum-plain", torch.float16, 1)
    model = ours.model
    before = [p.detach().clone() for p in model.parameters()]
    ours.backward(1)
    model[0].float()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is torch\.float32"):
        ours.scaler.step(ours.optimizer)
    model[0].half()
    weight = model[2].weight.data
    model[2].weight.data = weight[:1]
    with pytest.raises(RuntimeError, match=r"parameter 2 of group 0 is .* of shape \(1, 7\)"):
        ours.optimizer.step()
    model[2].weight.data = weight
    ours.optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(ValueError, match="differentiable=True"):
        ours.optimizer.step()
    ours.optimizer.param_groups[0]["differentiable"] = False
    with pytest.raises(ValueError, match="different number of parameter groups"):
        ours.optimizer.load_state_dict({**ours.optimizer.state_dict(), "param_groups": []})
    assert_same([p.detach() for p in model.parameters()], before)
    assert len(ours.optimizer.master_weights) == 4


class Failing(torch.optim.SGD):
    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.param_groups[0]["params"][0].add_(1.0)
            raise MemoryError("in the middle")
        return super().step(closure)


def test_an_error_inside_step_restores() -> None:
    make = partial(Failing, lr=0.1, momentum=0.9)
    ours, hand = (kind(small_model(torch.float16), make) for kind in (Ours, ByHand))
    follow(ours, hand, range(1))
    state = ours.optimizer.state
    held = list(ours.optimizer.param_groups[0]["params"])
    ours.backward(1)
    ours.optimizer.fails = True
    with pytest.raises(MemoryError):
        ours.scaler.step(ours.optimizer)
    ours.optimizer.fails = False
    ours.scaler.update()
    assert ours.optimizer.state is state
    assert [id(p) for p in ours.optimizer.param_groups[0]["params"]] == [id(p) for p in held]
    assert_same(ours.params(), hand.params())
    # Where the failed step wrote a master weight, the parameter wins.
    first, master = next(iter(hand.masters.items()))
    with torch.no_grad():
        wrote = (master + 1).half() != first
        master.copy_(torch.where(wrote, first.float(), master + 1))
    hand.train(2)
    ours.train(2)
    assert_same(ours.weights(), hand.weights(), "masters")


def test_a_gradient_of_a_failed_step_is_not_stepped_later() -> None:
    first, second = (nn.Parameter(torch.ones(3).half()) for _ in range(2))
    optimizer: Any = ampfast.master_weights_(Failing([first, second], lr=0.5))
    optimizer.fails = True
    with pytest.raises(MemoryError):
        step_by(optimizer, [first])
    optimizer.fails = False
    optimizer.zero_grad()
    step_by(optimizer, [second])
    assert [optimizer.master_weights[p].tolist() for p in (first, second)] == [[1.0] * 3, [0.5] * 3]


@contextmanager
def interrupted(at: int) -> Iterator[list[int]]:
    """An interrupt at a line of the package, by number; the lines so far."""
    package = os.path.dirname(ampfast.__file__)
    lines, tracing = [0], sys.gettrace()

    def on_line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            lines[0] += 1
            if lines[0] == at:
                sys.settrace(tracing)
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: Any, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(package) else None

    sys.settrace(on_call)
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

    def call() -> None:
        if way == "load":
            optimizer.load_state_dict(saved)
        else:
            optimizer.step(*([lambda: with_gradients(2)] if way == "closure" else []))

    for at in range(1, 10_000):
        params = [nn.Parameter(torch.linspace(1, 2, 5).half()) for _ in range(2)]
        optimizer: Any = OPTIMIZERS[name](params[:1])
        optimizer.add_param_group({"params": params[1:]})
        ampfast.master_weights_(optimizer)
        with_gradients(0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        with_gradients(1)
        if edited:
            with torch.no_grad():
                params[0].mul_(2)
        state = optimizer.state
        gradients = [param.grad.float() for param in params]
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
        assert [weight.grad for weight in optimizer._masters.values()] == [None, None]
        assert way == "closure" or all(
            torch.equal(p.grad.float(), g) for p, g in zip(params, gradients, strict=True)
        )
        before = [param.tolist() for param in params]
        with_gradients(3)
        optimizer.step()
        assert all(p.tolist() != each for p, each in zip(params, before, strict=True))
        assert all(torch.equal(p, optimizer.master_weights[p].half()) for p in params)
    assert lines[0] == at - 1 > 50


def size_of_process() -> int:
    """Bytes of address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@contextmanager
def little_memory(more: int) -> Iterator[None]:
    """Lets the process have so many bytes more than it has."""
    gc.collect()  # or what is freed meanwhile would be there, too
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size_of_process() + more // 2, before[1]))
    held = []  # what earlier tests have freed, which malloc keeps for the next to ask
    while (block := outcome(lambda: torch.empty(more, dtype=torch.uint8))).error is None:
        held.append(block.value)
    resource.setrlimit(resource.RLIMIT_AS, (size_of_process() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.skipif(VARIABLE in os.environ, reason="so many elements take an emulator minutes")
@pytest.mark.parametrize("way", ["step", "clip_grad_norm_", "general"])
def test_a_failed_allocation_changes_nothing(way: str) -> None:
    """Float32 gradients take 256 MiB, of which there are 64."""
    large = nn.Parameter(torch.zeros(2**26, dtype=torch.float16))
    small = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD([small, large], lr=0.5))
    scaler = ampfast.GradScaler(
        "cpu", init_scale=4.0, track="overflow" if way == "general" else None
    )
    scaler.scale(torch.ones(()))

    def attempt() -> None:
        if way == "clip_grad_norm_":
            scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)

    torch.autograd.backward([small, large], [torch.full_like(p, 4.0) for p in (small, large)])
    with little_memory(2**26):
        error = outcome(attempt).error
    assert isinstance(error, RuntimeError) and "memory" in str(error)
    for param in (small, large):
        assert param.grad.dtype is torch.float16
        assert bool((param.grad == 4).all())
    assert small.tolist() == [1.0] * 3
    assert optimizer.master_weights[small].tolist() == [1.0] * 3
    attempt()
    assert small.tolist() == [0.5] * 3
    assert scaler.stats().steps == 0
    scaler.update()
    assert scaler.stats().skipped == 0


def test_nothing_keeps_an_optimizer_alive() -> None:
    ours = ours_of("momentum-plain", torch.float16, 1)
    reference = weakref.ref(ours.optimizer)
    master = weakref.ref(ours.optimizer._masters[next(ours.model.parameters())])
    ours.optimizer = None
    gc.collect()
    assert reference() is None
    assert master() is None
