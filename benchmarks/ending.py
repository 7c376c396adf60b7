"""Being told to end, by Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["Request", "requests_to_end"]


class Request:
    """Whether somebody has asked this process to end; it stays true.

    Python drops what is raised in some places, such as in the callback of a weak reference. So the
    KeyboardInterrupt that ends a part at once is not enough: `check` raises it again between parts.
    """

    def __init__(self) -> None:
        self._came = False
        self._is_held = False

    def hold(self) -> None:
        """From now on requests wait for `check`: what is being written then is written whole."""
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
    """Turns both signals into KeyboardInterrupts that cannot be lost, inside a with statement."""
    request = Request()
    before = {
        number: signal.signal(number, request.arrive) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
