"""What a scaler finds in gradients: the passes over them, who agrees on them, what it tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from ampfast import backends, distributed, gradients, overflow
from ampfast.backends import aten
from ampfast.distributed import Agreement, Layout
from ampfast.errors import ONCE, add_note, refuse_capture
from ampfast.optimizers import LastChecks
from ampfast.overflow import GradientHealth, OverflowReport
from ampfast.scale_keeper import ScaleKeeper

__all__ = ["CHECK", "HOST_DECIDES", "MAYBE_STEP", "UNSCALE", "GradientChecker", "originals"]

# Values of `track` that overflow_report() needs; health() needs the last.
_KEYWORDS = ("overflow", "health")

# Why a step of a plain optimizer is not captured, and what to do.
HOST_DECIDES = (
    "a step that the host may skip",
    "take an optimizer with fused=True, which decides on the device, and capturable=True if it has "
    "that argument",
)


class GradientChecker(ScaleKeeper):
    """The part of `GradScaler` that reads gradients; `GradScaler` says when."""

    # On the class for instances that torch pickled or whose __init__ was not called.
    _allow_fp16 = False
    _last_checks: LastChecks | None = None
    _track: str | None = None
    _tracking: overflow.Tracking | None = None
    _ranks: distributed.Ranks | None = None
    # Whether it agrees with all ranks where no group is given.
    _is_for_all = False

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Returns whether the optimizer's last check found infinities or NaN; no host sync.

        Args:
            optimizer: One that was given to `step` or `unscale_`.

        Returns:
            A new 0-dim float32 tensor, 0 or 1, on the device of the scale; 0 if disabled.

        Raises:
            LookupError: If this optimizer was never checked.
        """
        if not self._enabled:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        flags = None if self._last_checks is None else self._last_checks.get(optimizer)
        if flags is None:
            raise LookupError(
                f"this optimizer ({type(optimizer).__name__}) was never checked: "
                "call step() or unscale_() first"
            )
        scale = self._get_scale_async()
        device = torch.device("cpu") if scale is None else scale.device
        return aten.any_found(flags.values(), device)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether the optimizer's last step was skipped, with one host sync.

        After `unscale_` alone it tells whether the step will be. Right for fused optimizers too.

        Args:
            optimizer: As for `found_inf`.

        Raises:
            LookupError: If this optimizer was never checked.
        """
        refuse_capture("a question that the host asks", "ask after the replay")
        return bool(self.found_inf(optimizer).item())

    def name_parameters(self, model: torch.nn.Module | Iterable[tuple[str, Tensor]]) -> None:
        """Gives parameters the names under which `overflow_report` and `health` list them.

        May be called at any time, and once more for another model. The names belong to these
        parameters, not to copies of them, and are not part of a pickle.

        Args:
            model: A module, or pairs as from its `named_parameters()`.

        Raises:
            TypeError: If it is something else.
            ValueError: If a name is given twice.
        """
        pairs = overflow.named(model)
        if self._track is not None:
            self._notes().name(pairs)

    def overflow_report(self, *, local: bool = False) -> OverflowReport:
        """Returns which parameters' gradients were not finite in the last skipped step.

        What counts is the value that the optimizer would have used. The counts belong to living
        optimizers: they are in no pickle or checkpoint, and start anew if an optimizer loses
        parameters. One host sync.

        With a `process_group` or distributed gradients the ranks tell each other what they noted,
        by the names of parameters and their places, so that all of them must call this; a count is
        that of the rank where it is highest.

        Args:
            local: Only what this rank noted, without asking the others.

        Raises:
            RuntimeError: Without `track`, under capture, or if an override of `_unscale_grads_`
                keeps the gradients from the kernels.
            ValueError: If `name_parameters` named no parameter of one of the optimizers.
        """
        report = self._report("overflow_report", _KEYWORDS).overflow_report()
        if local or not self._enabled:
            return report
        return OverflowReport.of_all(self._others().gathered(report))

    def health(self) -> GradientHealth:
        """Returns how the values of the last gradients, still scaled, fit the range of float16.

        Of distributed gradients, those of this rank's shards.
        Of each optimizer, those of its last iteration. One host sync.

        Raises:
            RuntimeError: Without `track="health"`; else as `overflow_report`.
            ValueError: As `overflow_report`.
        """
        return self._report("health", _KEYWORDS[1:]).health()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Weak references, which are of this process.
        for name in ("_last_checks", "_tracking"):
            state.pop(name, None)
        if self._ranks is not None and self._ranks.is_alone:
            state.pop("_ranks")
        return state

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool | None = None,
    ) -> dict[torch.device, Tensor]:
        if allow_fp16 is None:
            allow_fp16 = self._allow_fp16  # FSDP's scaler need not be told
        grads = self._collect(optimizer, allow_fp16=allow_fp16, writes=True)
        tracks = self._tracks(optimizer, grads)
        flags = gradients.unscale_(
            grads,
            inv_scale,
            choice=self._kernels(),
            is_scale=False,
            found_inf=found_inf,
            tracks=tracks,
        )
        return self._agreed(self._agreement([grads]), flags)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        if self._overrides(UNSCALE):
            one = torch.full((), 1.0, dtype=torch.float32, device=scale.device)
            zero = torch.full((), 0.0, dtype=torch.float32, device=scale.device)
            flags = self._unscale_grads_(optimizer, one, zero, True)
            flags = self._agreed(self._others().agreement_on(optimizer.param_groups), flags)
        else:
            grads = self._collect(optimizer, allow_fp16=True, writes=False)
            tracks = self._tracks(optimizer, grads)
            flags = gradients.check_(grads, choice=self._kernels(), tracks=tracks)
            flags = self._agreed(self._agreement([grads]), flags)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        flags = optimizer_state["found_inf_per_device"]
        on_gpu = [flag for flag in flags.values() if isinstance(flag, Tensor) and flag.is_cuda]
        if on_gpu:
            refuse_capture(*HOST_DECIDES)
        if len(on_gpu) > 1:
            # In one place, so that the host waits once.
            place = on_gpu[0].device
            total = sum(aten.moved(flag, place) for flag in on_gpu)
            others = {key: flag for key, flag in flags.items() if not flag.is_cuda}
            optimizer_state = {
                **optimizer_state,
                "found_inf_per_device": {**others, place: total},
            }
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def _unscale(self, optimizer: torch.optim.Optimizer, update: backends.Update | None) -> None:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise add_note(
                RuntimeError(
                    "unscale_() has already been called on this optimizer since the last update()."
                ),
                f"clip_grad_norm_() unscales, too. {ONCE}",
            )
        if state["stage"] is OptState.STEPPED:
            raise add_note(RuntimeError("unscale_() is being called after step()."), ONCE)
        if self._overrides(UNSCALE):
            inv_scale = gradients.inverse(scale)
            found_inf = torch.full((), 0.0, dtype=torch.float32, device=scale.device)
            flags = self._unscale_grads_(optimizer, inv_scale, found_inf, self._allow_fp16)
            flags = self._agreed(self._others().agreement_on(optimizer.param_groups), flags)
        else:
            grads = self._collect(optimizer, allow_fp16=self._allow_fp16, writes=True)
            is_scale = scale.dtype is torch.float32
            factor = scale if is_scale else gradients.inverse(scale)
            agreement, tracks = self._agreement([grads]), self._tracks(optimizer, grads)
            flags = gradients.unscale_(
                grads,
                factor,
                choice=self._kernels(),
                is_scale=is_scale,
                update=None if agreement else update,
                tracks=tracks,
            )
            flags = self._agreed(agreement, flags)
        state["found_inf_per_device"] = flags
        state["stage"] = OptState.UNSCALED
        if flags:
            self._record(optimizer, flags)

    def _collect(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        allow_fp16: bool,
        writes: bool,
        clips: bool = False,
    ) -> gradients.Gradients:
        return gradients.collect(
            optimizer.param_groups,
            allow_fp16=allow_fp16,
            writes=writes,
            choice=self._kernels(),
            clips=clips,
            parts=self._others().parts(),
            tracked=self._track is not None,
        )

    def _others(self) -> distributed.Ranks:
        if self._ranks is None:
            self._ranks = distributed.Ranks(is_default=self._is_for_all)
        return self._ranks

    def _agreement(self, passes: Sequence[gradients.Gradients]) -> Agreement | None:
        """How the ranks that hold other parts of these gradients agree, if there are any."""
        others = self._others()
        layouts: list[Layout] = []
        for grads in passes:
            if grads.parts is not None:
                layouts += grads.parts.layouts.values()
        if not layouts and (others.is_alone or not (self._enabled or dist.is_initialized())):
            return None
        return others.agreement(layouts)

    def _agreed(self, agreement: Agreement | None, flags: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """What all ranks found together, where a pass here found `flags`."""
        scale = None if agreement is None else self._get_scale_async()
        if agreement is None or scale is None:
            return flags
        return agreement.share([flags], scale.device)[0]

    def _tracks(
        self, optimizer: torch.optim.Optimizer, grads: gradients.Gradients
    ) -> overflow.Tracks | None:
        """Where the pass that begins notes what it sees of each parameter."""
        scale = None if self._track is None else self._get_scale_async()
        if scale is None:
            return None
        state = self._per_optimizer_states.get(id(optimizer))
        is_scaled = state is None or state["stage"] is OptState.READY
        steps = self._kept().on(scale.device)
        return self._notes().start(optimizer, grads.groups, scale, steps, measures=is_scaled)

    def _notes(self) -> overflow.Tracking:
        if self._tracking is None:
            self._tracking = overflow.Tracking(health=self._track == "health")
        return self._tracking

    def _report(self, method: str, keywords: tuple[str, ...]) -> overflow.Tracking:
        if self._track not in keywords:
            kinds = " or ".join(map(repr, keywords))
            raise RuntimeError(
                f"{method}() needs a scaler that was made with track={kinds}; this one has "
                f"track={self._track!r}"
            )
        refuse_capture("a report that the host reads", "ask after the replay")
        notes = self._notes()
        if self._enabled and notes.is_empty and self._overrides(UNSCALE):
            raise RuntimeError(
                f"{method}() knows nothing: {type(self).__name__} overrides _unscale_grads_, and "
                "only gradients that ampfast's own method reads are tracked"
            )
        return notes

    def _record(self, optimizer: object, flags: dict[Any, Tensor]) -> None:
        if self._last_checks is None:
            self._last_checks = LastChecks()
        self._last_checks.record(optimizer, flags)

    def _end_iteration(self) -> None:
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._norms = None
        if self._last_checks is not None:
            self._last_checks.end_iteration()
        if self._tracking is not None:
            self._tracking.end_iteration()

    def _overrides(self, hooks: dict[str, Callable[..., Any]]) -> bool:
        """Whether a subclass or this instance replaced one of `hooks`."""
        kind, own = type(self), self.__dict__
        for name, hook in hooks.items():
            if getattr(kind, name) is not hook or name in own:
                return True
        return False


def originals(kind: type, *names: str) -> dict[str, Callable[..., Any]]:
    """Returns methods as they are now: what replaces one later, on the class too, is a hook."""
    return {name: getattr(kind, name) for name in names}


UNSCALE = originals(GradientChecker, "_unscale_grads_")
MAYBE_STEP = originals(GradientChecker, "_maybe_opt_step")
CHECK = originals(GradientChecker, "_unscale_grads_", "_check_inf_per_device")
