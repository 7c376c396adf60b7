"""Names of parameters in reports."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from support.tracking_scalers import net, parameters, started


def test_names_of_a_model() -> None:
    model = net()
    scaler = started()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.name_parameters(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    model[2].bias.grad[0] = math.nan
    scaler.step(optimizer)
    scaler.update()
    assert [p.name for p in scaler.overflow_report().parameters] == ["2.bias"]


def test_names_that_are_partly_missing() -> None:
    scaler = started()
    params = parameters(math.nan, math.inf)
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler.name_parameters([("first", params[0])])
    scaler.step(optimizer)
    names = [p.name for p in scaler.overflow_report().parameters]
    assert names == ["first", "group 0, parameter 1"]


def test_names_that_do_not_match_the_optimizer() -> None:
    scaler = started()
    params, others = parameters(math.nan), parameters(1.0)
    scaler.name_parameters([("other", others[0])])
    optimizer = torch.optim.SGD(params, lr=1.0)
    with pytest.raises(ValueError, match="none of the optimizers' 1 parameters"):
        scaler.health(optimizer)
    scaler.step(optimizer)
    with pytest.raises(ValueError, match="none of the optimizers' 1 parameters"):
        scaler.overflow_report()
    scaler.name_parameters([("mine", params[0])])
    assert scaler.overflow_report().parameters[0].name == "mine"
    # Some of several optimizers may have no names.
    unnamed = torch.optim.SGD(parameters(math.inf), lr=1.0)
    scaler.step(unnamed)
    names = [p.name for p in scaler.overflow_report().parameters]
    assert names == ["mine", "group 0, parameter 0"]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (7, TypeError, "torch.nn.Module or pairs"),
        ("weight", TypeError, "torch.nn.Module or pairs"),
        ([torch.zeros(2)], TypeError, "parameter, as from .* got Tensor"),
        ([("a", 3)], TypeError, "got str and int"),
        ([(3, torch.zeros(2))], TypeError, "got int and Tensor"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], ValueError, "the name 'a'"),
    ],
)
@pytest.mark.parametrize("track", [None, "overflow"])
def test_bad_names(track: str | None, given: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        started(track).name_parameters(given)


@pytest.mark.parametrize("way", ["module", "pairs", "another module"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_names_and_counts_outlive_a_conversion_by_swapping(when: str, way: str) -> None:
    model = net()
    scaler = started()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if way == "module":
            scaler.name_parameters(model)
        elif way == "pairs":
            scaler.name_parameters(model.named_parameters())
        else:
            scaler.name_parameters(torch.nn.Sequential(*model))  # which is gone at once
        if when == "before":
            model.double()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        model[2].bias.grad[0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        del param
        model.to(torch.float32 if when == "before" else torch.float64)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        model.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    (row,) = scaler.overflow_report().parameters
    assert (row.name, row.nans) == ("2.bias", 2)


def test_the_last_name_counts() -> None:
    model, scaler = net(), started()
    model[2].weight = torch.nn.Parameter(torch.ones(4, 3))
    model[0].weight = model[2].weight  # one parameter in two modules
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    for param in model[0].parameters():
        param.grad = torch.full_like(param, math.inf)
    scaler.step(optimizer)

    def names() -> list[str]:
        return [p.name for p in scaler.overflow_report().parameters]

    scaler.name_parameters(model)
    assert names() == ["0.weight", "0.bias"]
    scaler.name_parameters(torch.nn.ModuleDict({"own": model[0]}))
    assert names() == ["own.weight", "own.bias"]
    scaler.name_parameters([("given", model[0].weight)])
    assert names() == ["given", "own.bias"]
    scaler.name_parameters(model)
    assert names() == ["0.weight", "0.bias"]


def test_a_parameter_that_replaces_another_in_its_module_has_the_name() -> None:
    model, scaler = net(), started()
    scaler.name_parameters(model)
    model[2].bias = torch.nn.Parameter(torch.zeros(2))
    model[2].bias.grad = torch.full((2,), math.inf)
    scaler.step(torch.optim.SGD([model[2].bias], lr=1.0))
    assert scaler.overflow_report().parameters == ()  # of an optimizer that is gone
    optimizer = torch.optim.SGD([model[2].bias], lr=1.0)
    scaler.update()
    scaler.step(optimizer)
    assert [p.name for p in scaler.overflow_report().parameters] == ["2.bias"]


def test_pairs_are_forgotten_with_their_parameters() -> None:
    scaler = started()
    model = net()
    alive = weakref.ref(model[0].weight)
    scaler.name_parameters(model.named_parameters())
    del model
    gc.collect()
    scaler.name_parameters(net())  # the next call
    assert alive() is None


def test_names_do_not_keep_parameters() -> None:
    scaler = started()
    model = net()
    alive = weakref.ref(model[0].weight)
    scaler.name_parameters(model)
    del model
    gc.collect()
    assert alive() is None
