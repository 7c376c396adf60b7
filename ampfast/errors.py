"""Notes on torch's errors, warnings at the caller's line, checks of arguments."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar, cast

import torch

# Modules and packages skipped by `warn_caller`; the last two are around torch's deprecated classes.
_SKIPPED = (
    *("ampfast.", "torch.amp.grad_scaler.", "torch._compile.", "torch._dynamo."),
    *("typing_extensions.", "warnings."),
)

AnyError = TypeVar("AnyError", bound=BaseException)
Method = TypeVar("Method", bound=Callable[..., Any])


def add_note(error: AnyError, note: str) -> AnyError:
    """Adds `note` to `error` and returns it; Python 3.10 keeps it but does not print it."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]
    return error


def float_of(name: str, value: object, others: str = "", least: int | None = None) -> float:
    """Returns a real number as a float, infinite where it is too large for one.

    Raises:
        TypeError: If it is no real Python number, naming it and what `others` are allowed.
        ValueError: If it is NaN or below the `least` that is allowed.
    """
    # isinstance with the abstract class runs Python code.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name} must be a Python number{others}, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if cast(Any, value) > 0 else -math.inf
    if least is not None and not number >= least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def require_int(name: str, value: object, least: int, most: int) -> None:
    """Raises TypeError unless a value is an int, and ValueError if it is out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {value}")


def refuse_differentiable(groups: list[dict[str, Any]], what_does: str) -> None:
    """Raises ValueError for differentiable groups, which what is named does not support."""
    for index, group in enumerate(groups):
        if group.get("differentiable"):
            raise ValueError(
                f"group {index} has differentiable=True, which {what_does} not support"
            )


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the first line outside of ampfast and of torch's scaler modules."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith(_SKIPPED):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def not_compiled(method: Method) -> Method:
    """Keeps torch.compile out of a method and of what it calls.

    As `torch.compiler.disable` does, but by a flag of the code: a wrapper would cost each call
    several Python frames.
    """
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        frames.set_code_exec_strategy(cast(Any, method).__code__, strategy)
    except AttributeError:  # another torch
        return cast(Method, torch._disable_dynamo(method, recursive=True))  # type: ignore[attr-defined]
    for name in ("_torchdynamo_disable", "_torchdynamo_disable_recursive"):
        setattr(method, name, True)
    return method
