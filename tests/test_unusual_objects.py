"""Unusual groups, parameters and gradients that torch accepts, and those that its op refuses."""

from __future__ import annotations

import functools
import itertools
import types
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.gradients import parameter_with, six
from support.outcomes import agree, outcome
from support.scalers import Scaler, TorchScaler, started
from torch._subclasses.fake_tensor import FakeTensorMode

from ampfast import GradScaler

# Parameter containers


class Groups(list):
    """Iterates over other items than it holds."""

    def __init__(self, shown: list[Any]) -> None:
        super().__init__()
        self.shown = shown

    def __iter__(self) -> Any:
        return iter(self.shown)


class Indexed:
    """Group with item access only."""

    def __init__(self, params: list[Any]) -> None:
        self.params = params

    def __getitem__(self, key: str) -> list[Any]:
        return self.params


GROUPS: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "tuple of params": lambda p: [{"params": (p,)}],
    "generator of params": lambda p: [{"params": (x for x in [p])}],
    "set of params": lambda p: [{"params": {p}}],
    "dict of params": lambda p: [{"params": {p: 1}}],
    "ParameterList": lambda p: [{"params": torch.nn.ParameterList([p])}],
    "list that iterates otherwise": lambda p: [{"params": Groups([p])}],
    "tuple of groups": lambda p: ({"params": [p]},),
    "generator of groups": lambda p: (g for g in [{"params": [p]}]),
    "UserDict": lambda p: [UserDict(params=[p])],
    "item access only": lambda p: [Indexed([p])],
    "None": lambda p: [{"params": None}],
    "names": lambda p: [{"params": {"weight": p}}],
    "pairs": lambda p: [{"params": [("weight", p)]}],
}


@pytest.mark.parametrize("make", GROUPS.values(), ids=GROUPS)
def test_groups(make: Callable[[torch.nn.Parameter], Any]) -> None:
    def use(scaler_type: Scaler) -> Any:
        scaler, p = started(scaler_type, 3.0), six(3)
        optimizer = types.SimpleNamespace(param_groups=make(p))
        scaler.unscale_(optimizer)
        return [p.grad, list(scaler._found_inf_per_device(optimizer).values())]

    agree(use)


# Parameters and gradients


class Elsewhere(torch.nn.Parameter):
    """Parameter that accepts any gradient, unlike autograd, and stores it elsewhere."""

    kept: torch.Tensor

    @property
    def grad(self) -> torch.Tensor:
        return self.kept

    @grad.setter
    def grad(self, value: torch.Tensor) -> None:
        self.kept = value


class Same(torch.Tensor):
    """Subclass without changes."""


def sixes(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((4,), 6.0).to(dtype)


def with_gradient(p: Any, gradient: torch.Tensor) -> Any:
    p.grad = gradient
    return p


def _negated() -> Any:
    p = parameter_with(torch.complex(torch.ones(4), torch.arange(-2.0, 2)).conj().imag)
    assert p.grad.is_neg()
    return p


def _inference() -> Any:
    with torch.inference_mode():
        gradient = sixes()
    return parameter_with(gradient)


def _rows() -> Any:
    p = torch.nn.Parameter(torch.eye(3).to_sparse_csr())
    return with_gradient(p, (torch.eye(3) * 6).to_sparse_csr())


PARAMETERS: dict[str, Callable[[], Any]] = {
    "elsewhere": lambda: with_gradient(Elsewhere(torch.ones(4)), sixes()),
    "subclass": lambda: with_gradient(
        sixes().as_subclass(Same).requires_grad_(), sixes().as_subclass(Same)
    ),
    "rows": _rows,
    "float8": lambda: parameter_with(torch.ones(3).to(torch.float8_e4m3fn)),
    "negated": _negated,
    "inference": _inference,
}


@pytest.mark.parametrize("make", PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize("call", ["unscale_", "_check_inf_per_device"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_parameters(make: Callable[[], Any], call: str) -> None:
    def use(scaler_type: Scaler) -> Any:
        scaler, regular, odd = started(scaler_type, 3.0), six(2), make()
        optimizer = types.SimpleNamespace(param_groups=[{"params": [regular, odd]}])
        getattr(scaler, call)(optimizer)
        gradient = odd.grad.values() if odd.grad.layout is torch.sparse_csr else odd.grad
        gradient = gradient.detach().clone().resolve_neg().as_subclass(torch.Tensor)
        flags = list(scaler._found_inf_per_device(optimizer).values())
        return [flags, regular.grad, gradient]

    def quiet(scaler_type: Scaler) -> Any:
        # C++ warnings about such tensors point into the module that first touched them.
        result = outcome(functools.partial(use, scaler_type))
        if result.error is not None:
            raise result.error
        return result.value

    agree(quiet)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_on_fake_tensors(call: str) -> None:
    """Memory estimators train on tensors without memory."""

    def use(scaler_type: Scaler) -> Any:
        with FakeTensorMode():
            scaler, p = started(scaler_type, 3.0), six(3)
            optimizer = torch.optim.Adam([p], lr=0.1, fused=True)
            getattr(scaler, call)(optimizer)
            kinds = [type(f).__name__ for f in scaler._found_inf_per_device(optimizer).values()]
            scaler.update()
            return [kinds, type(scaler._scale).__name__, scaler._scale.shape]

    assert agree(use).error is None


FLOATS = (torch.float32, torch.float64)
REFUSED: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "fake": lambda dtype: FakeTensorMode().from_tensor(sixes(dtype)),
    "nested": lambda dtype: torch.nested.nested_tensor([sixes(dtype)] * 2, layout=torch.strided),
    "expanded": lambda dtype: sixes(dtype)[:1].expand(4),
    "expanded subclass": lambda dtype: sixes(dtype)[:1].expand(4).as_subclass(Same),
    "complex": lambda dtype: torch.full((4,), 6 + 0j),
}
TAKEN: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "plain": sixes,
    "overlapping": lambda dtype: sixes(dtype).as_strided((3, 2), (1, 1)),
    "subclass": lambda dtype: sixes(dtype).as_subclass(Same),
}


def unscaled(scaler_type: Scaler, *gradients: torch.Tensor, **arguments: Any) -> Exception:
    """Error of unscaling the gradients."""
    params = [with_gradient(Elsewhere(torch.ones(4)), gradient) for gradient in gradients]
    optimizer = types.SimpleNamespace(param_groups=[{"params": params}])
    with pytest.raises(Exception) as raised:
        started(scaler_type, 3.0, **arguments).unscale_(optimizer)
    return raised.value


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("kind", REFUSED)
def test_nothing_is_divided_beside_a_refused_gradient(kind: str, backend: str) -> None:
    theirs = unscaled(TorchScaler, REFUSED[kind](torch.float32))
    for name, dtypes in itertools.product(TAKEN, itertools.product(FLOATS, FLOATS)):
        for first in (False, True):
            refused, taken = REFUSED[kind](dtypes[0]), TAKEN[name](dtypes[1])
            gradients = (refused, taken) if first else (taken, refused)
            error = unscaled(GradScaler, *gradients, backend=backend)
            assert type(error) is type(theirs)
            assert_same(taken, TAKEN[name](dtypes[1]))
