"""A line in Python's logger "ampfast" for each skipped step, without a wait of the host."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor

from ampfast.backends import scalars
from ampfast.backends.core import state_layout as layout
from ampfast.backends.cuda_graphs import is_capturing
from ampfast.clip.norm_history import Sigmas, sigmas_limit
from ampfast.diagnose.overflow_report import OverflowReport
from ampfast.scaler.history import History
from ampfast.scaler.loss_scale import history_of

_logger = logging.getLogger("ampfast")
# Steps from one copy of a GPU's state to the next.
_EVERY = 16
# Lines that are written at once, and steps from one line to the next after them.
_AT_ONCE, _SPACING = 10, 100


class SkipLog:
    """Lines about skipped steps: INFO for a scaler's overflows, WARNING for spikes and for a guard.

    The state comes by copies that nothing waits for, so a line is some steps late on a GPU. Nothing
    is read where the logger is not enabled, nor on ranks other than 0.

    Attributes:
        due: Number of updates until the host looks.
        rule: Limit of the norm of the last clip, if any.
        first: Number of the scaler's first step, in the count of a trainer.
    """

    def __init__(self) -> None:
        self.rule: float | Sigmas | None = None
        self.first = 0
        self._lines, self._last = 0, 0
        self._next: int | None = 0
        self.restart()

    def restart(self) -> None:
        """Forgets copies on their way to the host."""
        self.due, self._copies, self._skipped = 1, scalars.HostCopies(), 0
        # A state on the CPU, and its count of skipped steps: one number for an iteration to read.
        self._here: tuple[Tensor | None, Any] = None, None

    def see(self, words: Tensor, scaler: Any) -> None:
        """Writes the lines of the steps since, as far as the host knows.

        Args:
            words: State of the scaler.
            scaler: The scaler.
        """
        known, count = self._here
        if known is words and count.tolist() == self._skipped:
            self.due = 1
            return
        warns = scaler._is_guard or self._limit_of(scaler) is not None
        is_off = not _logger.isEnabledFor(logging.WARNING if warns else logging.INFO)
        is_other_rank = dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
        if is_off or is_capturing() or isinstance(words, FakeTensor) or is_other_rank:
            self.due, self._next = _SPACING, None
            return
        self.due = 1 if words.is_cpu else _EVERY
        if words.is_cpu:
            self._here = words, words[layout.SKIPPED]
        copied = self._copies.latest(words)
        if copied is None:
            return
        first, self._next = self._next, copied[layout.STEPS]
        before, self._skipped = self._skipped, copied[layout.SKIPPED]
        if first is not None and self._skipped != before:
            state = scalars.allocate(torch.tensor, copied, dtype=torch.int64, device="cpu")
            self._write(history_of(state), first, scaler, is_here=words.is_cpu)

    def _write(self, history: History, first: int, scaler: Any, *, is_here: bool) -> None:
        for place, step in enumerate(history.step.tolist()):
            spiked = bool(history.spiked[place])
            level = logging.WARNING if spiked or scaler._is_guard else logging.INFO
            is_new = step >= first and history.skipped[place] and _logger.isEnabledFor(level)
            if not is_new or (self._lines >= _AT_ONCE and step < self._last + _SPACING):
                continue
            self._lines, self._last = self._lines + 1, step
            why = "inf or NaN in its gradients"
            if spiked:
                why = self._spike(history, place, scaler)
            report = scaler._report_or_reason() if is_here and not spiked else None
            if isinstance(report, OverflowReport) and report.step == step:
                why += f": {', '.join(str(each.name) for each in report.parameters[:3])}"
            if not scaler._is_guard:
                why += f"; the scale was {history.scale[place]:g}"
            _logger.log(level, "step %d was skipped: %s", self.first + step, why)

    def _limit_of(self, scaler: Any) -> Any:
        return self.rule if scaler._skip_above is None else scaler._skip_above

    def _spike(self, history: History, place: int, scaler: Any) -> str:
        norm, limit = float(history.grad_norm[place]), self._limit_of(scaler)
        if isinstance(limit, Sigmas):
            norms = history.grad_norm[:place][~history.skipped[:place]]
            norms = norms[norms.isfinite() & (norms > 0)][-limit.window :]
            limit = sigmas_limit(limit, norms.tolist())
        # After a restart of the window its norms were others.
        above = "" if limit is None or limit >= norm else f", above the limit {limit:.4g}"
        return f"a spike, its gradient norm is {norm:.4g}{above}"
