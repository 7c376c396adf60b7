"""What ampfast says beside torch's own texts: notes on errors, warnings at the caller's line."""

import sys
import warnings
from typing import TypeVar

__all__ = ["ONCE", "add_note", "warn_caller"]

ONCE = "An iteration ends with update(), after the steps of all optimizers: is the call missing?"

AnyError = TypeVar("AnyError", bound=BaseException)


def add_note(error: AnyError, note: str) -> AnyError:
    """Adds `note` to `error` and returns it; Python 3.10 keeps it but does not print it."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
    return error


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the first line outside of the scaler, torch's included."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_inside(module: str) -> bool:
    return module in _SCALER_MODULES or module.startswith("torch._dynamo.")


_SCALER_MODULES = (
    *("ampfast.grad_scaler", "ampfast.stepping", "ampfast.gradient_checker"),
    *("ampfast.scale_keeper", "ampfast.scale_state", "ampfast.gradients", "ampfast.tracking"),
    *("ampfast.clipping", "ampfast.norms", "ampfast.functional"),
    *("ampfast.distributed", "ampfast.layouts", "ampfast.sharded", "ampfast.patching.old_names"),
    *("torch.amp.grad_scaler", "torch._compile"),
    # Around torch's deprecated classes.
    *("typing_extensions", "warnings"),
)
