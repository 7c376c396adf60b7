"""What follows from skipped steps: a line in the log, a warning of many in a row, an end."""

from __future__ import annotations

import logging
import math
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
from ampfast.errors import require_int, warn_caller
from ampfast.scaler.loss_scale import History, ScalerStats, history_of

_logger = logging.getLogger("ampfast")
# Steps from one copy of a GPU's state to the next.
_EVERY = 16
# Lines that are written at once, and steps from one line to the next after them.
_AT_ONCE, _SPACING = 10, 100
# Steps skipped in a row of which it warns.
_WARNED_AT = 100


class SkipLog:
    """A line in the logger "ampfast" for each skipped step: INFO for a scaler's overflows.

    WARNING for spikes and for a guard. The state comes by copies that nothing waits for, so a line
    is some steps late on a GPU. Nothing is read where the logger is not enabled, nor on ranks other
    than 0.

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
        warns = scaler._is_guard or self.limit_of(scaler) is not None
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

    def limit_of(self, scaler: Any) -> float | Sigmas | None:
        """Returns the limit of the norms of a scaler's steps."""
        default: float | Sigmas | None = scaler._skip_above
        return self.rule if default is None else default

    def _spike(self, history: History, place: int, scaler: Any) -> str:
        norm, limit = float(history.grad_norm[place]), self.limit_of(scaler)
        if isinstance(limit, Sigmas):
            norms = history.grad_norm[:place][~history.skipped[:place]]
            norms = norms[norms.isfinite() & (norms > 0)][-limit.window :]
            limit = sigmas_limit(limit, norms.tolist())
        # After a restart of the window its norms were others.
        above = "" if limit is None or limit >= norm else f", above the limit {limit:.4g}"
        return f"a spike, its gradient norm is {norm:.4g}{above}"


class SkipWatch:
    """Counts of skipped steps as they arrive on the host, and what very many in a row lead to.

    A count grows by at most one a step: the host asks for it only where it may be at a limit.

    Attributes:
        most: Number of steps skipped in a row that is too many, or None.
        due: Number of updates until the host asks.
    """

    def __init__(self, most: Any = None) -> None:
        if most is not None:
            require_int("max_skips", most, 1, 2**31 - 1)
        self.most: int | None = most
        self._warns = most is None or most > _WARNED_AT
        self.restart()

    def restart(self) -> None:
        """Begins at a count of 0, and forgets one on its way to the host."""
        self._copies, self.due = scalars.HostCopies(), self._limit

    @property
    def _limit(self) -> float:
        return min(self.most or math.inf, _WARNED_AT if self._warns else math.inf)

    def see(self, words: Tensor, scaler: Any) -> None:
        """Raises if `most` steps in a row were skipped, as far as the host knows; no host sync.

        Warns once of very many, unless fewer end the training. Where ranks are to raise, they wait
        for the counts of the step before, to know the same.

        Args:
            words: State of the scaler.
            scaler: The scaler.
        """
        if is_capturing() or isinstance(words, FakeTensor):
            return
        waits = self.most is not None and dist.is_available() and dist.is_initialized()
        # The next copy would be old when it is asked for.
        counts = self._copies.latest(words[: layout.COUNTERS], waits, again=False)
        if counts is None:
            return
        skips = counts[layout.CONSECUTIVE_SKIPS]
        if self.most is not None and skips >= self.most:
            self.due = 1  # each further skip is too many, too
            stats, report = scaler.stats(), scaler._report_or_reason()
            told = _told(stats, f", and max_skips is {self.most}")
            advice = _advice(stats).lstrip() if report is None else report
            raise FloatingPointError(f"{told}\n{advice}")
        warns = self._warns and skips >= _WARNED_AT
        self._warns = self._warns and not warns
        self.due += self._limit - skips
        if warns:
            stats = scaler.stats()
            warn_caller(f"{_told(stats)}{_advice(stats)} max_skips=... ends such a training.")


def _told(stats: ScalerStats, limit: str = "") -> str:
    scale = f"; the scale is {stats.scale:g}" * bool(stats.backoffs)
    return (
        f"{stats.consecutive_skips} steps in a row were skipped{limit}. Of {stats.steps} steps "
        f"{stats.skipped} were skipped, {stats.spikes} of them for their norm{scale}."
    )


def _advice(stats: ScalerStats) -> str:
    text = ""
    if stats.skipped > stats.spikes:
        text += (
            " For inf or NaN in every step look into the model and its input: "
            "ampfast.find_nonfinite(model) names the module, track='overflow' the parameters."
        )
    if stats.spikes:
        text += " Where every norm is above the limit, set a higher skip_above."
    return text
