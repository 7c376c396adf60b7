"""The steps of scalers as lines of JSON, for `python -m ampfast run --log`."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from ampfast.backends.core import state_layout
from ampfast.scaler.history import History

# Seconds between two reads of the scalers' histories, unless these would forget steps before.
_PERIOD = 1.0
_MOST_STEPS = state_layout.RING_STEPS // 2
# The entries of a line, in this order.
_NAMES = ("scaler", "step", "scale", "skipped", "grad_norm")


def is_step_log(path: str) -> bool:
    """Whether a file is empty or begins with a line as `StepLog` writes it."""
    with open(path, "rb") as file:
        first = file.readline(1000)
    return not first or re.match(rb'{"scaler": \d+, "step": \d+, "scale": ', first) is not None


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
        # Each scaler, by its id, and the number of its steps that are in the file.
        self._scalers: dict[int, tuple[Any, int]] = {}
        self._updates, self._read_at = 0, time.monotonic()

    def see(self, scaler: Any) -> None:
        """Writes all steps if a second has passed, or after many updates.

        Args:
            scaler: An `ampfast.GradScaler` that has updated.
        """
        self._scalers.setdefault(id(scaler), (scaler, 0))
        self._updates += 1
        if time.monotonic() - self._read_at >= _PERIOD or self._updates >= _MOST_STEPS:
            self.write()
            self._updates, self._read_at = 0, time.monotonic()

    def write(self) -> None:
        """Writes the steps that are not in the file yet, with one host sync for each scaler."""
        if self._path is None:
            return
        lines = []
        for number, (key, (scaler, written)) in enumerate(self._scalers.items(), start=1):
            history: History = scaler.history()
            rows = _rows(number, history, written)
            lines += [json.dumps(dict(zip(_NAMES, row, strict=True))) + "\n" for row in rows]
            self._scalers[key] = scaler, int(history.step[-1]) + 1 if len(history) else 0
        try:
            with self._path.open("a") as file:
                file.writelines(lines)
        except OSError as error:
            self._path = None
            print(f"ampfast: the log ends, the training continues: {error}", file=sys.stderr)


def _rows(number: int, history: History, written: int) -> list[tuple[Any, ...]]:
    columns: list[Tensor] = [history.step, history.scale, history.skipped, history.spiked]
    found = zip(*(each.tolist() for each in [*columns, history.grad_norm]), strict=True)
    return [
        (
            *(number, step, scale, "spike" if spiked else "nonfinite" if skipped else None),
            norm if math.isfinite(norm) else None,
        )
        for step, scale, skipped, spiked, norm in found
        if step >= written
    ]
