"""Parity checks before a kernel is timed: torch's gradients, flags, scale and norms."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from . import providers
from .cases import GradCase, make_gradients
from .harness import assert_same
from .providers import CHECK, NORM, UNSCALE, UPDATE, Scalars
from .timing import dtype_name

# Squares are summed in float32 within a window of 8 KiB, then in float64.
NORM_TOLERANCE = 1e-5


def assert_parity(case: GradCase, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Compares all calls of a backend with torch's, for finite and other gradients.

    torch's op runs on the CPU where it lacks the dtype on that device.
    """
    oracle = device if providers.torch_takes(dtype, device) else torch.device("cpu")
    gradients = make_gradients(case, dtype, device)
    for finite in (True, False):
        if not finite:
            for tensor in (gradients[len(gradients) // 2], gradients[-1]):
                tensor.view(-1)[-1] = math.inf
            gradients[-1].view(-1)[0] = math.nan
        what = f"{case.name} {dtype_name(dtype)}, {'all' if finite else 'not all'} finite"
        with providers.default_backend(name):
            _compare(gradients, name, oracle, what)
    if providers.device_kernels(name, device) is not None:
        _compare_norms(make_gradients(case, dtype, device), name)


def _compare(gradients: list[Tensor], name: str, oracle: torch.device, what: str) -> None:
    """Compares each path, as calls and as launches alone, over fresh copies of `gradients`."""
    device = gradients[0].device
    expected = [gradient.to(oracle, copy=True) for gradient in gradients]
    theirs = Scalars.make(oracle, inverse=1 / 3)
    providers.torch_calls(theirs).paths[UPDATE](expected, 0)
    makers = [providers.public_calls]
    if providers.device_kernels(name, device) is not None:
        makers.append(providers.launches)
    for make in makers:
        for path in (CHECK, UNSCALE, NORM, UPDATE):
            ours = replace(
                Scalars.make(device, inverse=1 / 3),
                # An earlier result of the backend would hide a missing write.
                norms=torch.full((2,), math.nan, dtype=torch.float64, device=device),
            )
            calls = make(name, device, ours)
            if path not in calls.paths:
                continue
            copies = [gradient.clone() for gradient in gradients]
            calls.paths[path](calls.prepare(copies), 0)
            label = f"{path} by {make.__name__} of {name}, {what}"
            assert_same([ours.found_inf], _on(device, [theirs.found_inf]), f"found_inf of {label}")
            written = gradients if path == CHECK else _on(device, expected)
            assert_same(copies, written, f"gradients of {label}")
            if path == UPDATE:
                state = _on(device, [theirs.scales[0], theirs.trackers[0]])
                assert_same([ours.scales[0], ours.trackers[0]], state, f"scale of {label}")


def _on(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


def _compare_norms(gradients: list[Tensor], name: str) -> None:
    """Compares norms with float64 ones, at a scale for which unscaling is exact."""
    device = gradients[0].device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    peak = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        if gradient.numel():
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            squares += (norm / 2).square()
            peak = torch.maximum(peak, gradient.abs().amax().double() / 2)
    scalars = Scalars.make(device)
    calls = providers.launches(name, device, scalars)
    calls.paths[NORM](calls.prepare(gradients), 0)
    what = f"norms of {name}"
    torch.testing.assert_close(
        scalars.norms[0], squares, rtol=NORM_TOLERANCE, atol=0, msg=lambda m: f"{what}: {m}"
    )
    assert_same([scalars.norms[1]], [peak], what)
