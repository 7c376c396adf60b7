"""An optimizer's turn in an iteration: its stage, its flags, and what its step still needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampfast.backends.scalars import allocate
from ampfast.errors import add_note

if TYPE_CHECKING:
    from ampfast.backends.gpu import Ending
    from ampfast.distributed import Agreement

# torch's own class, before patch() gives its name to another.
TorchGradScaler = torch.amp.GradScaler

Flags = dict[Any, Tensor]

ONCE = "An iteration ends with update(), after the steps of all optimizers: is the call missing?"

# Cold, reading an enum's member from its class would cost as much as all other lines of `step`.
READY, UNSCALED, STEPPED = OptState


class Turn(dict[str, Any]):
    """An optimizer's entry in `_per_optimizer_states`, with torch's two keys.

    Attributes:
        last_flags: The flags of the optimizer's last check in an earlier iteration, by device.
        agreement: What the ranks still have to agree on these flags by, or None.
        divisor: The `grad_scale` by which the optimizer clips in its step: 0-dim float32, the
            scale over the clip coefficient; or None.
        ending: The update of the scale that the last check of the iteration does, too, or None.
        is_measured: Whether the norm of a fused step's gradients was recorded, before it raised.
        is_late: Whether a backward has written gradients since they were unscaled.
    """

    # Not set by a constructor, which would be a cold Python frame.
    last_flags: Flags | None = None
    agreement: Agreement | None = None
    divisor: Tensor | None = None
    ending: Ending | None = None
    is_measured = False
    is_late = False


def new_turn() -> Turn:
    """Returns the turn of an optimizer that did nothing yet."""
    return Turn(stage=READY, found_inf_per_device={})


# For optimizers without a turn, to be read only.
NO_TURN = new_turn()


def begin(turns: list[Turn], agreement: Agreement | None = None) -> None:
    """Marks optimizers as unscaled before their gradients are written.

    Until the pass is over their flag says "skip", on all ranks if there is an `agreement` yet to
    come: whatever ends that pass early, neither a retry nor a step takes gradients that are half
    written. A clip agrees before, so its interrupt is this rank's alone.
    """
    flags = [allocate(torch.ones, (), dtype=torch.float32, device="cpu") for _ in turns]
    for turn, flag in zip(turns, flags, strict=True):
        if agreement is not None:
            turn.agreement = agreement
        turn["found_inf_per_device"] = {flag.device: flag}
        turn["stage"] = UNSCALED


def is_unscaled(turn: dict[str, Any]) -> bool:
    """Whether a turn's gradients are no longer scaled, as with a deferred clip they are."""
    return turn["stage"] is UNSCALED and getattr(turn, "divisor", None) is None


def not_ready(turn: dict[str, Any], note: str) -> RuntimeError:
    """Returns the error of torch's `unscale_` for an optimizer that is past its turn."""
    text, why = "unscale_() is being called after step().", ONCE
    if turn["stage"] is UNSCALED:
        text = "unscale_() has already been called on this optimizer since the last update()."
        why = (
            "Gradients are unscaled once, between the last backward() and step(): where they "
            "accumulate over several backward(), not after each. update() ends the iteration."
        )
    return add_note(RuntimeError(text), f"{note} {why}")


def nothing_checked() -> AssertionError:
    """Returns the error of torch's `update` for an iteration without a check."""
    return add_note(
        AssertionError("No inf checks were recorded prior to update."),
        "Neither step() nor unscale_() found a gradient since the last update().",
    )
