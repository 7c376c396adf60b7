"""Gradients of every layout, and parameters with given gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


Layout = Callable[[torch.dtype, int], torch.Tensor]

# Equal seeds give equal tensors, with equal strides, offset and overlap, unlike a clone.
LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda dtype, seed: filled((6, 11), dtype, seed),
    "transposed": lambda dtype, seed: filled((11, 6), dtype, seed).t(),
    "channels_last": lambda dtype, seed: filled((2, 3, 5, 4), dtype, seed).contiguous(
        memory_format=torch.channels_last
    ),
    "permuted": lambda dtype, seed: filled((3, 4, 5), dtype, seed).permute(2, 0, 1),
    "odd_offset": lambda dtype, seed: filled((64,), dtype, seed)[3:40],
    # More than one chunk of any backend, and not a whole number of vectors.
    "long": lambda dtype, seed: filled((70_003,), dtype, seed)[1:],
    "every_other": lambda dtype, seed: filled((6, 22), dtype, seed)[:, 1::2],
    "short": lambda dtype, seed: filled((5,), dtype, seed),
    "empty": lambda dtype, seed: filled((3, 0), dtype, seed),
    "scalar": lambda dtype, seed: filled((), dtype, seed),
    "overlapping": lambda dtype, seed: filled((8,), dtype, seed).as_strided((4, 3), (1, 2)),
    "expanded": lambda dtype, seed: filled((6, 1), dtype, seed).expand(6, 11),
}

# Layouts that torch writes; it refuses "expanded", whose elements certainly overlap.
WRITABLE_LAYOUTS = tuple(name for name in LAYOUTS if name != "expanded")


def make_gradient(layout: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal gradient in one of `LAYOUTS`; equal seeds give equal bits."""
    return LAYOUTS[layout](dtype, seed)


def plant(gradient: torch.Tensor, where: str, value: float) -> torch.Tensor:
    """Writes `value` to the ``"first"``, ``"middle"`` or ``"last"`` element; returns the tensor.

    Overflowing values become infinite; empty tensors are unchanged.
    """
    count = gradient.numel()
    if count:
        index = {"first": 0, "middle": count // 2, "last": count - 1}[where]
        place = []
        for size in reversed(gradient.shape):
            place.append(index % size)
            index //= size
        gradient[tuple(reversed(place))] = torch.tensor(value, dtype=torch.float64).to(
            gradient.dtype
        )
    return gradient


def parameter_like(gradient: torch.Tensor) -> torch.nn.Parameter:
    """Parameter of zeros with this gradient, distributed like it."""
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def parameter_with(gradient: torch.Tensor, fill: float = 1.0) -> torch.nn.Parameter:
    """Parameter with this very gradient, of its shape, dtype and device."""
    dense = torch.full(gradient.shape, fill, dtype=gradient.dtype, device=gradient.device)
    parameter = torch.nn.Parameter(dense)
    parameter.grad = gradient
    return parameter


def six(*shape: int) -> torch.nn.Parameter:
    """Parameter whose gradient is 6 everywhere, 2 at a scale of 3."""
    return parameter_with(torch.full(shape, 6.0))


def sgd_with(*gradients: torch.Tensor) -> torch.optim.SGD:
    """SGD over parameters with these gradients."""
    return torch.optim.SGD([parameter_with(g) for g in gradients], lr=0.5)
