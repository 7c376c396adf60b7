"""Kernels on the CPU, in the compiled core."""

from __future__ import annotations

from torch import Tensor

from ampfast.backends.core import Clip, GradList, compiled

# Over the gradients of an optimizer at once, as in _C.pyi.
pass_over = compiled.pass_over
clip_over = compiled.clip_over
# Runs a pass over a list; returns its found_inf.
run = compiled.run
# Writes the next scale and growth tracker in place, and records the step in the state. None, with
# nothing written, if the kernels do not know the tensors or numbers exactly.
update = compiled.update


def measure(grads: GradList, health: Tensor) -> None:
    """Adds the range of each gradient's values to the row of its parameter; reads only.

    Args:
        grads: Gradients before they are unscaled.
        health: Zeroed int64 of shape (P, HEALTH_WORDS), for P parameters on that device.
    """
    compiled.measure(grads, health)


def narrow(pairs: GradList, found_inf: Tensor | None = None) -> None:
    """Rounds float32 values to the 16-bit tensors that they are paired with, to nearest even.

    Args:
        pairs: A list of nothing but pairs (`GradList.of`).
        found_inf: One-element float32; where it is not 0, nothing is written.
    """
    compiled.narrow(pairs, found_inf)


def clip(clip: Clip) -> None:
    """Writes norm, clip coefficient and divisor, and the flag of a spike.

    Formula: torch.nn.utils.clip_grad_norm_, here in float64.
    """
    compiled.clip(clip)
