"""Refusals of `sync_free_`, which leave the optimizer unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.gradients import parameter_with
from support.sync_free_loops import KINDS, make_free, parameters, plain

import ampfast


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
