"""The passes of a scaler: from an optimizer to flags, with what observes gradients on the way."""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ampfast import backends, distributed, gradients
from ampfast.backends import scalars
from ampfast.backends.core import Factor, Pass, clip_to, riding
from ampfast.clip import global_norm
from ampfast.clip.norm_history import ClipLimit, NormHistories, Sigmas, SkipRule, skip_limit_of
from ampfast.diagnose import overflow_report
from ampfast.errors import add_note, warn_caller
from ampfast.optim.fused_support import ByOptimizer, device_of, explain
from ampfast.scaler.loss_scale import Limits, LossScale
from ampfast.scaler.max_skips import SkipWatch
from ampfast.scaler.skip_log import SkipLog
from ampfast.scaler.turn import READY, UNSCALED, Flags, TorchGradScaler, Turn, begin, new_turn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Passes(TorchGradScaler):
    """Passes over the gradients of optimizers; `GradScaler` is the state machine over them."""

    # Methods as they were, for `overrides.replace_method`.
    _originals: ClassVar[tuple[dict[str, Any], ...]] = ()
    # Whether the scaler agrees with all ranks where no group is given.
    _is_for_all = False

    # On the class for instances that torch pickled or whose __init__ was not called.
    _allow_fp16 = False
    _dynamic = True
    _backend: str | None = None
    # Whether the scale is 1 forever, so that nothing is multiplied or divided by it.
    _is_guard = False
    # The passes that unscale, check and clip by the scale, made again for another tensor.
    _passes_scale: Tensor | None = None
    _unscale_pass = _check_pass = _clip_pass = Pass(False, Factor.NONE)
    _track: str | None = None
    _skip_above: float | Sigmas | None = None
    # The skip limit of each step: infinity where norms are only kept, or None.
    _skip_limit: float | Sigmas | None = None
    _warned_of_shared_memory = False

    # Made when first asked for, also for instances that torch pickled or whose __init__ was not
    # called: the kernels by device, those for the device of the scale, the state of the scale
    # besides torch's two tensors, the ranks to agree with, the per-parameter tables, the names of
    # parameters, the last turn of each living optimizer, the norms of steps taken, for limits that
    # skip and limits that clip, and the steps skipped in a row.
    _choice = cached_property(lambda self: backends.choose(self._backend))
    _kernels = cached_property(lambda self: self._choice.kernels_for(self._scale.device))
    _loss_scale = cached_property(lambda self: LossScale(Limits()))
    _ranks = cached_property(lambda self: distributed.Ranks(is_default=self._is_for_all))
    _tracking = cached_property(
        lambda self: overflow_report.Tracking(self._names, self._track == "norms")
    )
    _names = cached_property(lambda self: overflow_report.Names())
    _last_turns = cached_property(lambda self: ByOptimizer[Turn]())
    _norm_histories = cached_property(lambda self: NormHistories())
    _skip_watch = cached_property(lambda self: SkipWatch())
    _skip_log = cached_property(lambda self: SkipLog())

    @property
    def process_group(self) -> ProcessGroup | DeviceMesh | None:
        """The ranks with which the scaler agrees, besides the ranks of DTensors."""
        return self._ranks.group

    @process_group.setter
    def process_group(self, group: ProcessGroup | DeviceMesh | None) -> None:
        distributed.require_group(group, self._device)
        self._ranks = distributed.Ranks(group, is_default=self._is_for_all)

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
        self._skip_above = self._skip_limit = skip_limit_of(limit)
        if limit is None and self._track == "norms":
            self._skip_limit = math.inf

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

    def _make_passes(self, scale: Tensor) -> Pass:
        """Makes the pass that unscales, and the one that checks for a division by the scale."""
        factor = scale.float()
        self._unscale_pass = Pass(True, *gradients.unscaling(scale))
        if self._is_guard:
            self._unscale_pass = Pass(False, Factor.NONE)
        self._check_pass = Pass(False, Factor.DIVIDE, factor)
        self._clip_pass = Pass(False, Factor.TIMES_RECIPROCAL, scale)
        # The factors of another scale are copies.
        self._passes_scale = scale if factor is scale else None
        return self._unscale_pass

    def _turn(self, optimizer: torch.optim.Optimizer) -> Turn:
        """The optimizer's turn in this iteration."""
        key, turns, last_turns = id(optimizer), self._per_optimizer_states, self._last_turns.values
        turn: Any = turns.get(key)
        if type(turn) is not Turn:
            # Others put torch's plain dicts there.
            turn = turns[key] = Turn(turn or {"stage": READY, "found_inf_per_device": {}})
        last = last_turns.get(key)
        if last is None:
            self._last_turns.record(optimizer, turn)
        elif last is not turn:
            turn.last_flags = last.get("found_inf_per_device") or last.last_flags
            last_turns[key] = turn
        taken: Turn = turn
        return taken

    def _pass(
        self,
        optimizer: torch.optim.Optimizer,
        turn: Turn,
        work: Pass,
        scale: Tensor,
        *,
        checks: bool = False,
    ) -> Flags:
        """Runs a pass over an optimizer's gradients, whose turn is unscaled then.

        One that only checks leaves the stage, and takes float16 gradients, too. One that writes
        marks the turn as unscaled first: whatever ends it early, neither a retry nor a step takes
        gradients that are half written.

        Returns:
            Flags by device, on which all ranks agree; the turn gets them, too.
        """
        marks, allow_fp16 = None if checks else turn, checks or self._allow_fp16
        agreement, flag = None, None
        if not self._ranks.is_alone:
            agreement = self._ranks.agreement(())
            if not checks:
                turn.agreement = agreement
            if work.ending is not None:
                work = riding(work, None)  # the ranks agree first
        marked: Pass | None = work
        if self._track is not None:
            marked = self._tracking.before(optimizer, work, self._loss_scale.words)
        if marked is not None:
            flag = self._kernels.pass_over(optimizer, marks, UNSCALED, marked, allow_fp16, scale)
        if flag is not None:
            flags = {flag.device: flag}
        else:
            grads = self._collect(optimizer, allow_fp16=allow_fp16, writes=work.write)
            agreement = self._agreement(grads)
            mark = None if checks else partial(begin, [turn], agreement)
            flags, _ = grads.run(work, before_write=mark)
        turn["found_inf_per_device"] = flags
        if not checks:
            turn["stage"] = UNSCALED
        if agreement is None:
            return flags
        turn.agreement = agreement
        return self._agree(turn, agreement, scale.device)

    def _agree(
        self,
        turn: Turn,
        agreement: distributed.Agreement,
        device: torch.device,
    ) -> Flags:
        """Gives a turn the flags of all ranks.

        Until then it has the agreement: `step` or `update` retries a collective that failed.
        """
        (flags,) = agreement.all_reduce([turn["found_inf_per_device"]], device)
        turn["found_inf_per_device"] = flags
        turn.agreement = None
        return flags

    def _checked_scale(self, method: str, *optimizers: Any) -> Tensor:
        """The scale, of which torch's own method checks that it was made; a guard makes it here."""
        if self._is_guard and self._scale is None:
            try:
                device = device_of(optimizers)
            except AttributeError as error:
                explain(error, optimizers[0], "param_groups")
                raise
            device = device or self._ranks.device or torch.device(self._device or "cpu")
            self._lazy_init_scale_growth_tracker(device)
        try:
            self._check_scale_growth_tracker(method)
        except AssertionError as error:
            remedy = (
                "The scaler whose scale() was given the loss must unscale, clip, step and update, "
                "too. Gradients that need no scale: see ampfast.StepGuard, or enabled=False."
            )
            add_note(error, remedy)
            raise
        if self._scale is None:
            raise AssertionError(f"_scale is None in {method}")
        return self._scale

    def _flags(self, scale: Tensor, but: int | None = None) -> list[Tensor]:
        """The found_inf tensors of this iteration, on which ranks agree, but one optimizer's."""
        flags: list[Tensor] = []
        for key, turn in self._per_optimizer_states.items():
            if type(turn) is Turn and turn.agreement is not None:
                self._agree(turn, turn.agreement, scale.device)
            flags += turn["found_inf_per_device"].values() if key != but else ()
        return flags

    def _unscale_below(
        self, limit: float | Sigmas, optimizer: Any, turn: Turn, scale: Tensor, *, defers: bool
    ) -> None:
        """Unscales, or lets the step unscale, and skips a step of a norm above the limit."""
        rule = self._norm_histories.skip_rule(optimizer, limit, scale.device)
        norm = self._clip([optimizer], scale, math.inf, 2.0, rule, [defers], turns=[turn])
        self._record([optimizer], norm, 2.0, rule)

    def _record(
        self, optimizers: list[Any], norm: Tensor, order: float, rule: SkipRule | None
    ) -> None:
        """Records the norm of a clip, and that it was compared."""
        self._loss_scale.record_norm(optimizers, norm, order)
        for each in optimizers if self._track == "norms" else ():
            self._tracking.record_norms(each)
        if rule is not None:
            self._norm_histories.compared(optimizers[0], rule)

    def _clip(
        self,
        optimizers: list[Any],
        scale: Tensor | None,
        limit: float | ClipLimit,
        order: float,
        rule: SkipRule | None,
        defers: list[bool],
        overridden: bool = False,
        turns: list[Turn] | None = None,
    ) -> Tensor:
        """Clips gradients, scaled by `scale`, or lets the steps of optimizers that defer clip.

        Without a limit they are unscaled as they are measured. `overridden`: a hook decides on
        infinities.
        """
        if overridden:
            # What the hook finds counts, and what it writes is clipped.
            for each in optimizers:
                self.unscale_(each)
        left = None if overridden else scale  # by which gradients are scaled still
        terms = self._clip_terms(optimizers, left, limit, defers, clips=turns is None)
        # A fused step with a limit divides as often as torch's does.
        is_only_read = turns is not None and not any(term.writes for term in terms)
        if turns is None:
            turns = [new_turn() if scale is None else self._turn(each) for each in optimizers]
        agreement = self._agreement(*(term.grads for term in terms))
        if left is not None and not is_only_read and global_norm.share_memory(terms):
            terms = self._unscaled_first(optimizers, turns, left, agreement)
            defers = [False] * len(terms)
        divisor = None
        if left is not None and any(defers):
            divisor = scalars.allocate(torch.empty, (), dtype=torch.float32, device=left.device)
        if overridden:
            global_norm.take_flags(terms, turns, copies=rule is not None)
        global_norm.require_writable(terms, defers)
        # Ranks agree first: a collective that fails leaves gradients to be measured again.
        alone = left is not None and agreement is None
        if alone and global_norm.unscale_as_read(terms, order, limit):
            begin(turns)
        pending = [turn for turn in turns if agreement is not None and turn["stage"] is READY]
        most: Any = limit
        if not isinstance(limit, float):
            most = partial(self._norm_histories.clip_limit, optimizers[0], limit)
        norm, coefficient = global_norm.measure(
            self._choice, terms, order, most, scale, divisor, agreement, rule, pending
        )
        for turn in turns:
            turn.agreement = None  # as all ranks have agreed
        if not overridden:
            begin(turns)
        global_norm.clip_(terms, coefficient)
        if scale is not None:
            global_norm.skip_together(terms, scale.device)
        # Last: until now the turns say "skip".
        global_norm.give_flags(terms, turns, defers, divisor)
        return norm

    def _clip_terms(
        self,
        optimizers: list[Any],
        scale: Tensor | None,
        limit: float | ClipLimit,
        defers: list[bool],
        clips: bool,
    ) -> list[global_norm.NormTerm]:
        """The gradients of a clip; a guard without a limit writes none."""
        writes_nothing = self._is_guard and limit == math.inf  # as values times 1
        return [
            self._norm_term(
                each,
                scale,
                writes=not deferred and not writes_nothing,
                divides=deferred,
                clips=clips,
            )
            for each, deferred in zip(optimizers, defers, strict=True)
        ]

    def _unscaled_first(
        self,
        optimizers: list[Any],
        turns: list[Turn],
        scale: Tensor,
        agreement: distributed.Agreement | None = None,
        allow_fp16: bool = False,
    ) -> list[global_norm.NormTerm]:
        """Unscales gradients that share memory, each as often as it is listed, as torch does."""
        if not self._warned_of_shared_memory:
            self._warned_of_shared_memory = True
            warn_caller(
                "Some gradients share memory, as those of a parameter that is listed twice, or one "
                "overlaps itself: as by torch, what is shared is unscaled, counted in the norm and "
                "clipped as often as it is shared. List each parameter once."
            )
        terms = [
            self._norm_term(each, scale, writes=True, allow_fp16=allow_fp16) for each in optimizers
        ]
        global_norm.require_writable(terms)
        begin(turns, agreement)
        for term in terms:
            term.grads.run(Pass(True, *term.unscaling))
        return [self._norm_term(each, None, writes=True) for each in optimizers]

    def _measure(
        self,
        optimizers: list[Any],
        scales: list[Tensor | None],
        order: float,
        scale: Tensor | None,
    ) -> Tensor:
        """The joint norm of gradients, which are scaled by `scales` and stay so."""
        pairs = zip(optimizers, scales, strict=True)
        terms = [
            self._norm_term(each, its_scale, writes=False, allow_fp16=True)
            for each, its_scale in pairs
        ]
        saved: list[tuple[Tensor, Tensor]] = []
        try:
            if scale is not None and global_norm.share_memory(terms):
                for place, term in enumerate(terms):
                    if scales[place] is not None:
                        params = (param for group in term.grads.groups for param in group)
                        grads = [param.grad.detach() for param in params if param.grad is not None]
                        saved += [(grad, grad.clone()) for grad in grads]
                        (terms[place],) = self._unscaled_first(
                            [term.optimizer], [], scale, allow_fp16=True
                        )
            agreement = self._agreement(*(term.grads for term in terms))
            return global_norm.measure(
                self._choice, terms, order, math.inf, scale, agreement=agreement
            )[0]
        finally:
            for grad, values in reversed(saved):
                grad.copy_(values)

    def _clip_over(
        self,
        optimizer: torch.optim.Optimizer,
        turn: Turn,
        scale: Tensor,
        limit: float | ClipLimit,
        order: float,
        rule: SkipRule | None,
    ) -> Tensor | None:
        """Clips an optimizer's gradients by one call, or returns None where that cannot."""
        if limit == math.inf or not isinstance(limit, float):
            return None
        if order not in global_norm.FUSED_ORDERS or not self._ranks.is_alone:
            return None
        if self._passes_scale is not scale:
            self._make_passes(scale)
        work = self._clip_pass
        marked: Pass | None = work
        if self._track is not None:
            marked = self._tracking.before(optimizer, work, self._loss_scale.words)
        if marked is None:
            return None
        rule = (math.inf, None) if rule is None else rule
        clip = clip_to(limit, order == math.inf, *rule)
        given = (optimizer, turn, UNSCALED, marked, self._allow_fp16, scale)
        norm: Tensor | None = self._kernels.clip_over(*given, clip)
        return norm

    def _norm_term(
        self,
        optimizer: Any,
        scale: Tensor | None,
        *,
        writes: bool,
        allow_fp16: bool = False,
        divides: bool = False,
        clips: bool = True,
    ) -> global_norm.NormTerm:
        """The gradients of an optimizer in a norm; `scale` is None where they are not scaled."""
        allow_fp16 = allow_fp16 or divides or scale is None or self._allow_fp16
        grads = self._collect(
            optimizer, allow_fp16=allow_fp16, writes=writes, measures=True, clips=clips
        )
        unscaling = gradients.unscaling(scale, divides=divides)
        return global_norm.NormTerm(optimizer, grads, unscaling, writes)

    def _collect(
        self,
        optimizer: Any,
        *,
        allow_fp16: bool,
        writes: bool,
        measures: bool = False,
        clips: bool = False,
    ) -> gradients.Gradients:
        """Walks over an optimizer's gradients, which are tracked."""
        if hasattr(type(optimizer), "widen_gradients"):
            optimizer.widen_gradients()
        grads = gradients.collect(
            optimizer.param_groups,
            allow_fp16=allow_fp16,
            writes=writes,
            choice=self._choice,
            clips=measures,
            bumps_versions=clips,
            shards=self._ranks.local_shards(),
            tracked=self._track is not None,
        )
        # A disabled scaler has no steps.
        tracks = self._enabled and self._track is not None
        scale = self._get_scale_async() if tracks else None
        if scale is not None:
            words = self._loss_scale.words_on(scale.device)
            grads.track_on = self._tracking.start(optimizer, grads.groups, words)
        return grads

    def _agreement(self, *passes: gradients.Gradients) -> distributed.Agreement | None:
        """The agreement of the ranks that hold other shards of these gradients, if there are any.

        A disabled scaler needs no process group.
        """
        layouts = [layout for grads in passes for layout in grads.layouts.values()]
        ranks = self._ranks
        if not layouts and (ranks.is_alone or not (self._enabled or dist.is_initialized())):
            return None
        return ranks.agreement(layouts)
