"""Unscaling and clipping over real lists: ampfast's one call, or two, against torch's two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from . import providers
from .cases import GradCase, make_gradients
from .kernels import lists_in_turn
from .machine import require_memory
from .providers import exact_norm
from .steps import NoOptimizer, make_scaler, optimizer_over
from .timing import Contender, Measured, Setting, assert_same, dtype_name, time_contenders

CLIP, DEFERRED_CLIP = "clip", "clip, in_place=False"
# Multiples of a list's bytes: read for the norm, then read and written; or read once.
PASSES = {CLIP: 3, DEFERRED_CLIP: 1}
# Relative tolerance of float64 sums of the same 1e8 squares in different orders.
ORDER_OF_SUMS = 1e-12
# Gradients are scaled by this and clipped to their own norm, so that they do not drift.
SCALE = 0.5
# Relative tolerance of drift: each call rounds some values again. In 16 bit that adds up, so every
# sample starts from the initial values.
DRIFT = 0.02
# Gradients that are looked at for drift.
SAMPLE = 8


def measure(case: GradCase, dtype: torch.dtype, on: Setting) -> Measured:
    """Times `clip_grad_norm_` against `unscale_` and torch's `clip_grad_norm_`."""
    device, count = on.device, lists_in_turn(case, dtype, on, whole_calls=True)
    names, notes = providers.available(device)
    if dtype is torch.float16:
        return Measured(notes=[*notes, "clip: torch refuses to unscale float16 gradients"])
    for name in names:
        assert_parity(case, dtype, device, name)
    torchs = ["torch"] if providers.torch_takes(dtype, device) else []
    sides = [(CLIP, name) for name in torchs] + [(path, name) for path in PASSES for name in names]
    lists = [make_gradients(case, dtype, device) for _ in range(count)]
    first = [tensor.clone() for tensor in lists[0][:SAMPLE]]
    optimizers = [optimizer_over(tensors, fused=True) for tensors in lists]
    kept: list[list[Tensor]] = []
    if dtype.itemsize == 2:
        require_memory(count * case.list_bytes(dtype), device)
        kept = [[tensor.clone() for tensor in tensors] for tensors in lists]

    def restored() -> AbstractContextManager[object]:
        for now, before in zip(lists, kept, strict=False):
            torch._foreach_copy_(now, before)
        return nullcontext()

    def contenders(count: int) -> list[Contender]:
        return [
            Contender(path, name, caller(path, name, optimizers[:count], device), around=restored)
            for path, name in sides
        ]

    timed = time_contenders(
        *("clip", case, dtype, contenders(count), on),
        lists=count,
        alone=contenders(1),
        replaces={DEFERRED_CLIP: CLIP},
    )
    for now, before in zip(lists[0], first, strict=False):
        torch.testing.assert_close(now, before, rtol=DRIFT, atol=0)
    size = case.list_bytes(dtype)
    rows = [replace(row, bytes=PASSES[row.call] * size) for row in timed.rows()]
    return Measured(rows, notes)


def caller(
    path: str, name: str, optimizers: Sequence[NoOptimizer], device: torch.device
) -> Callable[[int], Tensor]:
    """Calls for optimizers in turn, dropping the previous record, as there is no update."""
    scaler = make_scaler(name, device, SCALE)
    parameters = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    limits = [exact_norm([p.grad for p in of]) for of in parameters]

    def call(number: int) -> Tensor:
        scaler._per_optimizer_states.clear()
        turn = number % len(optimizers)
        if name != "torch":
            return scaler.clip_grad_norm_(optimizers[turn], limits[turn], in_place=path == CLIP)
        scaler.unscale_(optimizers[turn])
        return torch.nn.utils.clip_grad_norm_(parameters[turn], limits[turn])

    return call


def assert_parity(case: GradCase, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Compares norms and gradients with torch's, within the error of torch's own norm."""
    oracle = device if providers.torch_takes(dtype, device) else torch.device("cpu")
    gradients = make_gradients(case, dtype, device)
    exact = exact_norm(gradients) / SCALE
    limit = exact / 3
    theirs = [gradient.to(oracle, copy=True) for gradient in gradients]
    optimizer = optimizer_over(theirs, fused=False)
    make_scaler("torch", oracle, SCALE).unscale_(optimizer)
    parameters = optimizer.param_groups[0]["params"]
    torchs = torch.nn.utils.clip_grad_norm_(parameters, limit).item()
    # torch rounds 16-bit norms to 16 bit.
    error = abs(torchs - exact) / exact
    what = f"clip by {name}, {case.name} {dtype_name(dtype)}"
    for path in PASSES:
        ours = [gradient.clone() for gradient in gradients]
        optimizer, scaler = optimizer_over(ours, fused=True), make_scaler(name, device, SCALE)
        norm = scaler.clip_grad_norm_(optimizer, limit, in_place=path == CLIP)
        if abs(norm.item() - exact) > 1e-6 * exact:
            raise AssertionError(f"{what}: the norm is {norm.item()}, not {exact}")
        if path == DEFERRED_CLIP:
            assert_same(ours, gradients, f"gradients of {what}, which are only read")
            divisor = scaler._per_optimizer_states[id(optimizer)].divisor.item()
            if abs(divisor - 3 * SCALE) > 1e-5:
                raise AssertionError(f"{what}: the divisor is {divisor}, not {3 * SCALE}")
            continue
        tolerance = error + 4 * torch.finfo(dtype).eps + ORDER_OF_SUMS
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their.to(device), rtol=tolerance, atol=0)
