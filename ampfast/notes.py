"""Notes on exceptions: what ampfast adds to errors whose text is torch's."""

from typing import TypeVar

__all__ = ["add_note"]

AnyError = TypeVar("AnyError", bound=BaseException)


def add_note(error: AnyError, note: str) -> AnyError:
    """Adds `note` to `error` and returns it; Python 3.10 keeps it but does not print it."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
    return error
