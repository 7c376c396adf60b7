"""`sync_free_`: as an optimizer made with `fused=True` and loaded with the plain one's state."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from support.comparison import Scaler, TorchScaler, assert_same
from support.gradients import parameter_with
from support.steps import host_reads
from support.sync_free_loops import (
    BAD,
    KINDS,
    Loop,
    fused_twin,
    in_groups,
    make_free,
    parameters,
    plain,
)

import ampfast
from ampfast import GradScaler

PLAIN = ("adam", "adamw", "sgd", "adagrad")


def counters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [state["step"] for state in optimizer.state.values() if "step" in state]


def twin_of(loop: Loop, kind: str, **options: Any) -> Any:
    return fused_twin(loop.optimizer, {**KINDS[kind][1], **options})


def assert_run_equal(
    one: Loop, other: Loop, start: int, scaler_type: Scaler | None = None, scale: float = 1000.0
) -> None:
    """Runs both on, under scalers of their own, and compares them after each step."""
    for each in (one, other):
        each.scaler = scaler_type and scaler_type("cpu", scale, growth_interval=2)
    for seed, bad in enumerate(BAD if scaler_type else [None] * len(BAD), start):
        one.step(seed, bad)
        other.step(seed, bad)
        assert_same(one.observe(), other.observe(), f"step {seed}")


@pytest.fixture(params=[None, TorchScaler, GradScaler], ids=["no", "torch", "ampfast"])
def scaler_type(request: pytest.FixtureRequest) -> Scaler | None:
    return request.param


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("options", [{}, {"lr": torch.tensor(0.25), "foreach": None}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_continues_as_torch_fused(
    kind: str, options: dict[str, Any], steps: int, scaler_type: Scaler | None
) -> None:
    loop = plain(kind, steps, **options)
    twin = twin_of(loop, kind, **options)
    assert ampfast.sync_free_(loop.optimizer) is loop.optimizer
    ours, theirs = vars(loop.optimizer), vars(twin)
    assert ours["_step_supports_amp_scaling"] is True
    assert ours["defaults"] == theirs["defaults"]
    assert_same(loop.optimizer.state_dict(), twin.state_dict(), "state dict")
    # Not a power of two and not constant, so that every kind of division shows.
    assert_run_equal(loop, Loop(twin), steps, scaler_type)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_stays_and_counters_move_once(kind: str) -> None:
    loop = plain(kind, 2)
    optimizer, state = loop.optimizer, loop.optimizer.state
    for p, made in zip(loop.params, (2, 2.0, torch.tensor(2.0).double()), strict=False):
        if "step" in state[p]:
            state[p]["step"] = made
    kept = {p: dict(entries) for p, entries in state.items()}
    with torch.inference_mode():  # leaves counters that can be written
        ampfast.sync_free_(optimizer)
    assert [*state] == [*kept]
    for p, entries in kept.items():
        assert [*state[p]] == [*entries]
        assert all(key == "step" or state[p][key] is entries[key] for key in entries)
    moved = counters(optimizer)
    assert_same(moved, [torch.tensor(2.0)] * len(moved))
    before = copy.deepcopy(optimizer.state_dict())
    assert ampfast.sync_free_(optimizer) is optimizer
    assert_same(optimizer.state_dict(), before, "state dict")
    assert all(a is b for a, b in zip(counters(optimizer), moved, strict=True))
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
    added = optimizer.param_groups[2]
    assert (added["fused"], added["foreach"]) == (True, False)
    loop.run([None] * 2, 2)
    assert all(step.item() == 4 for step in counters(optimizer))


@pytest.mark.parametrize("kind", PLAIN)
def test_nothing_is_read_on_the_host(kind: str) -> None:
    scaler = GradScaler("cpu")
    free = make_free(plain(kind, 2), scaler)
    free.step(2)
    for bad in (None, math.inf):
        free.step(3, bad)
        assert host_reads(lambda: scaler.step(free.optimizer)) == 0
        assert host_reads(scaler.update) == 0


# State dicts and copies


def take_values(loop: Loop, of: Loop) -> None:
    with torch.no_grad():
        for p, q in zip(loop.params, of.params, strict=True):
            p.copy_(q)


@pytest.mark.parametrize("age", ["plain", "old", "fused_false"])
@pytest.mark.parametrize("kind", KINDS)
def test_loads_older_checkpoints(kind: str, age: str, scaler_type: Scaler | None) -> None:
    loop = plain(kind, 3)
    saved = copy.deepcopy(loop.optimizer.state_dict())
    for group in saved["param_groups"]:
        if age == "old":
            del group["fused"], group["foreach"]
        elif age == "fused_false":
            group["fused"] = False
    for state in saved["state"].values():
        if age == "old" and "step" in state:
            state["step"] = 3
    kept = copy.deepcopy(saved)
    twin, free = Loop(twin_of(loop, kind)), make_free(plain(kind, 1))
    take_values(free, loop)
    free.optimizer.load_state_dict(saved)
    assert_same(saved, kept, "the dict that was given")
    assert all(group["fused"] is True for group in free.optimizer.param_groups)
    assert all(step.dtype is torch.float32 for step in counters(free.optimizer))
    for each in (free, twin):
        each.scaler = scaler_type and scaler_type("cpu", 1000.0)
        each.run(BAD if scaler_type else [None] * 3, 3)
    assert_same(free.observe()["parameters"], twin.observe()["parameters"])
    assert_same(list(free.optimizer.state.values()), list(twin.optimizer.state.values()))


@pytest.mark.parametrize("into", [{}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_checkpoint_loads_into_torch(
    kind: str, into: dict[str, bool], scaler_type: Scaler | None
) -> None:
    free = make_free(plain(kind, 2))
    free.run([None] * 2, 2)
    make, options = KINDS[kind]
    other = Loop(make(in_groups(parameters()), **{**options, "foreach": None, **into}))
    take_values(other, free)
    other.optimizer.load_state_dict(pickle.loads(pickle.dumps(free.optimizer.state_dict())))
    # A power of two: scalers take an optimizer made without fused=True for plain and multiply its
    # gradients, where a fused one divides.
    assert_run_equal(free, other, 4, scaler_type, 1024.0)


# What is refused


def refusal(optimizer: Any, error: type[Exception] = ValueError) -> str:
    """Text of the refusal; asserts that nothing has changed."""
    held: list[Any] = []
    if isinstance(optimizer, torch.optim.Optimizer):
        held = [vars(optimizer), optimizer.state, optimizer.defaults, *optimizer.param_groups]
        held += [optimizer._optimizer_load_state_dict_pre_hooks, *optimizer.state.values()]
    copies = [dict(each) for each in held]
    with pytest.raises(error) as caught:
        ampfast.sync_free_(optimizer)
    for now, before in zip(held, copies, strict=True):
        assert [id(key) for key in now] == [id(key) for key in before]
        assert all(now[key] is before[key] for key in before)
    return str(caught.value)


class OwnAdam(torch.optim.Adam):
    """Subclass whose step may do anything."""


def test_other_types() -> None:
    for given, name in (
        (OwnAdam(parameters()), "test_sync_free.OwnAdam"),
        (torch.optim.NAdam(parameters()), "torch.optim.nadam.NAdam"),
        (torch.optim.RMSprop(parameters()), "torch.optim.rmsprop.RMSprop"),
        (object(), "builtins.object"),
        (None, "builtins.NoneType"),
    ):
        text = refusal(given, TypeError)
        assert f"Adam, AdamW, SGD and Adagrad, no subclass or wrapper, got {name}: pass" in text
        assert "fused=True to its constructor, or keep it, which GradScaler steps with one" in text


@pytest.mark.parametrize("kind", KINDS)
def test_differentiable(kind: str) -> None:
    loop = plain(kind, 2)
    group = loop.optimizer.param_groups[1]
    group["differentiable"] = True
    assert "group 1 has differentiable=True" in refusal(loop.optimizer)


def with_second(kind: str, second: torch.Tensor) -> torch.optim.Optimizer:
    make, options = KINDS[kind]
    first = torch.nn.Parameter(torch.ones(2))
    return make([{"params": [first]}, {"params": [first.detach(), second]}], **options)


def frozen_with_a_gradient() -> torch.Tensor:
    frozen = torch.ones(4)[::2]
    frozen.grad = torch.ones(2)
    return frozen


def trained(*to: Any, sparse: bool = False) -> torch.Tensor:
    ones = torch.ones(2).to(*to) if to else torch.ones(2)
    return torch.nn.Parameter(ones.to_sparse() if sparse else ones)


ONES = torch.ones(2)
# Kinds, second parameter, and text.
SECOND: list[tuple[tuple[str, ...], torch.Tensor, str]] = [
    (PLAIN, trained(torch.complex64), "{step}, a torch.complex64 on cpu"),
    (PLAIN, trained("meta"), "{step}, a torch.float32 on meta"),
    (PLAIN, trained(torch.float8_e4m3fn), "{step}, a torch.float8_e4m3fn on cpu"),
    # Frozen ones that may step: torch's Adagrad has state from the beginning.
    (("adagrad",), ONES.to(torch.complex64), "{step}"),
    (("adam",), frozen_with_a_gradient(), "strides (2,): torch's fused kernels need dense"),
    (("sgd",), trained(sparse=True), "parameter 1 of group 1 is torch.sparse_coo"),
]


@pytest.mark.parametrize(
    ("kind", "second", "text"), [(kind, *row) for kinds, *row in SECOND for kind in kinds]
)
def test_parameters(kind: str, second: torch.Tensor, text: str) -> None:
    optimizer = with_second(kind, second)
    step = f"torch's fused {KINDS[kind][0].__name__} cannot step parameter 1 of group 1"
    assert text.format(step=step) in refusal(optimizer)


def test_a_refusal_has_the_name_of_the_parameter() -> None:
    bad = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    bad.grad = torch.ones_like(bad)
    optimizer = torch.optim.Adam([("scale", torch.nn.Parameter(torch.ones(2))), ("phase", bad)])
    assert "parameter 1 of group 0 (phase)" in refusal(optimizer)


@pytest.mark.parametrize(
    ("kind", "key"), [("adam", "exp_avg"), ("momentum", "momentum_buffer"), ("adagrad", "sum")]
)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.double(), "torch.strided, torch.float64"),
        (lambda t: t.t().contiguous().t(), "of shape (3, 4) and strides (1, 3)"),
        (lambda t: t[:2], "of shape (2, 4)"),
        (lambda t: t.to_sparse(), "torch.sparse_coo"),
    ],
    ids=["dtype", "strides", "shape", "sparse"],
)
def test_state_and_gradients_unlike_the_parameter(
    kind: str, key: str, change: Any, what: str
) -> None:
    optimizer = with_second(kind, parameter_with(torch.ones(3, 4)))
    optimizer.step()
    param = optimizer.param_groups[1]["params"][1]
    state, kept = optimizer.state[param], dict(optimizer.state[param])
    state[key] = change(state[key])
    found = refusal(optimizer)
    assert f"the {key!r} of parameter 1 of group 1 is " in found and what in found
    if "(3" in what or "sparse" in what:  # torch does not allow others to be assigned
        state.update(kept)
        param.grad = change(param.grad)
        found = refusal(optimizer)
        assert "the gradient of parameter 1 of group 1 is " in found and what in found
