"""What a scaler takes from a checkpoint, and what it refuses before it loads anything."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ampfast.clip.norm_history import Saved, require_norms
from ampfast.errors import require_int, warn_caller
from ampfast.scaler.loss_scale import Limits

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
# Of the error for what is no checkpoint of a scaler.
EXPECTED = f"expected what a scaler's state_dict() returns, a dict of {', '.join(_KEYS)}; got "


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
    rule = state_dict["growth_interval"], state_dict["backoff_factor"]
    scale, is_static = state_dict["scale"], rule == (0, 1.0)
    if not dynamic and (not is_static or (is_guard and scale != 1)):
        own = "is always 1" if is_guard else "never changes"
        raise ValueError(
            f"this scaler's scale {own}, but the checkpoint is of a scaler whose scale is {scale}"
            f"{'' if is_static else ' and changes'}: load it into a scaler that was made as that "
            "one was, or begin with this one as it is"
        )
    entry, settings, tolerated = state_dict.get("ampfast", {}), asdict(limits), 0
    names = {*settings, "hysteresis_tracker"}
    if not isinstance(entry, dict) or set(entry) - {"norms"} not in (set(), names):
        raise ValueError(
            f"the checkpoint's 'ampfast' entry must be a dict of {', '.join(sorted(names))} "
            f"and perhaps norms, got {entry!r}"
        )
    if "hysteresis_tracker" in entry:
        there = {name: entry[name] for name in settings}
        if there != settings:
            raise ValueError(
                f"the checkpoint is of a scaler with other settings ({there} there, {settings} "
                "here): construct the scaler with the checkpoint's, or delete the checkpoint's "
                "entry 'ampfast' to keep this scaler's"
            )
        tracker: Any = entry["hysteresis_tracker"]
        require_int("the checkpoint's hysteresis_tracker", tracker, 1 - 2**31, limits.hysteresis)
        tolerated = limits.hysteresis - tracker
    norms = require_norms(entry.get("norms", []))
    # A static scaler has an interval of 0.
    if "ampfast" in state_dict and is_static and interval > 0:
        warn_caller(
            "This checkpoint is of a scaler whose scale never changes, such as a StepGuard: from "
            f"now on this scaler's stays {scale}. To go on with a scale that grows and backs off, "
            "do not load it."
        )
    return tolerated, norms
