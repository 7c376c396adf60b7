"""`sync_free_`: as an optimizer made with `fused=True` and loaded with the plain one's state."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.gradients import parameter_with
from support.one_step import floats, host_reads, setup
from support.scalers import Scaler, TorchScaler
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
from torch.optim.optimizer import register_optimizer_step_post_hook

import ampfast
from ampfast import GradScaler

MARK = "_step_supports_amp_scaling"


def counters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [state["step"] for state in optimizer.state.values() if "step" in state]


@pytest.fixture(params=[None, TorchScaler, GradScaler], ids=["no", "torch", "ampfast"])
def scaler_type(request: pytest.FixtureRequest) -> Scaler | None:
    return request.param


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_continues_as_torch_fused(kind: str, steps: int, scaler_type: Scaler | None) -> None:
    loop = plain(kind, steps)
    twin = fused_twin(loop.optimizer, KINDS[kind][1])
    # Not a power of two and not constant, so that every kind of division shows.
    scalers = [scaler_type and scaler_type("cpu", 1000.0, growth_interval=2) for _ in range(2)]
    ours, theirs = make_free(loop, scalers[0]), Loop(twin, scalers[1])
    bad = BAD if scaler_type else [None] * len(BAD)
    for seed, value in enumerate(bad, steps):
        ours.step(seed, value)
        theirs.step(seed, value)
        assert_same(ours.observe(), theirs.observe(), f"step {seed}")


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_constructors_result(kind: str) -> None:
    loop = plain(kind, 2)
    twin = fused_twin(loop.optimizer, KINDS[kind][1])
    assert ampfast.sync_free_(loop.optimizer) is loop.optimizer
    ours, theirs = vars(loop.optimizer), vars(twin)
    assert ours[MARK] is True
    assert ours["defaults"] == theirs["defaults"]
    assert_same(loop.optimizer.state_dict(), twin.state_dict(), "state dict")


@pytest.mark.parametrize("kind", KINDS)
def test_twice_is_once(kind: str) -> None:
    loop = plain(kind, 2)
    first = ampfast.sync_free_(loop.optimizer)
    before, kept = copy.deepcopy(first.state_dict()), counters(first)
    hooks = len(first._optimizer_load_state_dict_pre_hooks)
    assert ampfast.sync_free_(first) is first
    assert_same(first.state_dict(), before, "state dict")
    assert all(a is b for a, b in zip(counters(first), kept, strict=True))
    assert hooks == len(first._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_stays_and_counters_move(kind: str) -> None:
    loop = plain(kind, 2)
    state = loop.optimizer.state
    for p, made in zip(loop.params, (2, 2.0, torch.tensor(2.0).double()), strict=False):
        if "step" in state[p]:
            state[p]["step"] = made
    kept = {p: dict(entries) for p, entries in state.items()}
    ampfast.sync_free_(loop.optimizer)
    assert [*state] == [*kept]
    for p, entries in kept.items():
        assert [*state[p]] == [*entries]
        for key, value in entries.items():
            if key == "step":
                assert_same(state[p][key], torch.tensor(2.0), key)
            else:
                assert state[p][key] is value
    make_free(loop).run([None] * 2, 2)
    assert all(step.item() == 4 for step in counters(loop.optimizer))


def test_inference_mode_leaves_counters_that_can_be_written() -> None:
    loop = plain("adam", 2)
    for state in loop.optimizer.state.values():
        state["step"] = 2
    with torch.inference_mode():
        ampfast.sync_free_(loop.optimizer)
    make_free(loop).run([None])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_learning_rate(kind: str) -> None:
    options = {**KINDS[kind][1], "lr": torch.tensor(0.25), "foreach": None}
    loop = plain(kind, 2, **{k: v for k, v in options.items() if k in ("lr", "foreach")})
    ours, theirs = make_free(loop), Loop(fused_twin(loop.optimizer, options))
    ours.run([None] * 3, 2)
    theirs.run([None] * 3, 2)
    assert_same(ours.observe(), theirs.observe())


def test_capturable_adam() -> None:
    # On the CPU torch steps only fused ones.
    loop = plain("adam", 0, capturable=True)
    twin = Loop(fused_twin(loop.optimizer, {"lr": 0.1, "capturable": True}))
    ours = make_free(loop)
    for each in (ours, twin):
        each.run([None] * 3)
    assert_same(ours.observe(), twin.observe())


@pytest.mark.parametrize("kind", KINDS)
def test_groups_added_later(kind: str) -> None:
    loop = plain(kind, 2)
    optimizer = ampfast.sync_free_(loop.optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
    assert optimizer.param_groups[2]["fused"] is True
    assert not optimizer.param_groups[2]["foreach"]


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd", "adagrad"])
def test_nothing_is_read_on_the_host(kind: str) -> None:
    loop = plain(kind, 2)
    scaler = GradScaler("cpu")
    free = make_free(loop, scaler)
    free.step(2)
    for bad in (None, math.inf):
        free.step(3, bad)
        assert host_reads(lambda: scaler.step(loop.optimizer)) == 0
        assert host_reads(scaler.update) == 0


@pytest.mark.usefixtures("poisoned")
def test_a_first_step_with_momentum_that_overflows() -> None:
    def make(params: list[Any]) -> torch.optim.Optimizer:
        return ampfast.sync_free_(torch.optim.SGD(params, lr=0.5, momentum=0.9))

    run = setup(GradScaler, make, [floats(math.inf), floats(1.0)], 4.0)
    assert run.step() is None
    assert run.untouched()
    run.scaler.update()
    run.parameters[0].grad, run.parameters[1].grad = floats(0.0), floats(4.0)
    run.step()
    assert [p.item() for p in run.parameters] == [1.0, 0.0]


# Hooks and schedulers attached before


def test_schedulers_that_wrap_step_keep_working(scaler_type: Scaler | None) -> None:
    def run(loop: Loop, turn: bool) -> Any:
        optimizer = loop.optimizer
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
        if turn:
            ampfast.sync_free_(optimizer)
        loop.scaler = scaler_type and scaler_type("cpu", 1000.0)
        rates = []
        for seed in range(5):
            loop.step(seed, math.inf if scaler_type and seed == 3 else None)
            for schedule in (decay, cycle):
                schedule.step()
            rates.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        assert optimizer._opt_called and decay.last_epoch == 5
        return [rates, loop.observe()]

    loop = plain("adam")
    twin = Loop(fused_twin(loop.optimizer, KINDS["adam"][1]))
    assert_same(run(loop, True), run(twin, False))


def test_a_step_that_was_replaced_on_the_instance_stays() -> None:
    loop = plain("adam", 2)
    calls, inner = [], loop.optimizer.step
    loop.optimizer.step = lambda *args: calls.append(args) or inner(*args)
    free = make_free(loop, GradScaler("cpu"))
    assert calls == []
    free.run([None, math.inf], 2)
    assert len(calls) == 2
    assert [step.item() for step in counters(loop.optimizer)] == [3.0] * len(loop.params)


def test_hooks_for_all_optimizers_see_no_step() -> None:
    seen = []
    handle = register_optimizer_step_post_hook(lambda *args: seen.append(args))
    try:
        ampfast.sync_free_(plain("adam").optimizer)
    finally:
        handle.remove()
    assert seen == []


# State dicts and copies


@pytest.mark.parametrize("age", ["plain", "old", "fused_false"])
@pytest.mark.parametrize("kind", KINDS)
def test_loads_older_checkpoints(kind: str, age: str, scaler_type: Scaler | None) -> None:
    loop = plain(kind, 3)
    saved = copy.deepcopy(loop.optimizer.state_dict())
    if age == "old":
        for group in saved["param_groups"]:
            del group["fused"], group["foreach"]
        for state in saved["state"].values():
            if "step" in state:
                state["step"] = 3
    elif age == "fused_false":
        for group in saved["param_groups"]:
            group["fused"] = False
    kept = copy.deepcopy(saved)
    twin = Loop(fused_twin(loop.optimizer, KINDS[kind][1]))
    free = make_free(plain(kind, 1))
    with torch.no_grad():
        for p, q in zip(free.params, loop.params, strict=True):
            p.copy_(q)
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
    with torch.no_grad():
        for p, q in zip(other.params, free.params, strict=True):
            p.copy_(q)
    other.optimizer.load_state_dict(pickle.loads(pickle.dumps(free.optimizer.state_dict())))
    for each in (free, other):
        # A power of two: scalers take an optimizer made without fused=True for plain and multiply
        # its gradients, where a fused one divides.
        each.scaler = scaler_type and scaler_type("cpu", 1024.0)
        each.run(BAD if scaler_type else [None] * 3, 4)
    assert_same(free.observe(), other.observe())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_match_torchs_fused(kind: str, copied: Any) -> None:
    loop = plain(kind, 2)
    theirs = copied(fused_twin(loop.optimizer, KINDS[kind][1]))
    ours = copied(ampfast.sync_free_(loop.optimizer))
    assert [*vars(ours)] == [*vars(theirs)]
    assert_same(ours.state_dict(), theirs.state_dict())
    again = Loop(ampfast.sync_free_(ours), GradScaler("cpu", 1000.0))
    other = Loop(ampfast.sync_free_(theirs), GradScaler("cpu", 1000.0))
    for each in (again, other):
        each.run(BAD, 2)
    assert_same(again.observe(), other.observe())


def refusal(optimizer: Any, error: type[Exception] = ValueError) -> str:
    """Text of the refusal; asserts that nothing has changed."""
    before = dict(vars(optimizer)) if hasattr(optimizer, "__dict__") else {}
    groups = [dict(group) for group in getattr(optimizer, "param_groups", [])]
    defaults = dict(getattr(optimizer, "defaults", {}))
    state = {p: dict(s) for p, s in getattr(optimizer, "state", {}).items()}
    hooks = len(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", ()))
    with pytest.raises(error) as caught:
        ampfast.sync_free_(optimizer)
    if before:
        assert vars(optimizer) == before
    if groups:
        assert [list(group) for group in optimizer.param_groups] == [list(g) for g in groups]
        for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
            assert all(ours[key] is theirs[key] for key in theirs)
        assert all(optimizer.defaults[key] is defaults[key] for key in defaults)
        assert list(optimizer.state) == list(state)
        for p, entries in state.items():
            assert all(optimizer.state[p][key] is entries[key] for key in entries)
        assert len(optimizer._optimizer_load_state_dict_pre_hooks) == hooks
    return str(caught.value)


class OwnAdam(torch.optim.Adam):
    """Subclass whose step may do anything."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OwnAdam(parameters()), ["OwnAdam", "subclass", "fused=True"]),
        (lambda: torch.optim.NAdam(parameters()), ["torch.optim", "NAdam", "one host sync"]),
        (lambda: torch.optim.RMSprop(parameters()), ["RMSprop", "one host sync"]),
        (lambda: object(), ["builtins.object", "wraps"]),
        (lambda: None, ["NoneType"]),
    ],
)
def test_other_types(make: Any, words: list[str]) -> None:
    text = refusal(make(), TypeError)
    assert all(word in text for word in ["Adam, AdamW, SGD and Adagrad", *words]), text


@pytest.mark.parametrize("kind", KINDS)
def test_differentiable(kind: str) -> None:
    loop = plain(kind, 2)
    loop.optimizer.param_groups[1]["differentiable"] = True
    assert "group 1 has differentiable=True" in refusal(loop.optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_differentiable_state_dict(kind: str) -> None:
    loop = make_free(plain(kind, 2))
    saved = copy.deepcopy(loop.optimizer.state_dict())
    saved["param_groups"][1]["differentiable"] = True
    before = copy.deepcopy(loop.observe())
    with pytest.raises(ValueError, match=r"group 1 of the state dict has differentiable=True"):
        loop.optimizer.load_state_dict(saved)
    assert_same(loop.observe(), before)


def with_second(kind: str, second: torch.Tensor, **group: Any) -> torch.optim.Optimizer:
    make, options = KINDS[kind]
    first = torch.nn.Parameter(torch.ones(2))
    return make([{"params": [first]}, {"params": [first.detach(), second], **group}], **options)


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd", "adagrad"])
@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.ones(2, dtype=torch.complex64), "torch.complex64 on cpu"),
        (torch.ones(2, device="meta"), "torch.float32 on meta"),
        (torch.ones(2).to(torch.float8_e4m3fn), "torch.float8_e4m3fn on cpu"),
    ],
    ids=["complex", "meta", "float8"],
)
def test_devices_and_dtypes(kind: str, value: torch.Tensor, what: str) -> None:
    text = refusal(with_second(kind, torch.nn.Parameter(value)))
    assert "cannot step parameter 1 of group 1, a " + what in text
    assert KINDS[kind][0].__name__ in text


def test_names_are_shown() -> None:
    bad = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    named = [("head.weight", torch.nn.Parameter(torch.ones(2))), ("head.phase", bad)]
    assert "parameter 1 of group 0 (head.phase), a" in refusal(torch.optim.Adam(named))


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_parameters_that_never_step_may_be_of_any_kind(kind: str) -> None:
    """Such as the frozen integers of a quantised model."""
    optimizer = with_second(kind, torch.ones(2, dtype=torch.int8))
    assert ampfast.sync_free_(optimizer) is optimizer
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()


def test_frozen_parameters_that_may_step_are_checked() -> None:
    with_state = with_second("adagrad", torch.ones(2, dtype=torch.complex64))
    assert "cannot step parameter 1 of group 1" in refusal(with_state)
    frozen = torch.ones(4)[::2]
    with_gradient = with_second("adam", frozen)
    frozen.grad = torch.ones(2)
    assert "parameter 1 of group 1 has strides (2,)" in refusal(with_gradient)


def test_a_learning_rate_that_the_kernel_cannot_take() -> None:
    optimizer = with_second("sgd", torch.nn.Parameter(torch.ones(2)))
    optimizer.param_groups[1]["lr"] = torch.ones(2)
    assert "torch's fused SGD cannot step parameter 1 of group 1" in refusal(optimizer)


def test_sparse_parameters() -> None:
    optimizer = with_second("sgd", torch.nn.Parameter(torch.ones(2).to_sparse()))
    assert "parameter 1 of group 1 is torch.sparse_coo" in refusal(optimizer)


@pytest.mark.parametrize("kind", ["adam", "sgd", "adagrad"])
def test_gaps_in_memory(kind: str) -> None:
    whole = torch.ones(4, 6)
    optimizer = with_second(kind, torch.nn.Parameter(whole[:, ::2]))
    assert "parameter 1 of group 1 has strides (6, 2) for shape (4, 3)" in refusal(optimizer)
    # torch writes memory that is not the parameter's, and misses some that is.
    optimizer.param_groups[1].update(fused=True, foreach=False)
    optimizer.param_groups[1]["params"][1].grad = torch.ones(4, 3)
    optimizer.step()
    assert not bool((whole[:, 1::2] == 1).all()), "no longer: the check could go"


@pytest.mark.parametrize(
    ("kind", "key"), [("adam", "exp_avg"), ("momentum", "momentum_buffer"), ("adagrad", "sum")]
)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.double(), "dtype: torch.float64, not torch.float32"),
        (lambda t: t.t().contiguous().t(), r"order in memory: (1, 3), not (4, 1)"),
        (lambda t: t[:2], "shape: torch.Size([2, 4]), not torch.Size([3, 4])"),
        (lambda t: t.to_sparse(), "layout: torch.sparse_coo, not torch.strided"),
    ],
    ids=["dtype", "strides", "shape", "sparse"],
)
def test_state_and_gradients_unlike_the_parameter(
    kind: str, key: str, change: Any, what: str
) -> None:
    def make() -> torch.optim.Optimizer:
        optimizer = with_second(kind, parameter_with(torch.ones(3, 4)))
        optimizer.step()
        return optimizer

    optimizer = make()
    state = optimizer.state[optimizer.param_groups[1]["params"][1]]
    state[key] = change(state[key])
    assert f"the {key!r} of parameter 1 of group 1 has another {what}" in refusal(optimizer)
    if "dtype" not in what and "shape" not in what:  # which torch does not allow to be assigned
        optimizer = make()
        param = optimizer.param_groups[1]["params"][1]
        param.grad = change(param.grad)
        assert f"the gradient of parameter 1 of group 1 has another {what}" in refusal(optimizer)


@pytest.mark.parametrize(
    ("kind", "group", "fits"),
    [
        ("adam", {"lr": torch.tensor(0.1, device="meta")}, "'lr' of group 1"),
        ("adam", {"betas": (torch.tensor(0.9, device="meta"), 0.99)}, "'betas' of group 1"),
        ("sgd", {"weight_decay": torch.tensor(0.1, device="meta")}, "'weight_decay' of group 1"),
    ],
)
def test_hyperparameters_elsewhere(kind: str, group: dict[str, Any], fits: str) -> None:
    optimizer = with_second(kind, torch.nn.Parameter(torch.ones(2)))
    optimizer.param_groups[1].update(group)
    text = refusal(optimizer)
    assert f"{fits} is a tensor on meta" in text and "without a sync" in text


def test_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampfast.capture.is_capturing", lambda: True)
    text = refusal(plain("adam", 2).optimizer, RuntimeError)
    assert "cannot capture" in text and "call it before" in text
