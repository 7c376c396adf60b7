"""What a scaler tells of its steps: skips, overflows and norms by parameter."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.backends.scalars import joint_flag
from ampfast.diagnose.find_nonfinite import NonFiniteFinder
from ampfast.diagnose.grad_norms import NormReport
from ampfast.diagnose.overflow_report import Names, OverflowReport, Tracking
from ampfast.gradients import Flags

if TYPE_CHECKING:
    from ampfast.distributed import Ranks
    from ampfast.scaler.loss_scale import LossScale


class Reports:
    """Reports on the parameters of a scaler's optimizers.

    Args:
        track: What the scaler tracks, or None.
        loss_scale: The state of its scale.

    Attributes:
        tracking: The tables by parameter, or None.
    """

    def __init__(self, track: str | None, loss_scale: LossScale) -> None:
        self._track, self._loss_scale, self._names = track, weakref.ref(loss_scale), Names()
        self.tracking = None if track is None else Tracking(self._names)
        self._finder: NonFiniteFinder | None = None

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Names a model's parameters, and watches its modules if these are tracked."""
        self._names.give(model)
        if self._track == "modules":
            if self._finder is None:
                loss_scale = self._loss_scale
                self._finder = NonFiniteFinder(lambda: _words_of(loss_scale()))
                weakref.finalize(self, self._finder.remove).atexit = False
            self._finder.watch(model)

    def overflows(self, ranks: Ranks | None, why_none: str) -> OverflowReport:
        """Returns the overflows of all parameters, of all ranks if some are given.

        Raises:
            RuntimeError: Without tracking, under capture, or if there is a reason why there can be
                none.
        """
        if self.tracking is None:
            raise RuntimeError("overflow_report() needs a scaler made with track='overflow'")
        refuse_capture("a report that the host reads", "ask after the replay")
        if self.tracking.is_empty and why_none:
            raise RuntimeError(
                f"overflow_report() knows nothing: {why_none}, and only gradients that ampfast's "
                "own method reads are tracked"
            )
        report = self.tracking.overflow_report()
        if self._finder is not None and report.step is not None:
            report = replace(report, module=self._finder.report_of(report.step))
        return report if ranks is None else OverflowReport.of_all(ranks.gathered(report))

    def overflows_or_reason(self, why_none: str) -> OverflowReport | str | None:
        """The report of this rank, or why there is none, for texts; None without tracking."""
        if self.tracking is None:
            return None
        try:
            report = self.overflows(None, why_none)
        except RuntimeError as error:
            return str(error)
        if report.step is None and dist.is_available() and dist.is_initialized():
            return f"{report} This is the report of one rank: see those of the others."
        return report

    def norms(self, why_none: str) -> NormReport:
        """Returns the norms of all parameters; raises as `overflows`."""
        if self.tracking is None or self._track != "norms":
            raise RuntimeError("grad_norms() needs a scaler made with track='norms'")
        refuse_capture("a report that the host reads", "ask after the replay")
        report = self.tracking.norm_report()
        if not report.parameters and why_none:
            raise RuntimeError(
                f"grad_norms() knows nothing: {why_none}, and then only clip_grad_norm_() measures"
            )
        return report


def reason_of(flags: Flags) -> str | None:
    """Why a step of these flags was skipped, with one host sync; None if it was not."""
    listed = list(flags.values())
    flag = joint_flag(listed, listed[0].device).item() if listed else 0
    return None if flag == 0 else "nonfinite" if flag == 1 else "spike"


def _words_of(loss_scale: LossScale | None) -> Tensor | None:
    return None if loss_scale is None else loss_scale.words
