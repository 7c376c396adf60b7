"""What a scaler tells of its steps: skips, overflows and norms by parameter."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ampfast.backends import aten
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.diagnose.find_nonfinite import NonFiniteFinder
from ampfast.diagnose.grad_norms import NormHistory, NormReport, ParameterNorms
from ampfast.diagnose.overflow_report import (
    Groups,
    Names,
    OverflowReport,
    ParameterOverflows,
    Rows,
    overflows_of,
    rows_on_host,
)
from ampfast.gradients import Record

if TYPE_CHECKING:
    from ampfast.distributed import Ranks
    from ampfast.scaler.loss_scale import LossScale


class Reports:
    """What a scaler tracks of the parameters of its optimizers, and the reports on that.

    Args:
        track: What the scaler tracks, or None.
        loss_scale: The state of its scale.
    """

    def __init__(self, track: str | None, loss_scale: LossScale) -> None:
        self._track, self._loss_scale, self._names = track, weakref.ref(loss_scale), Names()
        # In the order of the optimizers' first passes.
        self._rows: list[weakref.ref[Rows]] = []
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
            self._rows.append(weakref.ref(rows))
        else:
            refuse_capture("a change of an optimizer's parameters")
            self._rows[self._rows.index(weakref.ref(last))] = weakref.ref(rows)
        record.rows = rows
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
        if not self._rows and why_none:
            raise RuntimeError(
                f"overflow_report() knows nothing: {why_none}, and only gradients that ampfast's "
                "own method reads are tracked"
            )
        names, found = self._names.known(), self._living()
        on_host = rows_on_host([t for _, rows in found for t in rows.counters.values()])
        totals: list[ParameterOverflows] = []
        for number, rows in found:
            read = [list(islice(on_host, len(table))) for table in rows.counters.values()]
            for place, *counts in zip(rows.places(number, names), *read, strict=True):
                totals += overflows_of(place, counts) if counts else []  # without gradients so far
        report = OverflowReport.of(totals)
        optimizers = {row.optimizer for row in report.parameters}
        params = chain.from_iterable(rows.params for n, rows in found if n in optimizers)
        trainable = sum(param.requires_grad for param in params)
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
        found = [(*each, each[1].norms.summary()) for each in self._living() if each[1].norms]
        if not found and why_none:
            raise RuntimeError(
                f"grad_norms() knows nothing: {why_none}, and then only clip_grad_norm_() measures"
            )
        on_host = rows_on_host([summary for *_, summary in found])
        names = self._names.known()
        places = (place for number, rows, _ in found for place in rows.places(number, names))
        return NormReport(tuple(ParameterNorms(*place, *next(on_host)) for place in places))

    def _living(self) -> list[tuple[int, Rows]]:
        """The rows of living optimizers, for a report, each with the optimizer's number."""
        refuse_capture("a report that the host reads", "ask after the replay")
        return [(n, rows) for n, each in enumerate(self._rows) if (rows := each()) is not None]


def summary(scaler: Any) -> str:
    """The scale of a scaler, its steps and skips, as its repr tells them; no host sync."""
    scale = scaler._scale if scaler._enabled else None
    if scale is not None and scale.is_cpu:
        stats, backend = scaler.stats(), scaler._choice.name_for(scale.device)
        counts = f"{stats.steps} steps, {stats.skipped} skipped"
        return f"scale {stats.scale:.10g}, {counts}, backend {backend}"
    if scale is not None:
        return f"scale, steps and skipped on {scale.device}: see stats()"
    return f"scale {scaler._init_scale:.10g}, on no device yet" if scaler._enabled else "disabled"
