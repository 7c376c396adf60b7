"""Requests to end the process, by Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["Request", "requests_to_end"]


class Request:
    """Whether the process was asked to end; stays true.

    Python drops exceptions in some places, such as callbacks of weak references. So the
    KeyboardInterrupt that ends a part at once is not enough: `check` raises it again between parts.
    """

    def __init__(self) -> None:
        self._came = False
        self._is_held = False

    def hold(self) -> None:
        """Delays requests until `check`, for writing files whole."""
        self._is_held = True

    def check(self) -> None:
        if self._came:
            raise KeyboardInterrupt

    def arrive(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if not self._is_held:
            raise KeyboardInterrupt


@contextlib.contextmanager
def requests_to_end() -> Iterator[Request]:
    """Context in which both signals raise KeyboardInterrupts that cannot be lost."""
    request = Request()
    before = {
        number: signal.signal(number, request.arrive) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
