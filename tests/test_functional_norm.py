"""`functional.grad_norm`: values, custom op, and errors."""

from __future__ import annotations

import math

import pytest
import torch
from support.clipping_reference import exact_norm
from support.comparison import FLOATS, assert_same
from support.gradients import make_gradient

from ampfast import functional

INF = math.inf


def test_functional_norm() -> None:
    for layout in ("contiguous", "every_other", "long", "empty", "expanded"):
        for dtype in FLOATS:
            grads = [make_gradient(layout, dtype, seed) for seed in range(3)]
            for order in (2.0, INF, "inf", 3):
                exact = exact_norm(grads, 1.0, float(order))
                norm = functional.grad_norm(grads, order)
                assert norm.item() == pytest.approx(exact, rel=1e-6)
                norm = functional.grad_norm(grads, order, torch.tensor(0.5))
                assert norm.item() == pytest.approx(exact / 2, rel=1e-6)
                wide = dtype == torch.float64
                assert norm.dtype == (torch.float64 if wide else torch.float32)
    assert_same(functional.grad_norm([]), torch.tensor(0.0))


def test_functional_norm_as_a_custom_op() -> None:
    for inverse in (None, torch.tensor(0.5)):
        for grads in ([torch.ones(3), torch.ones(2, dtype=torch.float64)], []):
            torch.library.opcheck(torch.ops.ampfast.grad_norm.default, (grads, 2.0, inverse))
    compiled = torch.compile(
        lambda grads: functional.grad_norm(grads, 2.0) * 2, backend="eager", fullgraph=True
    )
    assert compiled([torch.tensor([3.0, 4.0])]).item() == 10.0


def test_functional_norm_refuses() -> None:
    for call, error, match in (
        (lambda: functional.grad_norm(torch.ones(2)), TypeError, "grads must be a list"),
        (lambda: functional.grad_norm([torch.ones(2), 3]), TypeError, r"grads\[1\] must be a t"),
        (lambda: functional.grad_norm([None]), TypeError, r"grads\[0\] must be a tensor"),
        (
            lambda: functional.grad_norm([torch.ones(2)], 2.0, torch.ones(2)),
            RuntimeError,
            "inv_scale must be a one-element",
        ),
        (
            lambda: functional.grad_norm([torch.ones(2), torch.ones(2, device="meta")]),
            RuntimeError,
            r"got grads\[1\] on meta",
        ),
    ):
        with pytest.raises(error, match=match):
            call()
