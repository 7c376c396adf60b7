"""The steps of scalers as lines of JSON, for `python -m ampfast run --log`."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from ampfast.backends.core import state_layout
from ampfast.scaler.history import History

# Seconds between two reads of a scaler's history, unless it would forget steps before.
_PERIOD = 1.0
_MOST_STEPS = state_layout.RING_STEPS // 2
# What a line has, in this order.
_NAMES = ("scaler", "step", "scale", "skipped", "grad_norm")


def is_step_log(path: str) -> bool:
    """Whether a file is empty or begins with a line as `StepLog` writes it."""
    with open(path, "rb") as file:
        first = file.readline(1000)
    try:
        found = json.loads(first or "{}")
    except ValueError:
        return False
    return isinstance(found, dict) and tuple(found) == _NAMES[: len(_NAMES) if first else 0]


class _Steps:
    """What was written of one scaler.

    Attributes:
        number: Its number in the file.
        steps: Number of steps that are in the file.
        updates: Number of updates at the last read.
        read_at: Time of the last read, in seconds.
    """

    def __init__(self, number: int) -> None:
        self.number, self.steps, self.updates, self.read_at = number, 0, 0, time.monotonic()


class StepLog:
    """A file with one line of JSON for each step of each scaler.

    A line has "scaler" (its number, from 1), "step" (from 0), "scale" (of the step), "skipped"
    (null, "nonfinite" or "spike") and "grad_norm" (null if none was taken, or not finite).

    Where the file cannot be written any more, the log ends with a line on standard error, and the
    training continues.

    Args:
        path: The file; an earlier one is overwritten.
    """

    def __init__(self, path: str) -> None:
        self._path: Path | None = Path(path).resolve()
        self._path.write_text("")
        self._scalers: dict[int, _Steps] = {}

    def see(self, scaler: Any, updates: int) -> None:
        """Writes the steps of a scaler if a second has passed, or many updates.

        Args:
            scaler: An `ampfast.GradScaler`.
            updates: Number of its updates up to now.
        """
        seen = self._seen_of(scaler)
        is_due = time.monotonic() - seen.read_at >= _PERIOD
        if is_due or updates - seen.updates >= _MOST_STEPS:
            self.write(scaler)
            seen.updates, seen.read_at = updates, time.monotonic()

    def _seen_of(self, scaler: Any) -> _Steps:
        seen = self._scalers.get(id(scaler))
        if seen is None:
            seen = self._scalers[id(scaler)] = _Steps(len(self._scalers) + 1)
        return seen

    def write(self, scaler: Any) -> None:
        """Writes the steps of a scaler that are not in the file yet, with one host sync."""
        if self._path is None:
            return
        seen = self._seen_of(scaler)
        history: History = scaler.history()
        columns: list[Tensor] = [history.step, history.scale, history.skipped, history.spiked]
        rows = zip(*(each.tolist() for each in [*columns, history.grad_norm]), strict=True)
        lines = []
        for step, scale, skipped, spiked, norm in rows:
            if step >= seen.steps:
                reason = "spike" if spiked else "nonfinite" if skipped else None
                values = seen.number, step, scale, reason, norm if math.isfinite(norm) else None
                lines.append(json.dumps(dict(zip(_NAMES, values, strict=True))) + "\n")
        seen.steps = int(history.step[-1]) + 1 if len(history) else 0
        try:
            with self._path.open("a") as file:
                file.writelines(lines)
        except OSError as error:
            self._path = None
            print(f"ampfast: the log ends, the training continues: {error}", file=sys.stderr)
