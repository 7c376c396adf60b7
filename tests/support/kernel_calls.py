"""Passes of a backend's kernels over a list of gradients, a call for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampfast.backends import core
from ampfast.backends.core import Factor, GradList, Pass, Track


def grads_of(
    tensors: Sequence[torch.Tensor], floats: Sequence[torch.Tensor | None] | None = None
) -> GradList:
    """The list that kernels take."""
    device = tensors[0].device if tensors else torch.device("cpu")
    grads = core.list_of(list(tensors), device, None, floats)
    assert grads is not None, "a tensor is irregular"
    return grads


def run_check(
    kernels: Any, grads: GradList, divisor: torch.Tensor | None = None, **more: Any
) -> torch.Tensor:
    """Checks gradients as they are, or their quotients; returns found_inf."""
    how = Factor.NONE if divisor is None else Factor.DIVIDE
    return kernels.run(grads, _pass(False, how, divisor, **more))


def run_unscale(
    kernels: Any, grads: GradList, factor: torch.Tensor, *, is_scale: bool, **more: Any
) -> torch.Tensor:
    """Multiplies gradients by a factor, or by the reciprocal of a scale; returns found_inf."""
    return kernels.run(grads, _pass(True, _how(is_scale), factor, **more))


def run_sums(
    kernels: Any,
    grads: GradList,
    factor: torch.Tensor,
    *,
    is_scale: bool,
    sums: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """Writes the sums of the products alone; returns found_inf."""
    return kernels.run(grads, _pass(False, _how(is_scale), factor, sums=sums, **more))


def _how(is_scale: bool) -> Factor:
    return Factor.TIMES_RECIPROCAL if is_scale else Factor.TIMES


def _pass(
    write: bool,
    how: Factor,
    factor: torch.Tensor | None,
    *,
    track: Track | None = None,
    **more: Any,
) -> Pass:
    if track is not None:
        more |= {"marks": track.marks, "now": track.now}
    return Pass(write, how, factor, **more)
