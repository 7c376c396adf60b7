"""torch's errors for calls that come out of turn, with notes, and errors of arguments."""

from __future__ import annotations

from numbers import Number
from typing import Any

from torch.cuda.amp.common import amp_definitely_not_available

from ampfast.errors import add_note, warn_caller
from ampfast.gradients import UNSCALED

# Of torch's error for a scaler that has scaled nothing.
NOTHING_SCALED = (
    "The scaler whose scale() was given the loss must unscale, clip, step and update, too. "
    "Gradients that need no scale: see ampfast.StepGuard, or enabled=False."
)
ZERO_SCALE = (
    "The scale is 0 and cannot recover: every step will be skipped. Set it with "
    "update(new_scale), and look for NaN in the model or its input."
)

_ONCE = (
    "An iteration unscales and steps each optimizer once, in this order, and ends with update(): "
    "is update() missing, or a call there twice?"
)


def past_its_turn(turn: dict[str, Any], optimizer: object) -> RuntimeError:
    """Returns the error of torch's `unscale_` for an optimizer that was unscaled or stepped."""
    text, why = "unscale_() is being called after step().", _ONCE
    if turn["stage"] is UNSCALED:
        text = "unscale_() has already been called on this optimizer since the last update()."
        why = (
            "Gradients are unscaled once, between the last backward() and step(): where they "
            "accumulate over several backward(), not after each. update() ends the iteration. "
            "scaler.clip_grad_norm_() of ampfast unscales, too: call it in place of unscale_()."
        )
    return add_note(RuntimeError(text), f"The optimizer: {type(optimizer).__name__}. {why}")


def stepped(text: str) -> RuntimeError:
    """Returns an error for an optimizer that has stepped."""
    return add_note(RuntimeError(text), _ONCE)


def nothing_checked() -> AssertionError:
    """Returns the error of torch's `update` for an iteration without a check."""
    return add_note(
        AssertionError("No inf checks were recorded prior to update."),
        "Neither step() nor unscale_() found a gradient since the last update().",
    )


def is_available(device: str) -> bool:
    """Whether the device of an enabled scaler is; warns, as torch's, if there is no CUDA.

    torch's warning would point into this package instead of at the caller.
    """
    if device != "cuda" or not amp_definitely_not_available():
        return True
    warn_caller("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.")
    return False


def require_flags(device: object, **flags: object) -> None:
    """Raises TypeError for a device that is a number, or a flag that is no bool."""
    if isinstance(device, Number):
        raise TypeError(
            f"device must be a device type such as 'cuda', got the number {device!r}; write "
            f"init_scale={device!r}, or use ampfast.patch(), under which "
            "torch.cuda.amp.GradScaler takes it first"
        )
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
