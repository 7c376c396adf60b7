"""What a scaler takes from a checkpoint, and what it refuses before it loads anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ampfast.clip.norm_history import Saved, require_norms
from ampfast.errors import add_note, warn_caller
from ampfast.scaler.loss_scale import Limits

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def require_loadable(
    state_dict: dict[str, Any], limits: Limits, dynamic: bool, is_guard: bool, interval: int
) -> tuple[int, list[Saved]]:
    """Returns the overflows since growth was last due, and the norms, of a scaler's checkpoint.

    Warns if it makes a scale static that changes, by its growth interval.

    Args:
        state_dict: The checkpoint.
        limits: Limits and hysteresis of the scaler.
        dynamic: Whether its scale may change.
        is_guard: Whether its scale is always 1.
        interval: Its growth interval.

    Raises:
        KeyError: If it is no checkpoint of a scaler.
        ValueError: If the checkpoint is damaged or of another kind of scaler.
    """
    for key in _KEYS:
        if not hasattr(value := state_dict[key], "__float__"):
            raise ValueError(f"the checkpoint's {key!r} must be a number, got {value!r}")
    if not dynamic:
        _require_static(state_dict, is_guard=is_guard)
    if not limits.is_torchs and _is_static(state_dict):
        raise ValueError(
            "the checkpoint's scale is static, but this scaler has limits or hysteresis, which "
            "need a dynamic one"
        )
    entry, tolerated = _entry_of(state_dict), 0
    if not isinstance(entry, dict) or not set(entry) <= {"norms"}:
        tolerated = limits.hysteresis - limits.require_loadable(entry)
    norms = require_norms(entry.get("norms", []))
    # A static scaler has an interval of 0.
    if "ampfast" in state_dict and _is_static(state_dict) and interval > 0:
        warn_caller(
            "This checkpoint is of a scaler whose scale never changes, such as a StepGuard: from "
            f"now on this scaler's stays {state_dict.get('scale')}. To go on with a scale that "
            "grows and backs off, do not load it."
        )
    return tolerated, norms


def _entry_of(state_dict: dict[str, Any]) -> Any:
    """The entry of ours in a scaler's checkpoint; without one that of a scaler by torch's rule."""
    if "ampfast" not in state_dict:
        return {"norms": []}
    return state_dict["ampfast"]


def _is_static(state_dict: dict[str, Any]) -> bool:
    """Whether a scaler's checkpoint has a static scale."""
    return state_dict.get("growth_interval") == 0 and state_dict.get("backoff_factor") == 1.0


@contextmanager
def explained(state_dict: object) -> Iterator[None]:
    """Adds a note to the error for what is no scaler's checkpoint."""
    try:
        yield
    except (KeyError, TypeError) as error:
        if not isinstance(state_dict, dict):
            told = f"got {type(state_dict).__name__}"
        elif isinstance(error, TypeError):
            raise
        elif "scale" in state_dict:
            missing = [key for key in _KEYS if key not in state_dict]
            told = f"this one has no {', '.join(missing)}"
        else:
            there = ", ".join(map(str, [*state_dict][:3]))
            told = f"this one begins with {there}: is it of a model, or a whole checkpoint?"
        add_note(
            error,
            f"expected what a scaler's state_dict() returns, a dict of {', '.join(_KEYS)}; {told}",
        )
        raise


def _require_static(state_dict: dict[str, Any], *, is_guard: bool) -> None:
    """Checks a checkpoint for a scaler with `dynamic=False`; that of a guard is always 1.

    Raises:
        ValueError: If its scale changes, or is another one.
    """
    scale, is_fixed = state_dict["scale"], _is_static(state_dict)
    if is_guard and not (is_fixed and scale == 1):
        raise ValueError(
            "a guard's scale is always 1, but this is the checkpoint of a scaler whose scale is "
            f"{scale}{'' if is_fixed else ' and changes'}, as for float16: load it "
            "into a GradScaler, or begin with the guard as it is"
        )
    if not is_fixed:
        raise ValueError(
            "this scaler was made with dynamic=False, but the checkpoint's scale changes: "
            f"growth_interval {state_dict['growth_interval']}, backoff_factor "
            f"{state_dict['backoff_factor']}"
        )
