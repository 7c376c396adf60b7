"""The drop-in gradient scaler: torch's state machine over ampfast's kernels."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampfast import backends, distributed
from ampfast.backends import cuda_graphs, scalars
from ampfast.backends.core import Factor, Pass, divides_by, flags_of, is_found, overrides, turn_of
from ampfast.backends.cuda_graphs import is_capturing, refuse_capture
from ampfast.backends.gpu import DeviceKernels, undo
from ampfast.backends.scalars import new_flag
from ampfast.clip import global_norm
from ampfast.clip.norm_history import ClipLimit, NormHistories, Sigmas, skip_limit_of
from ampfast.diagnose.grad_norms import NormReport
from ampfast.diagnose.overflow_report import OverflowReport, require_known
from ampfast.errors import add_note, not_compiled, warn_caller
from ampfast.gradients import READY, STEPPED, UNSCALED, Flags, Records, TorchGradScaler, new_turn
from ampfast.optim.fused_support import can_defer, device_of, explain, flag_unchecked, why_unchecked
from ampfast.scaler import late_backward, out_of_turn
from ampfast.scaler.checkpoint import EXPECTED, require_loadable
from ampfast.scaler.fused_step import step_fused
from ampfast.scaler.loss_scale import History, Limits, LossScale, ScalerStats
from ampfast.scaler.passes import AS_THEY_ARE, CLIP, CLIP_DECIDED, DEFERRED, MEASURE, SCALED, Passes
from ampfast.scaler.reports import Reports, summary
from ampfast.scaler.skips import SkipLog, SkipWatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["GradScaler", "OptState"]

_FLOAT32 = torch.float32


class GradScaler(TorchGradScaler):
    """A `torch.amp.GradScaler` that reads the gradients once and never corrupts a model.

    One iteration, for gradients g, scale s and optimizer o::

        scale(loss)  s * loss, so that small float16 gradients do not vanish
        unscale_(o)  g <- g * (1 / s); found_inf <- 1 if a value written is
                     inf or NaN, else 0
        step(o)      unscale_(o) unless done; o.step() unless found_inf. An
                     optimizer that takes grad_scale and found_inf (torch's
                     fused ones) divides in its step: its gradients are only
                     read, and found_inf <- max|g| / grad_scale is inf or NaN
        update()     if any found_inf: s <- s * backoff_factor; else, every
                     growth_interval iterations in a row:
                     s <- s * growth_factor, unless that overflows

    Everything observable is torch's bit for bit, except for the differences in docs/differences.md.
    Source of the contract: torch/amp/grad_scaler.py.

    Args:
        device: Device type, as for torch; with "cuda" and no CUDA the scaler disables itself.
        init_scale: Initial scale.
        growth_factor: Factor of growth, above 1.
        backoff_factor: Factor after an overflow, below 1.
        growth_interval: Iterations without overflow before the scale grows; below 1: never.
        enabled: If False, every method is a no-op, `step` calls the optimizer's, `clip_grad_norm_`
            clips as torch's function does, in place, and `grad_norm` measures.
        backend: "cuda", "triton", "cpu" or "aten" for the devices that it serves; None for
            `AMPFAST_BACKEND`, else the best there is.
        allow_fp16: Whether float16 gradients may be unscaled; torch always refuses.
        min_scale: Lower limit of the scale when it backs off. A scale that is set or loaded beyond
            its limits is left until it comes within.
        max_scale: Upper limit of the scale when it grows.
        hysteresis: Number of the overflow, since the scale's growth was last due, from which on
            the scale backs off, as in Megatron-LM.
        dynamic: If False, the scale is constant: `growth_interval` is 0 and `backoff_factor` 1.
            With an `init_scale` of 1 nothing is multiplied, and gradients are only read; see
            `StepGuard`.
        process_group: Ranks that hold other parts of the gradients, as shards, stages or
            tensor-parallel parts: a group, or a mesh with all its dimensions. They skip together,
            with one small collective per optimizer, and norms are global; `mark_replicated` names
            the parameters that are equal on all ranks. DTensor gradients need no group.
        track: "overflow" for a record of each parameter's overflows, for `overflow_report`;
            "modules" for that and, of the model of `name_parameters`, what `find_nonfinite` finds;
            "norms" for overflows and each parameter's norms, for `grad_norms`; or None.
        skip_above: Norm above which a step is skipped, as the attribute of this name.
        max_skips: Number of steps skipped in a row at which training ends, as the attribute of this
            name.

    Raises:
        AssertionError: If a factor is on the wrong side of 1.
        TypeError: If `device` is a number or a keyword has the wrong type.
        ValueError: If `backend` or `track` is unknown, the scale's limits or hysteresis make no
            sense, or `process_group` does not contain this rank or is of another device type.
        RuntimeError: If `backend` cannot run here.
    """

    # Extra arguments of the torch base class (FSDP's takes a process_group).
    _base_arguments: ClassVar[dict[str, Any]] = {}
    # Methods as they were, for the one who replaces them by methods that only watch.
    _originals: ClassVar[tuple[dict[str, Any], ...]] = ()
    # Whether the scaler agrees with all ranks where no group is given.
    _is_for_all = False
    _warned_of_backward = _warned_of_zero = False

    # On the class for instances that torch pickled or whose __init__ was not called.
    _allow_fp16 = False
    _dynamic = True
    _backend: str | None = None
    # Whether the scale is 1 forever, so that nothing is multiplied or divided by it.
    _is_guard = False
    _track: str | None = None
    _skip_above: float | Sigmas | None = None

    # The parts, made when first asked for, for the same reason: the kernels by device, those for
    # the device of the scale, the state of the scale besides torch's two tensors, the ranks to
    # agree with, what is known of each optimizer, the norms of their steps, the passes over their
    # gradients, the reports on these, the steps skipped in a row, and the lines about them.
    _choice = cached_property(lambda self: backends.choose(self._backend))
    _kernels = cached_property(lambda self: self._choice.kernels_for(self._scale.device))
    _loss_scale = cached_property(lambda self: LossScale(Limits()))
    _ranks = cached_property(lambda self: distributed.Ranks(is_default=self._is_for_all))
    _records = cached_property(lambda self: Records())
    _norm_histories = cached_property(
        lambda self: NormHistories(self._records, vars(self).pop("_saved_norms", ()))
    )
    _reports = cached_property(lambda self: Reports(self._track, self._loss_scale))
    _skip_watch = cached_property(lambda self: SkipWatch())
    _skip_log = cached_property(lambda self: SkipLog())
    _passes = cached_property(lambda self: Passes(self))

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        backend: str | None = None,
        allow_fp16: bool = False,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        dynamic: bool = True,
        process_group: ProcessGroup | DeviceMesh | None = None,
        track: str | None = None,
        skip_above: float | Sigmas | None = None,
        max_skips: int | None = None,
    ) -> None:
        out_of_turn.require_flags(device, allow_fp16=allow_fp16, dynamic=dynamic)
        rules = Limits(min_scale, max_scale, hysteresis)
        rules.require_within(init_scale, dynamic)
        self.skip_above = skip_above
        if max_skips is not None:
            self.max_skips = max_skips
        require_known(track)
        backends.require_known(backend)
        if enabled:
            self._choice = backends.choose(backend)
            enabled = out_of_turn.is_available(device)
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            **self._base_arguments,
        )
        if self._enabled:
            self._per_optimizer_states = defaultdict(new_turn)
        self.process_group = process_group
        self._backend = backend
        self._allow_fp16 = allow_fp16
        self._loss_scale = LossScale(rules)
        self._dynamic = dynamic
        if enabled and not dynamic:
            self._growth_interval, self._backoff_factor = 0, 1.0
            self._is_guard = init_scale == 1
        self._track = track

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {summary(self)}>"

    def scale(self, outputs: Any) -> Any:
        """Returns a tensor, or the tensors of an iterable, times the scale; as torch's.

        Args:
            outputs: A tensor, or an iterable of them.
        """
        if self._is_guard:
            return outputs
        is_usual = type(outputs) is Tensor and outputs.dtype is _FLOAT32 and self._enabled
        scale = self._scale if is_usual else None
        is_here = scale is not None and scale.device == outputs.device
        scaled = outputs * scale if is_here else super().scale(outputs)
        if self._enabled and self._per_optimizer_states and not torch.compiler.is_compiling():
            turns = self._records.in_iteration(self._per_optimizer_states)
            scaled = late_backward.compared(scaled, turns)
        return scaled

    @property
    def process_group(self) -> ProcessGroup | DeviceMesh | None:
        """The ranks with which the scaler agrees, besides the ranks of DTensors."""
        return self._ranks.group

    @process_group.setter
    def process_group(self, group: ProcessGroup | DeviceMesh | None) -> None:
        distributed.require_group(group, self._device)
        self._ranks = distributed.Ranks(group, is_default=self._is_for_all)
        vars(self).pop("_passes", None)

    @property
    def skip_above(self) -> float | Sigmas | None:
        """Norm above which a step is skipped, as for `clip_grad_norm_`; None for no limit.

        The norm is the 2-norm of each optimizer's gradients, measured as `unscale_`, or else
        `step`, reads them; or that of `clip_grad_norm_`, whose `skip_above` it is by default. Where
        a hook is overridden, only `clip_grad_norm_` compares: `update` warns once if no norm was.
        """
        return self._skip_above

    @skip_above.setter
    def skip_above(self, limit: float | Sigmas | None) -> None:
        self._skip_above = skip_limit_of(limit)
        vars(self).pop("_passes", None)

    @property
    def max_skips(self) -> int | None:
        """Number of steps skipped in a row, for overflow or a norm, at which `update` raises.

        `FloatingPointError` has the counts and, with `track`, the parameters in its text. On a GPU
        nothing waits for the count, which arrives a step late, or more if the host is far ahead.
        Where `torch.distributed` is initialized, the host waits for the count of the step before,
        so that all ranks raise at the same step. None for no limit.
        """
        return self._skip_watch.most

    @max_skips.setter
    def max_skips(self, most: int | None) -> None:
        self._skip_watch = SkipWatch(most)
        self._skip_watch.due = 1  # steps may have been skipped before

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the backoff factor, as torch's.

        Args:
            new_factor: The next overflows multiply the scale by it.

        Raises:
            ValueError: With `dynamic=False`.
        """
        self._require_dynamic("backoff_factor")
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the growth interval, as torch's.

        Args:
            new_interval: Number of steps without overflow after which the scale grows.

        Raises:
            ValueError: With `dynamic=False`.
        """
        self._require_dynamic("growth_interval")
        super().set_growth_interval(new_interval)

    def _require_dynamic(self, name: str) -> None:
        if self._enabled and not self._dynamic:
            raise ValueError(f"a scale with dynamic=False never changes: it takes no {name}")

    # A compiler that traces the state machine around a kernel loses what is written to its dicts.
    @not_compiled
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscales the optimizer's gradients in place and checks them; no host sync.

        Args:
            optimizer: Any object with `param_groups`.

        Raises:
            AssertionError: If nothing was scaled yet, which a guard does not need.
            RuntimeError: If called twice, or after `step`, since the last `update`.
            ValueError: If a gradient is float16 and `allow_fp16` is not set; its note says which.
        """
        if not self._enabled:
            return
        scale = self._scale
        if scale is None or self._growth_tracker is None:
            scale = self._checked_scale("unscale_", optimizer)
        turn = turn_of(self._records, self._per_optimizer_states, optimizer)
        if turn["stage"] is not READY:
            raise out_of_turn.past_its_turn(turn, optimizer)
        try:
            if overrides(self, _HOOKS):
                TorchGradScaler.unscale_(self, optimizer)
                self._passes.agree_beside_hooks(optimizer, turn, scale)
            else:
                self._passes.unscale(optimizer, turn, scale)
        except AttributeError as error:
            explain(error, optimizer, "param_groups")
            raise

    @not_compiled
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales unless that is done, then calls the optimizer's step if all is finite.

        Args:
            optimizer: Any object with `param_groups` and `step`.
            *args: Passed on.
            **kwargs: Passed on; `closure` is refused. One among `args` that calls `backward` warns.

        Returns:
            What `optimizer.step` returned, or None if the step was skipped. In a CUDA graph what it
            returned while it was captured: whether a step is skipped is decided at each replay.

        Raises:
            AssertionError: If nothing was scaled yet, or no gradient was found.
            RuntimeError: If called twice since the last `update`, with a closure, or under a
                capture that cannot skip the step; its text names what can.
            ValueError: As `unscale_`.
        """
        overridden = overrides(self, _HOOKS)
        turn: Any = {}
        try:
            if not self._enabled or "closure" in kwargs:
                return TorchGradScaler.step(self, optimizer, *args, **kwargs)
            scale = self._scale
            if scale is None or self._growth_tracker is None:
                scale = self._checked_scale("step", optimizer)
            turn = turn_of(self._records, self._per_optimizer_states, optimizer)
            if turn["stage"] is STEPPED:
                raise out_of_turn.stepped("step() has already been called since the last update().")
            if turn.agreement is not None and turn["stage"] is not READY:
                self._passes.agree(turn)  # retries a collective that failed
            if turn.is_late:
                late_backward.warn(self, optimizer, turn)
            by = divides_by(self._records, optimizer)
            if overridden and by != "grad_scale":  # else torch's step asks for it
                scale = self._checked_scale("step", optimizer)
            if overridden and by == "grad_scale":
                result = TorchGradScaler.step(self, optimizer, *args, **kwargs)
            # One that was to divide still has scaled gradients.
            elif by or turn.divisor is not None:
                result = step_fused(self, optimizer, turn, scale, by, args, kwargs)
            else:
                if scale.is_cuda and is_capturing() and not overrides(self, _MAYBE_STEP):
                    # Here, or the gradients would count as unscaled.
                    cuda_graphs.require_skippable(optimizer)
                if turn["stage"] is READY and overridden:
                    self.unscale_(optimizer)
                elif turn["stage"] is READY:
                    self._passes.unscale(optimizer, turn, scale)
                if not turn["found_inf_per_device"]:
                    flag = flag_unchecked(optimizer, scale.device, self._is_guard)
                    turn["found_inf_per_device"] = {scale.device: flag}
                result = self._maybe_opt_step(optimizer, turn, *args, **kwargs)
        except AttributeError as error:
            explain(error, optimizer, *["param_groups"] * self._enabled, "step")
            if turn.get("stage") is UNSCALED and not turn["found_inf_per_device"]:
                add_note(error, why_unchecked(optimizer))  # torch's fused optimizers fail then
            raise
        turn["stage"] = STEPPED
        if turn.is_late:  # by a backward of a closure
            late_backward.warn(self, optimizer, turn)
        return result

    @not_compiled
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale from the flags of this iteration, or sets it; no host sync.

        Args:
            new_scale: A float or a one-element tensor on the scaler's device type; None for the
                automatic update.

        Raises:
            AssertionError: If nothing was scaled or checked since the last update, or `new_scale`
                is not as described.
            FloatingPointError: With `max_skips`.
            ValueError: If `new_scale` is given and the scale is always 1, as a `StepGuard`'s.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._end_iteration(is_step=self._set_scale(new_scale))
            return
        scale, growth_tracker = self._scale, self._growth_tracker
        if scale is None and self._is_guard:
            raise out_of_turn.nothing_checked()
        if scale is None or growth_tracker is None or overrides(self, _HOOKS):
            scale, growth_tracker = self._check_scale_growth_tracker("update")
        flags = flags_of(self._per_optimizer_states, self._passes.agree)
        if not flags:
            if not (self._is_guard and self._per_optimizer_states):
                raise out_of_turn.nothing_checked()
            flags = [new_flag(scale.device)]  # no optimizer has gradients
        factors = self._growth_factor, self._backoff_factor, self._growth_interval
        self._loss_scale.update_(scale, growth_tracker, flags, factors, self._kernels)
        self._end_iteration()

    @not_compiled
    def step_and_update(self, *optimizers: torch.optim.Optimizer) -> list[float | None]:
        """`step` for each optimizer, then `update`; on a GPU one launch does it and the last check.

        While the last optimizer steps, `get_scale()` may be the next scale already, and changes to
        the scaler may come too late for the update. If it raises, the scale is restored.

        Args:
            *optimizers: As for `step`.

        Returns:
            What `step` returned for each.

        Raises:
            AttributeError: If a list or tuple is given instead of an optimizer; else as `step` and
                `update`.
        """
        for optimizer in optimizers[1:]:
            if not hasattr(optimizer, "param_groups"):
                self.step(optimizer)  # raises before any other steps
        results = [self.step(optimizer) for optimizer in optimizers[:-1]]
        ending, turns = None, {}
        if optimizers and self._enabled and not overrides(self, _ALL_HOOKS):
            scale, turns = self._scale, self._per_optimizer_states
            if scale is None or self._growth_tracker is None:
                scale = self._checked_scale("step", optimizers[-1])
            growth_tracker = self._growth_tracker
            if growth_tracker is not None and isinstance(self._kernels, DeviceKernels):
                others = {**turns}
                others.pop(id(optimizers[-1]), None)
                flags = flags_of(others, self._passes.agree) if others else []
                factors = self._growth_factor, self._backoff_factor, self._growth_interval
                update = self._loss_scale.update_of(scale, growth_tracker, flags, factors)
                ending = self._kernels.ending(update)
        try:
            for optimizer in optimizers[-1:]:
                if ending is not None:
                    turn_of(self._records, turns, optimizer).ending = ending
                results.append(self.step(optimizer))
        except BaseException:
            if ending is not None:
                turn_of(self._records, turns, optimizers[-1]).ending = None
                undo(ending)
            raise
        if ending is not None and ending.applied:
            self._end_iteration()
        else:
            self.update()
        return results

    @not_compiled
    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        max_norm: float | ClipLimit,
        norm_type: float = 2.0,
        *,
        in_place: bool = True,
        skip_above: float | Sigmas | None = None,
    ) -> Tensor:
        """Unscales gradients and clips them by their total norm; no host sync.

        Instead of `unscale_` and `torch.nn.utils.clip_grad_norm_`: one read for check and norm,
        one pass that unscales and multiplies by min(1, max_norm / (norm + 1e-6)). Later writes to
        the gradients are not checked. The step of an inf or NaN norm is skipped, unless only
        the norm of finite gradients overflows, which makes them 0, as in torch.

        Args:
            optimizer: Any object with `param_groups`, or a list or tuple of them, which are clipped
                by their joint norm and skipped together.
            max_norm: At least 0; infinity leaves the gradients at what `unscale_` writes, and with
                a scale that is always 1 writes none. `Percentile` or `ZScore` for a limit that
                follows the norms of the steps taken by these optimizers, which are known by the
                first one; decided on the device, by torch's ops.
            norm_type: Above 0; "inf" for the largest magnitude. torch's ops take orders other than
                2 and infinity.
            in_place: If False, gradients are only read: an optimizer that takes `grad_scale` gets
                scale / coefficient for it; they count as 0 where that overflows float32. One with
                the older `grad_scaler` keyword is still clipped in place.
            skip_above: Norm before clipping above which the step is skipped as after an overflow,
                but the scale and its growth tracker stay: a number, at least 0, or `Sigmas` for a
                limit that follows the norms of the steps taken by these optimizers, which are known
                by the first one. Decided on the device. Ignored if the scaler is disabled. None for
                the scaler's attribute of this name.

        Returns:
            The norm before clipping: a new 0-dim tensor on the device of the first gradients,
            float32, or float64 if a gradient is. On GPUs, squares of float32 and 16-bit gradients
            are summed in float32 over windows of 8 KiB, where they may overflow or vanish.

        Raises:
            AssertionError: If nothing was scaled yet.
            RuntimeError: After `unscale_`, `clip_grad_norm_` or `step` since the last `update`.
            TypeError: If an argument has the wrong type.
            ValueError: If `max_norm`, `norm_type` or `skip_above` is out of range, an optimizer is
                given twice or cannot take `in_place=False`, or as `unscale_`.
        """
        above = self._skip_above if skip_above is None else skip_above
        given = (optimizer, max_norm, norm_type, in_place, above)
        optimizers, limit, order, highest = global_norm.clip_arguments(*given)
        if not self._enabled:
            turns = [turn_of(self._records, {}, each) for each in optimizers]
            uses = [AS_THEY_ARE] * len(optimizers)
            return self._passes.norm(optimizers, turns, uses, None, None, CLIP, limit, order)
        scale, overridden = self._scale, overrides(self, _HOOKS)
        if scale is None or self._growth_tracker is None or overridden:
            scale = self._checked_scale("clip_grad_norm_", *optimizers)
        states, records = self._per_optimizer_states, self._records
        for each in optimizers:
            if (turn := states.get(id(each))) is not None and turn["stage"] is not READY:
                raise out_of_turn.past_its_turn(turn, each)
        uses, turns, usual = [], [], AS_THEY_ARE if overridden else SCALED
        for each in optimizers:
            defers = not in_place and can_defer(each, records, overridden)
            uses.append(DEFERRED if defers else usual)
        for each in optimizers:
            turns.append(turn_of(records, states, each))
        if highest is not None:
            self._skip_log.rule = highest
        if overridden:
            # What the hook finds counts, and what it writes is clipped.
            for each in optimizers:
                self.unscale_(each)
        aim = CLIP_DECIDED if overridden else CLIP
        return self._passes.norm(optimizers, turns, uses, highest, scale, aim, limit, order)

    @not_compiled
    def grad_norm(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        norm_type: float = 2.0,
    ) -> Tensor:
        """Returns the total norm of the unscaled gradients, which it only reads; no host sync.

        Sparse gradients are coalesced. Where ranks agree, all of them must call this.

        Args:
            optimizer: As for `clip_grad_norm_`; unscaled already or not.
            norm_type: As for `clip_grad_norm_`.

        Returns:
            As `clip_grad_norm_`. After `clip_grad_norm_` that of the clipped gradients, but with
            `in_place=False`, which leaves them, that before clipping.

        Raises:
            AssertionError: If nothing was scaled yet.
            RuntimeError: After `step`.
            TypeError: If an argument has the wrong type.
            ValueError: If `norm_type` is out of range or an optimizer is given twice.
        """
        optimizers, order = global_norm.optimizers_of(optimizer), global_norm.order_of(norm_type)
        known: dict[int, dict[str, Any]] = self._per_optimizer_states if self._enabled else {}
        turns = [known.get(id(each)) or new_turn() for each in optimizers]
        scale = self._checked_scale("grad_norm", *optimizers) if self._enabled else None
        if any(turn["stage"] is STEPPED for turn in turns):
            raise out_of_turn.stepped("grad_norm() is being called after step().")
        # A deferred clip leaves them scaled.
        done = [t["stage"] is UNSCALED and getattr(t, "divisor", None) is None for t in turns]
        uses = [AS_THEY_ARE if scale is None or each else SCALED for each in done]
        unmarked = [new_turn() for _ in turns]
        norm = self._passes.norm(optimizers, unmarked, uses, None, scale, MEASURE, order=order)
        if scale is not None and any(turn["stage"] is not READY for turn in turns):
            self._loss_scale.norms.pop()  # it may be of gradients that were clipped
        return norm

    # Answers about steps.

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
        flags = self._records.last_flags(optimizer) if self._enabled else {}
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
        flags = [*self._records.last_flags(optimizer).values()] if self._enabled else []
        flag = scalars.joint_flag(flags, flags[0].device).item() if flags else 0
        return None if flag == 0 else "nonfinite" if flag == 1 else "spike"

    def skip_limit(self, optimizer: torch.optim.Optimizer | None = None) -> float | None:
        """Returns the norm above which the next step is skipped, with one host sync.

        It is that of `skip_above`, or of the last clip. None if there is no limit, or while
        the window of `Sigmas` is not full.

        Args:
            optimizer: One that was stepped; None for the first, where there is one.

        Raises:
            LookupError: With `Sigmas`, if this optimizer was never checked.
        """
        rule = self._skip_log.limit_of(self) if self._enabled else None
        return self._norm_histories.limit(rule, optimizer)

    def stats(self) -> ScalerStats:
        """Returns the counts of steps since the scaler was made, with one host sync."""
        if not self._enabled or self._scale is None or self._growth_tracker is None:
            return self._loss_scale.stats(self.get_scale(), self._get_growth_tracker())
        refuse_capture("counts that the host reads", "read them after the replay")
        return self._loss_scale.stats(self._scale, self._growth_tracker)

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
        self._reports.name_parameters(model)

    def overflow_report(self, *, local: bool = False) -> OverflowReport:
        """Returns the parameters with inf/NaN gradients in the last skipped step.

        Values count as the optimizer would have used them. Optimizers that were deleted are not
        listed. Counts are in no pickle or checkpoint. One host sync, or two with
        `track="modules"`.

        With a `process_group` or distributed gradients all ranks must call this: their reports are
        matched by the names and places of parameters, each count with its maximum.

        Args:
            local: Only the report of this rank, without a collective.

        Raises:
            RuntimeError: Without `track`, under capture, or if an override of `_unscale_grads_`
                keeps the gradients from the kernels.
        """
        ranks = None if local or not self._enabled else self._ranks
        return self._reports.overflows(ranks, self._why_no_report())

    def grad_norms(self) -> NormReport:
        """Returns the norms of each parameter's gradient in the last 128 steps.

        They are measured in the pass that unscales or checks, and stay on the device until this
        asks, with one host sync. Of a distributed gradient it is the norm of this rank's part.

        Raises:
            RuntimeError: Without `track="norms"`, under capture, or if an override of a hook keeps
                the gradients from being measured.
        """
        return self._reports.norms(self._why_no_report())

    def _report_or_reason(self) -> OverflowReport | str | None:
        """The report of this rank, or why there is none, for texts; None without `track`."""
        return self._reports.overflows_or_reason(self._why_no_report())

    def _why_no_report(self) -> str:
        """Why gradients may be unknown to the reports, or an empty text."""
        is_hooked = self._enabled and overrides(self, _HOOKS)
        return f"{type(self).__name__} overrides a hook" if is_hooked else ""

    def get_scale(self) -> float:
        """Returns the scale, with one host sync, or 1.0 if disabled; warns once that 0 stays 0."""
        if self._enabled:
            refuse_capture("a scale that the host reads", "read it after the replay")
        scale = super().get_scale()
        if scale == 0.0 and not self._warned_of_zero:
            self._warned_of_zero = True
            warn_caller(out_of_turn.ZERO_SCALE)
        return scale

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's; with limits, `dynamic=False` or norms of steps one more, "ampfast"."""
        state = super().state_dict()
        norms, is_torchs = self._norm_histories.saved(), self._loss_scale.limits.is_torchs
        if self._enabled and (norms or not self._dynamic or not is_torchs):
            entry = {} if is_torchs else self._loss_scale.state_dict()
            # Without norms, too: torch.distributed.checkpoint loads only what is there already.
            state["ampfast"] = {**entry, "norms": norms}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where a checkpoint was saved, of this class or of torch's.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            KeyError: If it lacks an entry; nothing is loaded then.
            RuntimeError: If the checkpoint is of a disabled scaler.
            TypeError: If it is no dict.
            ValueError: If it is of a scaler with other limits or hysteresis, a value is damaged,
                its scale is not the 1 that this one's always is, or only this one is static.
                Nothing is loaded then. As with torch, a scaler becomes static, with a warning where
                the checkpoint is of one with `dynamic=False`.
        """
        try:
            if not self._enabled or len(state_dict) == 0:
                super().load_state_dict(state_dict)  # which does nothing, or raises
                return
            rules = (self._loss_scale.limits, self._dynamic, self._is_guard, self._growth_interval)
            tolerated, norms = require_loadable(state_dict, *rules)
            super().load_state_dict(state_dict)
        except (KeyError, TypeError) as error:
            got = [*state_dict][:5] if isinstance(state_dict, dict) else type(state_dict).__name__
            add_note(error, f"{EXPECTED}{got}")
            raise
        self._norm_histories.load(norms)
        self._loss_scale.load(tolerated)
        self._skip_watch.restart()
        self._skip_log.restart()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # The parts are of this process and this iteration; weak references are among them.
        for name, part in vars(GradScaler).items():
            if isinstance(part, cached_property) and name != "_ranks":
                state.pop(name, None)
        # A shallow copy of a scaler has its own counts, too. An optimizer is not the same in
        # another process: its norms are for one that is yet to come.
        state["_saved_norms"] = self._norm_histories.saved()
        state["_loss_scale"] = copy.deepcopy(self._loss_scale)
        state["_skip_watch"] = copy.deepcopy(self._skip_watch)
        return state

    # torch's private methods, which subclasses override and other projects call.

    @not_compiled
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if str(dev) != "cpu":
            refuse_capture("the creation of the scale, which every replay would reset")
        with torch.inference_mode(False):
            super()._lazy_init_scale_growth_tracker(dev)
        if self._scale is not None:
            self._loss_scale.words_on(self._scale.device)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool | None = None,
    ) -> dict[torch.device, Tensor]:
        if allow_fp16 is None:
            allow_fp16 = self._allow_fp16  # FSDP's scaler need not pass it
        # As by torch's, an error leaves no new turn.
        turn = turn_of(self._records, {**self._per_optimizer_states}, optimizer)
        work = Pass(True, Factor.TIMES, inv_scale, found_inf.clone())
        scale = self._get_scale_async() if self._track is not None else None
        return self._passes.run_hook(optimizer, turn, work, allow_fp16, scale)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Flags:
        if overrides(self, _HOOKS):
            TorchGradScaler._check_inf_per_device(self, optimizer)
            turn = turn_of(self._records, self._per_optimizer_states, optimizer)
            return self._passes.agree_beside_hooks(optimizer, turn, self._scale)
        scale = self._checked_scale("_check_inf_per_device", optimizer)
        turns = {**self._per_optimizer_states}
        turn = turn_of(self._records, turns, optimizer)
        # Divided by 1 they are only checked, float16 ones, too.
        one = scalars.allocate(torch.ones, (), dtype=torch.float32, device=scale.device)
        flags = self._passes.check(optimizer, turn, Pass(False, Factor.DIVIDE, one), scale)
        self._per_optimizer_states.update(turns)
        return flags

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        flags = optimizer_state["found_inf_per_device"]
        found = is_found(flags)
        if found is None:
            return cuda_graphs.step_unless(flags, optimizer, args, kwargs)
        return None if found else optimizer.step(*args, **kwargs)

    # What the steps above ask for.

    def _checked_scale(self, method: str, *optimizers: Any) -> Tensor:
        """The scale, of which torch's own method checks that it was made; a guard makes it here."""
        if self._is_guard and self._scale is None:
            device = device_of(optimizers) or torch.device(self._device or "cpu")
            self._lazy_init_scale_growth_tracker(device)
        try:
            self._check_scale_growth_tracker(method)
        except AssertionError as error:
            add_note(error, out_of_turn.NOTHING_SCALED)
            raise
        return cast(Tensor, self._scale)

    def _set_scale(self, new_scale: float | Tensor) -> bool:
        """Takes a scale from the caller; whether the flags of this iteration count as a step."""
        if self._is_guard:
            raise ValueError(
                f"this scaler's scale is always 1, got {new_scale}: it was made with dynamic=False "
                "and init_scale=1"
            )
        scale, tracker, turns = self._scale, self._growth_tracker, self._per_optimizer_states
        before = None if scale is None else scale.detach().to(torch.float32, copy=True)
        flags = [] if scale is None else flags_of(turns, self._passes.agree)
        super().update(new_scale)
        if before is None or tracker is None or not flags:
            return False
        unused = tracker.detach().clone()
        self._loss_scale.update_(before, unused, flags, (1.0, 1.0, 0), self._kernels)
        return True

    def _end_iteration(self, *, is_step: bool = True) -> None:
        """Ends an iteration, which counts as a step unless the caller only set the scale."""
        self._per_optimizer_states = defaultdict(new_turn)
        loss_scale = self._loss_scale
        loss_scale.norms = []
        if not is_step:
            return
        if self._skip_above is not None:
            if not self._norm_histories.is_compared:
                self._norm_histories.warn_of_no_use()
            self._norm_histories.is_compared = False
        watch, log, words = self._skip_watch, self._skip_log, loss_scale.words
        watch.due -= 1
        log.due -= 1
        if log.due <= 0:
            log.see(words, self)
        if watch.due <= 0:
            watch.see(words, self)


# The hooks that torch's `unscale_` and `step` call: if one is overridden, torch's methods run. What
# replaces a method later, on the class too, is a hook.
_CHECKS = "_check_scale_growth_tracker", "_get_scale_async", "_check_inf_per_device"
_HOOKS = {name: getattr(GradScaler, name) for name in ("unscale_", "_unscale_grads_", *_CHECKS)}
_MAYBE_STEP = {"_maybe_opt_step": GradScaler._maybe_opt_step}
_MORE = ("_found_inf_per_device", "step", "update")
_ALL_HOOKS = {**_HOOKS, **_MAYBE_STEP, **{name: getattr(GradScaler, name) for name in _MORE}}
GradScaler._originals = (_HOOKS, _MAYBE_STEP, _ALL_HOOKS)
