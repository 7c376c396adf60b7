"""Gradients refused by torch's op, among others: nothing is divided, in any order."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.scalers import Scaler, TorchScaler, started
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from ampfast import GradScaler

FLOATS = (torch.float32, torch.float64)


class Same(torch.Tensor):
    """Subclass without changes."""


class Wrapper(torch.Tensor):
    """Wrapper subclass that supports all ops but the scaler's."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_amp_" in str(func):
            raise NotImplementedError(f"{func} of {cls.__name__}")
        args = tree_map_only(Wrapper, lambda wrapper: wrapper.inner, args)
        return func(*args, **(kwargs or {}))


def six(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((4,), 6.0).to(dtype)


def masked(dtype: torch.dtype) -> torch.Tensor:
    return torch.masked.masked_tensor(six(dtype), torch.tensor([True, False, True, True]))


def fake(dtype: torch.dtype) -> torch.Tensor:
    return FakeTensorMode().from_tensor(six(dtype))


def nested(dtype: torch.dtype) -> torch.Tensor:
    return torch.nested.nested_tensor([six(dtype), six(dtype)], layout=torch.strided)


REFUSED: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "masked": masked,
    "fake": fake,
    "wrapper": lambda dtype: Wrapper(six(dtype)),
    "nested": nested,
    "expanded": lambda dtype: six(dtype)[:1].expand(4),
    "negative": lambda dtype: six(dtype)._neg_view(),
    "expanded subclass": lambda dtype: six(dtype)[:1].expand(4).as_subclass(Same),
    "complex": lambda dtype: torch.full((4,), 6 + 0j),
}
TAKEN: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "plain": six,
    "overlapping": lambda dtype: six(dtype).as_strided((3, 2), (1, 1)),
    "subclass": lambda dtype: six(dtype).as_subclass(Same),
}


class Holder(torch.nn.Parameter):
    """Parameter that accepts any gradient, unlike autograd."""

    kept: torch.Tensor

    @property
    def grad(self) -> torch.Tensor:
        return self.kept


def unscaled(scaler_type: Scaler, *gradients: torch.Tensor, **arguments: Any) -> Exception:
    """Error of unscaling the gradients."""
    parameters = [Holder(torch.ones(4)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.kept = gradient
    optimizer = types.SimpleNamespace(param_groups=[{"params": parameters}])
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
