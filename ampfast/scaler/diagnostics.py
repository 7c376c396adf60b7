"""What a scaler tells of its steps: skips, counts, overflows and norms by parameter, ranks."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ampfast.backends import aten, scalars
from ampfast.backends.core import overrides
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.backends.scalars import joint_flag
from ampfast.clip.norm_history import Sigmas
from ampfast.diagnose.find_nonfinite import NonFiniteFinder
from ampfast.diagnose.grad_norms import NormReport
from ampfast.diagnose.overflow_report import OverflowReport
from ampfast.scaler.history import History, ScalerStats
from ampfast.scaler.passes import Passes
from ampfast.scaler.turn import Flags


class Diagnostics(Passes):
    """Answers to questions about steps; `GradScaler` is the state machine that takes them."""

    _finder: NonFiniteFinder | None = None

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Returns whether the optimizer's last check found a reason to skip; no host sync.

        That is inf or NaN, or a norm above `skip_above`: `skip_reason` tells which.

        Args:
            optimizer: One that was given to `step` or `unscale_`.

        Returns:
            A new 0-dim float32 tensor, 0 or 1, on the device of the scale; 0 if disabled.

        Raises:
            LookupError: If this optimizer was never checked.
        """
        flags = self._last_flags(optimizer)
        scale = self._get_scale_async() if self._enabled else None
        device = torch.device("cpu") if scale is None else scale.device
        return scalars.any_found(flags.values(), device)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether the optimizer's last step was skipped, with one host sync.

        After `unscale_` alone it tells whether the step will be. Right for fused optimizers too.

        Args:
            optimizer: As for `found_inf`.

        Raises:
            LookupError: If this optimizer was never checked.
        """
        return self.skip_reason(optimizer) is not None

    def skip_reason(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Returns why the optimizer's last step was skipped, with one host sync.

        Args:
            optimizer: As for `found_inf`.

        Returns:
            "nonfinite" for inf or NaN, "spike" for a norm above `skip_above`, or None if it was not
            skipped.

        Raises:
            LookupError: If this optimizer was never checked.
        """
        refuse_capture("a question that the host asks", "ask after the replay")
        flags = list(self._last_flags(optimizer).values())
        flag = joint_flag(flags, flags[0].device).item() if flags else 0
        return None if flag == 0 else "nonfinite" if flag == 1 else "spike"

    def skip_limit(self, optimizer: torch.optim.Optimizer | None = None) -> float | None:
        """Returns the norm above which the next step is skipped, with one host sync.

        It is that of `skip_above`, or of the last clip. None if there is no limit, or while
        the window of `Sigmas` is not full.

        Args:
            optimizer: One that was stepped; None for the first, where there is one.
        """
        rule = self._skip_log.rule if self._skip_above is None else self._skip_above
        if not self._enabled or not isinstance(rule, Sigmas):
            return cast("float | None", rule) if self._enabled else None
        refuse_capture("a limit that the host reads", "ask after the replay")
        norms = self._norm_histories.window(optimizer)
        if len(norms) < rule.window:
            return None
        there = scalars.allocate(torch.tensor, norms, dtype=torch.float64, device="cpu")
        return float(aten.sigmas_limit(there, rule.sigmas))

    def stats(self) -> ScalerStats:
        """Returns the counts of steps since the scaler was made, with one host sync."""
        if not self._enabled:
            return ScalerStats(0, 0, 0, 0, 0, 1.0, 0, 0)
        if self._scale is None or self._growth_tracker is None:
            here = {"device": torch.device("cpu")}
            scale = scalars.allocate(torch.tensor, self.get_scale(), dtype=torch.float32, **here)
            began = self._init_growth_tracker
            tracker = scalars.allocate(torch.tensor, began, dtype=torch.int32, **here)
        else:
            scale, tracker = self._scale, self._growth_tracker
            refuse_capture("counts that the host reads", "read them after the replay")
        return self._loss_scale.stats(scale, tracker)

    def history(self) -> History:
        """Returns the last 1,024 steps with one host sync."""
        refuse_capture("a history that the host reads", "read it after the replay")
        return self._loss_scale.history()

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Gives parameters the names under which the reports list them.

        May be called at any time, and for several models. With `track="modules"` their modules are
        watched as long as model and scaler live. Reports look names up in the modules that have the
        parameters, which are not kept alive. Names are not part of a pickle.

        Args:
            model: The module, which names them by `named_parameters()`.

        Raises:
            TypeError: If it is no module.
        """
        self._names.give(model)
        if self._track == "modules":
            if self._finder is None:
                scaler = weakref.ref(self)
                self._finder = NonFiniteFinder(lambda: _words_of(scaler()))
                weakref.finalize(self, self._finder.remove).atexit = False
            self._finder.watch(model)

    def overflow_report(self, *, local: bool = False) -> OverflowReport:
        """Returns the parameters with inf/NaN gradients in the last skipped step.

        Values count as the optimizer would have used them. Optimizers that were deleted are
        listed, too, the last 64. Counts are in no pickle or checkpoint. One host sync, or two with
        `track="modules"`.

        With a `process_group` or distributed gradients all ranks must call this: their reports are
        matched by the names and places of parameters, each count with its maximum.

        Args:
            local: Only the report of this rank, without a collective.

        Raises:
            RuntimeError: Without `track`, under capture, or if an override of `_unscale_grads_`
                keeps the gradients from the kernels.
        """
        if self._track is None:
            raise RuntimeError("overflow_report() needs a scaler made with track='overflow'")
        refuse_capture("a report that the host reads", "ask after the replay")
        if self._enabled and self._tracking.is_empty and overrides(self, self._originals[0]):
            raise RuntimeError(
                f"overflow_report() knows nothing: {type(self).__name__} overrides a hook, and "
                "only gradients that ampfast's own method reads are tracked"
            )
        report = self._tracking.overflow_report()
        if self._finder is not None and report.step is not None:
            report = replace(report, module=self._finder.report_of(report.step))
        if local or not self._enabled:
            return report
        return OverflowReport.of_all(self._ranks.gathered(report))

    def _report_or_reason(self) -> OverflowReport | str | None:
        """The report of this rank, or why there is none, for texts; None without `track`."""
        if self._track is None:
            return None
        try:
            report = self.overflow_report(local=True)
        except RuntimeError as error:
            return str(error)
        if report.step is None and dist.is_available() and dist.is_initialized():
            return f"{report} This is the report of one rank: see those of the others."
        return report

    def grad_norms(self) -> NormReport:
        """Returns the norms of each parameter's gradient in the last 128 steps.

        They are measured in the pass that unscales or checks, and stay on the device until this
        asks, with one host sync. Of a distributed gradient it is the norm of this rank's part.

        Raises:
            RuntimeError: Without `track="norms"`, under capture, or if an override of a hook keeps
                the gradients from being measured.
        """
        if self._track != "norms":
            raise RuntimeError("grad_norms() needs a scaler made with track='norms'")
        refuse_capture("a report that the host reads", "ask after the replay")
        report = self._tracking.norm_report()
        if self._enabled and not report.parameters and overrides(self, self._originals[0]):
            raise RuntimeError(
                f"grad_norms() knows nothing: {type(self).__name__} overrides a hook, and then "
                "only clip_grad_norm_() measures"
            )
        return report

    def _last_flags(self, optimizer: torch.optim.Optimizer) -> Flags:
        """The flags of the optimizer's last check, by device; none if disabled."""
        if not self._enabled:
            return {}
        turn = self._last_turns.get(optimizer)
        flags = None if turn is None else turn.get("found_inf_per_device") or turn.last_flags
        if flags is None:
            raise LookupError(
                f"this optimizer ({type(optimizer).__name__}) was never checked: "
                "call step() or unscale_() first"
            )
        return flags


def _words_of(scaler: Diagnostics | None) -> Tensor | None:
    return None if scaler is None else scaler._loss_scale.words
