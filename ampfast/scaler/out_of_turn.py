"""torch's errors for calls that come out of turn, with notes."""

from __future__ import annotations

from typing import Any

from ampfast.errors import add_note
from ampfast.gradients import READY, UNSCALED

_ONCE = "An iteration ends with update(), after the steps of all optimizers: is the call missing?"


def require_ready(turn: dict[str, Any], note: str) -> None:
    """Raises the error of torch's `unscale_` for an optimizer that is past its turn."""
    if turn["stage"] is READY:
        return
    text, why = "unscale_() is being called after step().", _ONCE
    if turn["stage"] is UNSCALED:
        text = "unscale_() has already been called on this optimizer since the last update()."
        why = (
            "Gradients are unscaled once, between the last backward() and step(): where they "
            "accumulate over several backward(), not after each. update() ends the iteration."
        )
    raise add_note(RuntimeError(text), f"{note} {why}")


def stepped(text: str) -> RuntimeError:
    """Returns an error for an optimizer that has stepped."""
    return add_note(RuntimeError(text), _ONCE)


def nothing_checked() -> AssertionError:
    """Returns the error of torch's `update` for an iteration without a check."""
    return add_note(
        AssertionError("No inf checks were recorded prior to update."),
        "Neither step() nor unscale_() found a gradient since the last update().",
    )
