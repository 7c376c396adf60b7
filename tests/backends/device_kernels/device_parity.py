"""Parity of kernels with torch's op; skips the importing module where none can be launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from support.comparison import FLOATS, assert_same
from support.kernels import (
    exact_bits,
    flag,
    grads_of,
    inverse_of,
    non_finite,
    run_check,
    run_unscale,
    storage,
    window,
)
from support.launchers import chosen, compiled

from ampfast.backends.gpu import DeviceKernels

launch = chosen()
KERNELS = DeviceKernels(launch)
# Backend of the kernels, for tests that choose one by name; compiled ones are the default.
BACKEND = None if compiled() else "triton"
CPU = torch.device("cpu")
# More than a window's alignment on both sides of a tensor.
GUARD = 32
VECTOR_BYTES = 16

Make = Callable[[], list[torch.Tensor]]


def offsets(dtype: torch.dtype) -> range:
    """Offsets in elements between two 16-byte boundaries."""
    return range(VECTOR_BYTES // dtype.itemsize)


def guarded(values: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Copies values between guard bands, whose infinities and pattern show reads and writes.

    The copy begins `offset` elements past a 16-byte boundary.
    """
    memory = torch.full((GUARD + offset + values.numel() + GUARD,), 7.5, dtype=values.dtype)
    memory[::2] = torch.inf
    assert memory.data_ptr() % VECTOR_BYTES == 0
    copy = memory[GUARD + offset : GUARD + offset + values.numel()]
    copy.copy_(values)
    if values.numel():
        assert copy.data_ptr() % VECTOR_BYTES == offset * values.itemsize % VECTOR_BYTES
    return copy


def normal(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def mixed() -> list[torch.Tensor]:
    """All dtypes, at several offsets, with sizes from zero to several windows."""
    return [
        guarded(normal(count, dtype, seed), seed % len(offsets(dtype)))
        for seed, (count, dtype) in enumerate(
            (count, dtype)
            for dtype in FLOATS
            for count in (5, 0, 2 * window(dtype) + 3, 1, window(dtype))
        )
    ]


def torch_unscaled(make: Make, inverse: float) -> tuple[list[torch.Tensor], float]:
    """Gradients unscaled by torch's op, and whether a written value is not finite."""
    grads = make()
    for dtype in FLOATS:
        same = [g for g in grads if g.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(same, flag(), flag(inverse))
    return grads, non_finite(grads)


def quotients(grads: Sequence[torch.Tensor], divisor: float) -> list[torch.Tensor]:
    """Quotients as fused optimizers divide: 16-bit gradients in float32."""
    wide = [g if g.dtype == torch.float64 else g.float() for g in grads]
    return [g / flag(divisor).to(g.dtype) for g in wide]


def assert_same_memory(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """Compares the tensors and the guard bands around them."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(storage(a), storage(b), f"memory of gradient {i}, {a.dtype}")


def check_reads(make: Make, divisors: Sequence[float] = ()) -> None:
    """Checks gradients and their quotients by each divisor; nothing may be written."""
    grads = make()
    before = [exact_bits(g) for g in grads]
    table = grads_of(grads)
    assert run_check(KERNELS, table).item() == non_finite(grads)
    for divisor in divisors:
        found = run_check(KERNELS, table, flag(divisor)).item()
        assert found == non_finite(quotients(grads, divisor)), divisor
    for gradient, bits in zip(grads, before, strict=True):
        assert torch.equal(exact_bits(gradient), bits), "a check wrote"


def check_unscales(make: Make, factor: float, *, is_scale: bool = False) -> None:
    """Unscales copies of the same gradients here and in torch and compares all memory."""
    theirs, expected = torch_unscaled(make, inverse_of(factor) if is_scale else factor)
    ours = make()
    found = run_unscale(KERNELS, grads_of(ours), flag(factor), is_scale=is_scale)
    assert found.shape == () and found.dtype == torch.float32
    assert_same_memory(ours, theirs)
    assert found.item() == expected
