"""What a scaler tells of its steps: skips, overflows and norms by parameter."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ampfast.backends import aten
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.backends.scalars import joint_flag
from ampfast.diagnose.find_nonfinite import NonFiniteFinder
from ampfast.diagnose.grad_norms import NormHistory, NormReport, ParameterNorms
from ampfast.diagnose.overflow_report import (
    Facts,
    Groups,
    Names,
    OverflowReport,
    ParameterOverflows,
    Rows,
    overflows_of,
    rows_on_host,
)
from ampfast.gradients import Flags, Record

if TYPE_CHECKING:
    from ampfast.distributed import Ranks
    from ampfast.scaler.loss_scale import LossScale

# Deleted optimizers that are still in reports.
_MOST_DELETED = 64


class Reports:
    """What a scaler tracks of the parameters of its optimizers, and the reports on that.

    Args:
        track: What the scaler tracks, or None.
        loss_scale: The state of its scale.
    """

    def __init__(self, track: str | None, loss_scale: LossScale) -> None:
        self._track, self._loss_scale, self._names = track, weakref.ref(loss_scale), Names()
        # In the order of the optimizers' first passes.
        self._facts: list[Facts] = []
        self._finder: NonFiniteFinder | None = None

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Names a model's parameters, and watches its modules if these are tracked."""
        self._names.give(model)
        if self._track == "modules":
            if self._finder is None:
                loss_scale = self._loss_scale
                self._finder = NonFiniteFinder(lambda: getattr(loss_scale(), "words", None))
                weakref.finalize(self, self._finder.remove).atexit = False
            self._finder.watch(model)

    def start(self, record: Record, groups: Groups) -> Rows:
        """Returns the rows of an optimizer whose parameters are new, which its record gets."""
        last, rows = record.rows, Rows(groups, type(record.optimizer()).__name__)
        if last is None:
            deleted = [each for each in self._facts if each.rows() is None]
            for each in deleted[:-_MOST_DELETED]:
                self._facts.remove(each)
            self._facts.append(rows.facts)
        else:
            refuse_capture("a change of an optimizer's parameters")
            self._facts[self._facts.index(last.facts)] = rows.facts
        record.rows = rows
        rows.facts.look(self._names.known())
        return rows

    def keep_norms(self, rows: Rows) -> None:
        """Keeps the norms of a pass, of whose squares the rows have the sums."""
        if rows.counters:
            if rows.norms is None:
                refuse_capture("the creation of norms by parameter")
                rows.norms = NormHistory(len(rows.params), next(iter(rows.counters)))
            rows.norms.append([aten.squares_in(each) for each in rows.counters.values()])

    def overflows(self, ranks: Ranks | None, why_none: str) -> OverflowReport:
        """Returns the overflows of all parameters, of all ranks if some are given; one host sync.

        Raises:
            RuntimeError: Without tracking, under capture, or if there is a reason why there can be
                none.
        """
        if self._track is None:
            raise RuntimeError("overflow_report() needs a scaler made with track='overflow'")
        if not self._facts and why_none:
            raise RuntimeError(
                f"overflow_report() knows nothing: {why_none}, and only gradients that ampfast's "
                "own method reads are tracked"
            )
        self._look()
        on_host = rows_on_host([t for each in self._facts for t in each.counters.values()])
        totals: list[ParameterOverflows] = []
        for number, each in enumerate(self._facts):
            read = [list(islice(on_host, len(table))) for table in each.counters.values()]
            for place, *rows in zip(each.places(number), *read, strict=True):
                totals += overflows_of(place, rows)
        report = OverflowReport.of(totals)
        optimizers = {row.optimizer for row in report.parameters}
        trainable = sum(self._facts[number].trainable for number in optimizers)
        report = replace(report, is_everywhere=1 < trainable <= len(report.parameters))
        if self._finder is not None and report.step is not None:
            report = replace(report, module=self._finder.report_of(report.step))
        return report if ranks is None else OverflowReport.of_all(ranks.gathered(report))

    def overflows_or_reason(self, why_none: str) -> OverflowReport | str | None:
        """The report of this rank, or why there is none, for texts; None without tracking."""
        if self._track is None:
            return None
        try:
            report = self.overflows(None, why_none)
        except RuntimeError as error:
            return str(error)
        if report.step is None and dist.is_available() and dist.is_initialized():
            return f"{report} This is the report of one rank: see those of the others."
        return report

    def norms(self, why_none: str) -> NormReport:
        """Returns the norms of living optimizers' parameters; one host sync, raises as others."""
        if self._track != "norms":
            raise RuntimeError("grad_norms() needs a scaler made with track='norms'")
        self._look()
        rows = [each.rows() for each in self._facts]
        found = [(n, r, r.norms.summary()) for n, r in enumerate(rows) if r and r.norms is not None]
        if not found and why_none:
            raise RuntimeError(
                f"grad_norms() knows nothing: {why_none}, and then only clip_grad_norm_() measures"
            )
        on_host = rows_on_host([summary for *_, summary in found])
        places = (place for number, each, _ in found for place in each.facts.places(number))
        return NormReport(tuple(ParameterNorms(*place, *next(on_host)) for place in places))

    def _look(self) -> None:
        """Looks up the names of living optimizers' parameters, for a report."""
        refuse_capture("a report that the host reads", "ask after the replay")
        known = self._names.known()
        for each in self._facts:
            each.look(known)


def reason_of(flags: Flags) -> str | None:
    """Why a step of these flags was skipped, with one host sync; None if it was not."""
    listed = list(flags.values())
    flag = joint_flag(listed, listed[0].device).item() if listed else 0
    return None if flag == 0 else "nonfinite" if flag == 1 else "spike"
