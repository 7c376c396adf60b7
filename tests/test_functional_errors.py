"""Bad input to the functional ops: torch's error types, names, and refusal before any write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import assert_same

from ampfast import functional

OPS = torch.ops.ampfast


def f32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


Arguments = dict[str, Any]


def good(name: str) -> Arguments:
    grads = {"grads": [torch.full((3,), 4.0), torch.full((2,), 6.0).double()]}
    found = {"found_inf": f32(0)}
    state = {"current_scale": f32(8.0), "growth_tracker": torch.tensor(1, dtype=torch.int32)}
    rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    return {
        "unscale_": {**grads, **found, "inv_scale": f32(0.5)},
        "check_": {**grads, **found},
        "update_scale_": {**state, **found, **rule},
    }[name]


def contents(arguments: Arguments) -> list[Any]:
    tensors = [
        t
        for value in arguments.values()
        for t in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.layout is torch.strided
    ]
    return [t.clone() for t in tensors]


def refused(name: str, error: Any, **changes: Any) -> str:
    """Calls an op with some arguments replaced; asserts `error` and unchanged tensors."""
    arguments = {**good(name), **changes}
    before = contents(arguments)
    with pytest.raises(error) as raised:
        getattr(functional, name)(*arguments.values())
    assert_same(contents(arguments), before, "arguments after the error")
    return str(raised.value)


TENSOR_ARGUMENTS = [
    (name, argument)
    for name in ("unscale_", "check_", "update_scale_")
    for argument in ("found_inf", "inv_scale", "current_scale", "growth_tracker")
    if argument in good(name)
]
GRADIENT_OPS = ("unscale_", "check_")


@pytest.mark.parametrize(("name", "argument"), TENSOR_ARGUMENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool], ids=str)
def test_wrong_dtype(name: str, argument: str, dtype: torch.dtype) -> None:
    text = refused(name, RuntimeError, **{argument: torch.ones((), dtype=dtype)})
    assert argument in text
    got = {"float64": "double", "float16": "half", "int64": "long", "bool": "bool"}
    short = str(dtype).removeprefix("torch.")
    assert short in text.lower() or got[short] in text.lower(), text


@pytest.mark.parametrize(("name", "argument"), TENSOR_ARGUMENTS)
@pytest.mark.parametrize("shape", [(2,), (0,), (3, 1)])
def test_wrong_shape(name: str, argument: str, shape: tuple[int, ...]) -> None:
    dtype = torch.int32 if argument == "growth_tracker" else torch.float32
    text = refused(name, RuntimeError, **{argument: torch.ones(shape, dtype=dtype)})
    assert argument in text
    assert str(shape) in text or str(list(shape)) in text, text


@pytest.mark.parametrize(("name", "argument"), TENSOR_ARGUMENTS)
def test_wrong_device(name: str, argument: str) -> None:
    dtype = torch.int32 if argument == "growth_tracker" else torch.float32
    wrong = torch.ones((), dtype=dtype, device="meta")
    text = refused(name, (RuntimeError, ValueError), **{argument: wrong})
    assert argument in text
    assert "meta" in text


@pytest.mark.parametrize(("name", "argument"), TENSOR_ARGUMENTS)
@pytest.mark.parametrize("value", [1.0, None, "1"])
def test_not_a_tensor(name: str, argument: str, value: Any) -> None:
    text = refused(name, TypeError, **{argument: value})
    assert argument in text
    assert type(value).__name__ in text


@pytest.mark.parametrize("name", GRADIENT_OPS)
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_tensor_is_not_a_list(name: str, shape: tuple[int, ...]) -> None:
    text = refused(name, TypeError, grads=torch.ones(shape))
    assert "grads" in text
    assert "Tensor" in text


@pytest.mark.parametrize("name", GRADIENT_OPS)
@pytest.mark.parametrize("wrong", [None, 3.0, "grad", [torch.ones(1)]])
def test_list_of_other_things(name: str, wrong: Any) -> None:
    text = refused(name, TypeError, grads=[torch.full((3,), 4.0), wrong])
    assert "grads" in text
    assert type(wrong).__name__ in text


@pytest.mark.parametrize("name", GRADIENT_OPS)
@pytest.mark.parametrize("grads", [None, 3.0])
def test_no_list_at_all(name: str, grads: Any) -> None:
    text = refused(name, TypeError, grads=grads)
    assert "grads" in text
    assert type(grads).__name__ in text


@pytest.mark.parametrize("name", GRADIENT_OPS)
@pytest.mark.parametrize("order", [1, -1])
def test_gradients_on_several_devices(name: str, order: int) -> None:
    grads = [torch.full((3,), 4.0), torch.ones(3, device="meta")][::order]
    text = refused(name, (RuntimeError, ValueError), grads=grads)
    assert "grads" in text
    assert "meta" in text
    assert "cpu" in text


@pytest.mark.parametrize("name", GRADIENT_OPS)
@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(3, dtype=torch.int32),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to_sparse(),
    ],
    ids=["int32", "bool", "complex64", "sparse"],
)
@pytest.mark.parametrize("other", ["regular", "irregular"])
def test_gradients_torch_has_no_kernel_for(name: str, wrong: torch.Tensor, other: str) -> None:
    with pytest.raises(NotImplementedError):
        torch._amp_foreach_non_finite_check_and_unscale_([wrong.clone()], f32(0), f32(0.5))
    first = torch.full((3, 2), 4.0)
    # torch's op takes those with gaps, one by one.
    first = first[:, 0] if other == "irregular" else first
    refused(name, NotImplementedError, grads=[first, wrong])


@pytest.mark.parametrize("name", GRADIENT_OPS)
def test_expanded_gradients_are_refused_before_anything_is_written(name: str) -> None:
    text = refused(name, RuntimeError, grads=[torch.full((3,), 4.0), torch.ones(1).expand(3)])
    assert "more than one element of the written-to tensor" in text


@pytest.mark.parametrize("name", ["update_scale_"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [("growth_interval", 1.5), ("growth_interval", "2"), ("growth_factor", "2")],
)
def test_wrong_numbers(name: str, argument: str, value: Any) -> None:
    text = refused(name, TypeError, **{argument: value})
    assert argument in text
    assert type(value).__name__ in text


def test_ops_refuse_by_themselves() -> None:
    """The registered op raises the same errors as the module's function."""
    call: Callable[..., Any] = OPS.unscale_
    grads = [torch.full((3,), 4.0)]
    with pytest.raises(RuntimeError, match="found_inf"):
        call(grads, torch.zeros((), dtype=torch.float64), f32(0.5))
    with pytest.raises(RuntimeError, match="inv_scale"):
        call(grads, f32(0), torch.ones(2))
    assert grads[0].tolist() == [4.0] * 3
