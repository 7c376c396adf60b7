"""Backwards that write gradients which are unscaled already, as in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampfast.backends.core import divides_by
from ampfast.errors import warn_caller
from ampfast.gradients import READY, UNSCALED, Turn, grads_of

WARNING = (
    "a backward() has written gradients of this {} since unscale_() or clip_grad_norm_() or, as of "
    "a closure, within step(): they were neither unscaled nor checked, perhaps too large by the "
    "factor of the scale. Call unscale_() after the last backward(), update() at the end of every "
    "iteration, as of a notebook's cell that was stopped before it, and step() without a closure; "
    "train L-BFGS, which needs one, without a scaler"
)


def compared(scaled: Any, turns: list[tuple[Any, Turn]]) -> Any:
    """Marks the turns of optimizers whose gradients a backward of `scaled` will write as late.

    Comparing gradients before and after the backward tells it from a clip, which writes them, too.

    Args:
        scaled: What `scale` returns.
        turns: Optimizers and their turns. Unscaled ones are marked at the end of the
            backward.

    Returns:
        `scaled`, or what replaces an iterator.
    """
    watched = [pair for pair in turns if pair[1]["stage"] is UNSCALED]

    def compare_after(_: Tensor) -> None:
        before = [_versions(optimizer) for optimizer, _ in watched]

        def compare() -> None:
            for (optimizer, turn), versions in zip(watched, before, strict=True):
                if _versions(optimizer) != versions:
                    turn.is_late = True

        torch.autograd.Variable._execution_engine.queue_callback(compare)

    def hook(each: Tensor) -> None:
        if each.requires_grad:
            each.register_hook(compare_after)

    return visited(scaled, hook) if watched else scaled


def warn(scaler: Any, optimizer: object, turn: Turn) -> None:
    """Warns once of a backward that came late, where the step still takes the gradients."""
    # Without flags the step of a plain optimizer raises; one whose stage a caller has set back
    # unscales again.
    if turn["stage"] is READY or scaler._warned_of_backward:
        return
    if turn["found_inf_per_device"] or divides_by(scaler._records, optimizer):
        scaler._warned_of_backward = True
        warn_caller(WARNING.format(type(optimizer).__name__))


def visited(outputs: Any, visit: Callable[[Tensor], None]) -> Any:
    """Visits the tensors that `scale` takes or returns.

    Returns:
        `outputs`, or what replaces an iterator, whose tensors are visited as it is used.
    """
    if isinstance(outputs, Tensor):
        visit(outputs)
    elif isinstance(outputs, (list, tuple)):
        for each in outputs:
            visited(each, visit)
    elif isinstance(outputs, Iterable):
        return map(partial(visited, visit=visit), outputs)
    return outputs


def _versions(optimizer: Any) -> list[tuple[int, int]]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [(id(g), 0 if g.is_inference() else g._version) for g in grads_of(params)]
