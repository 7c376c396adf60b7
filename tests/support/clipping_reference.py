"""Helpers of the clipping tests: exact norms, distances in ulps, clipping by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ampfast import GradScaler
from support.comparison import BITS, assert_same
from support.scalers import started

# Bound on the relative error of a norm against the float64 norm of the unscaled values: one
# rounding of each value, whose mean counts, and one of the norm. A float64 norm sums thousands of
# roundings.
NORM_ULPS = 4
WIDE_NORM_ULPS = 256
# Bound in ulps on a clipped gradient against unscaled x coefficient: one for each rounding.
GRADIENT_ULPS = 2


def ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats."""
    bits = values.contiguous().view(BITS[values.dtype]).to(torch.int64)
    least = torch.iinfo(BITS[values.dtype]).min
    return torch.where(bits < 0, least - bits, bits)


def ulps(ours: torch.Tensor, exact: torch.Tensor) -> int:
    """Largest distance in ulps of `ours` from float64 values."""
    rounded = exact.to(ours.dtype)
    if not ours.numel():
        return 0
    return int((ordered_bits(ours) - ordered_bits(rounded)).abs().max())


def inverse_of(scale: float) -> torch.Tensor:
    return torch.tensor(scale, dtype=torch.float32).double().reciprocal().float()


def unscaled(grads: Iterable[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Gradients as torch's op unscales them."""
    inverse, written = inverse_of(scale), []
    for grad in grads:
        copy = grad.detach().clone(memory_format=torch.contiguous_format)
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_([copy], found, inverse)
        written.append(copy)
    return written


def exact_norm(grads: Sequence[torch.Tensor], scale: float, order: float = 2.0) -> float:
    """Float64 norm of the unscaled values, not rounded to 16 bit."""
    inverse, values = inverse_of(scale), [np.zeros(1)]
    for grad in grads:
        wide = grad.detach().reshape(-1).to(torch.promote_types(grad.dtype, torch.float32))
        values.append((wide * inverse.to(wide.dtype)).double().abs().numpy())
    every = np.concatenate(values)
    if order == math.inf:
        return float(every.max())
    # 64 bits of mantissa where the processor has them.
    return float((every.astype(np.longdouble) ** order).sum()) ** (1 / order)


def coefficient_of(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """torch's coefficient in float64, but 1 for an infinite limit."""
    wide = norm.detach().double()
    if max_norm == math.inf:
        return torch.ones_like(wide)
    return (torch.full_like(wide, max_norm) / (wide + 1e-6)).clamp(max=1.0)


def clip_by_hand(parameters: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Unscaled gradients times the coefficient, bit for bit as `clip_grad_norm_`."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
            grad.copy_(wide * coefficient_of(norm, max_norm).to(wide.dtype))


def assert_clipped(
    grads: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    scale: float,
    norm: torch.Tensor,
    max_norm: float,
) -> None:
    """Asserts that the gradients were clipped to the returned norm."""
    coefficient = coefficient_of(norm, max_norm)
    for index, (grad, values) in enumerate(zip(grads, unscaled(before, scale), strict=True)):
        if coefficient == 1.0:
            assert_same(grad.contiguous(), values, f"gradient {index}")
        else:
            exact = values.double() * coefficient
            assert ulps(grad, exact) <= GRADIENT_ULPS, f"gradient {index}"


def assert_norm(norm: torch.Tensor, exact: float) -> None:
    assert norm.shape == ()
    if not math.isfinite(exact):
        assert_same(norm, torch.tensor(exact, dtype=norm.dtype))
    allowed = WIDE_NORM_ULPS if norm.dtype is torch.float64 else NORM_ULPS
    assert ulps(norm, torch.tensor(exact, dtype=torch.float64)) <= allowed, (norm, exact)


def ready(optimizer: Any, scale: float = 8.0, **arguments: Any) -> GradScaler:
    """Scaler at the stage in which it may clip."""
    assert optimizer.param_groups
    return started(GradScaler, scale, **arguments)


def grads_of(*optimizers: Any) -> list[torch.Tensor]:
    return [
        parameter.grad
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
