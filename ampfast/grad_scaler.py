"""The drop-in gradient scaler: torch's state machine over ampfast's kernels."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.cuda.amp.common import amp_definitely_not_available

from ampfast import backends, clipping, distributed, gradients, rank_check, tracking
from ampfast._version import __version__
from ampfast.backends import aten, native
from ampfast.capture import refuse_capture
from ampfast.gradient_reports import GradientHealth, OverflowReport
from ampfast.last_checks import LastChecks
from ampfast.notes import ONCE, add_note, warn_caller
from ampfast.optimizers import lacks_momentum, no_inf_checks, takes_grad_scaler
from ampfast.report import History, ScalerStats
from ampfast.scale_state import ScalePolicy, ScaleState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["GradScaler", "OptState"]


Method = TypeVar("Method", bound=Callable[..., Any])


def _not_compiled(method: Method) -> Method:
    """Keeps torch.compile out of a method and of what it calls."""
    return cast(Method, torch._disable_dynamo(method, recursive=True))


class GradScaler(TorchGradScaler):
    """A `torch.amp.GradScaler` that reads the gradients once and never corrupts a model.

    One iteration, for gradients g, scale s and optimizer o::

        scale(loss)   s * loss, so that small float16 gradients do not vanish
        unscale_(o)   g <- g * (1 / s); found_inf <- 1 if a value written is not finite, else 0
        step(o)       unscale_(o) unless done; o.step() unless found_inf. An optimizer that takes
                      `grad_scale` and `found_inf` (torch's fused ones) divides by itself: its
                      gradients are only read, and found_inf <- max|g| / grad_scale is not finite
        update()      if any found_inf: s <- s * backoff_factor; else, every growth_interval
                      iterations in a row: s <- s * growth_factor, unless that overflows

    Everything observable is torch's bit for bit, except what the README lists under "Differences
    from torch.amp.GradScaler". Source of the contract: torch/amp/grad_scaler.py.

    Args:
        device: Device type, as for torch; with "cuda" and no CUDA the scaler disables itself.
        init_scale: Initial scale.
        growth_factor: Factor of growth, above 1.
        backoff_factor: Factor after an overflow, below 1.
        growth_interval: Iterations without overflow before the scale grows; below 1: never.
        enabled: If False, every method is a no-op, `step` calls the optimizer's, `clip_grad_norm_`
            clips as torch's function does, in place, and `grad_norm` measures.
        backend: "triton", "cuda", "cpu" or "aten" for the devices that it serves; None for
            `AMPFAST_BACKEND`, else the best there is.
        allow_fp16: Whether float16 gradients may be unscaled; torch always refuses.
        min_scale: What the scale never goes below when it backs off. It and `max_scale` hold for
            what the scaler does; a scale that is set beyond them is left until it comes within.
        max_scale: What the scale never goes above when it grows.
        on_min_scale: "ignore", "warn" or "raise" FloatingPointError, from `update` and `stats`,
            when a step is skipped with the scale at its minimum. On a GPU nothing waits for that
            knowledge, so that it may come one step late.
        hysteresis: The scale backs off from this overflow since the refill on, at every one, as in
            Megatron-LM.
        hysteresis_refill: When the overflows are counted from 0 again: when the scale's "growth" is
            due, as in Megatron-LM, or after a "finite_step", as in apex.
        dynamic: If False, the scale stays: `growth_interval` is 0 and `backoff_factor` 1, whatever
            is given for them.
        process_group: The ranks that hold other parts of the gradients, as shards, stages or
            tensor-parallel parts: a group, or a mesh with all its dimensions. What one finds, all
            skip for, which takes one small collective for every optimizer, and a norm is that of
            all parts together; `mark_replicated` names the parameters that are alike on all ranks.
            Gradients that are DTensors are agreed on without.
        track: What is noted of each parameter while its gradient is read: "overflow" for
            `overflow_report`, "health" for `health`, too; None for nothing.

    Raises:
        AssertionError: If a factor is on the wrong side of 1.
        TypeError: If `device` is a number or a keyword has the wrong type.
        ValueError: If `backend` or `track` is unknown, the scale's limits or hysteresis make no
            sense, or `process_group` does not contain this rank or is of another device type.
        RuntimeError: If `backend` cannot run here.
    """

    # On the class for instances that torch pickled or whose __init__ was not called.
    _backend: str | None = None
    _choice: backends.Choice | None = None
    _allow_fp16 = False
    _warned_of_zero = False
    _last_checks: LastChecks | None = None
    _scale_state: ScaleState | None = None
    _dynamic = True
    # By the ids of optimizers, which live as long as the iteration.
    _norms: dict[frozenset[int], tuple[Tensor, float]] | None = None
    _track: str | None = None
    _tracking: tracking.Tracking | None = None
    _ranks: distributed.Ranks | None = None
    # Whether it agrees with all ranks where no group is given.
    _is_for_all = False
    # What the class behind this one gets besides.
    _base_arguments: ClassVar[dict[str, Any]] = {}

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
        on_min_scale: str = "ignore",
        hysteresis: int = 1,
        hysteresis_refill: str = "growth",
        dynamic: bool = True,
        process_group: ProcessGroup | DeviceMesh | None = None,
        track: str | None = None,
    ) -> None:
        if isinstance(device, Number):
            raise TypeError(
                f"device must be a device type such as 'cuda', got the number {device!r}; write "
                f"init_scale={device!r}, or use ampfast.patch(), under which "
                "torch.cuda.amp.GradScaler takes it first"
            )
        for name, value in (("allow_fp16", allow_fp16), ("dynamic", dynamic)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
        policy = ScalePolicy(min_scale, max_scale, hysteresis, hysteresis_refill)
        state = ScaleState(policy, on_min_scale)
        policy.require_within(init_scale)
        if not dynamic and not policy.is_torchs:
            raise ValueError(
                "a scale with dynamic=False never changes: it takes no min_scale, max_scale or "
                "hysteresis"
            )
        tracking.require_known(track)
        distributed.require_group(process_group, device)
        if enabled:
            choice = backends.choose(backend)
        else:
            backends.require_known(backend)
            choice = None
        # torch would do so too, but its warning would point here instead of at the caller.
        if enabled and device == "cuda" and amp_definitely_not_available():
            warn_caller(
                "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
            )
            enabled = False
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            **self._base_arguments,
        )
        self.process_group = process_group
        self._backend = backend
        self._choice = choice
        self._allow_fp16 = allow_fp16
        self._scale_state = state
        self._dynamic = dynamic
        if enabled and not dynamic:
            self._growth_interval, self._backoff_factor = 0, 1.0
        self._track = track

    @property
    def process_group(self) -> ProcessGroup | DeviceMesh | None:
        """The ranks with which the scaler agrees, besides those of DTensors."""
        return self._others().group

    @process_group.setter
    def process_group(self, group: ProcessGroup | DeviceMesh | None) -> None:
        distributed.require_group(group, self._device)
        self._ranks = distributed.Ranks(group, is_default=self._is_for_all)

    # A compiler that traces the state machine around a kernel loses what is written to its dicts.
    @_not_compiled
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscales the optimizer's gradients in place and checks them; no host sync.

        Args:
            optimizer: Any object with `param_groups`.

        Raises:
            AssertionError: If nothing was scaled yet.
            RuntimeError: If called twice, or after `step`, since the last `update`.
            ValueError: If a gradient is float16 and `allow_fp16` is not set; its note says which.
        """
        if self._enabled:
            self._unscale(optimizer, None)

    @_not_compiled
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales unless that is done, then calls the optimizer's step if all is finite.

        Args:
            optimizer: Any object with `param_groups` and `step`.
            *args: Passed on.
            **kwargs: Passed on; a closure is refused.

        Returns:
            What `optimizer.step` returned, or None if the step was skipped.

        Raises:
            AssertionError: If nothing was scaled yet, or no gradient was found.
            RuntimeError: If called twice since the last `update`, or with a closure.
            ValueError: As `unscale_`.
        """
        return self._step(optimizer, args, kwargs, None)

    @_not_compiled
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale from what the iteration's checks found, or sets it; no host sync.

        Args:
            new_scale: A float or a one-element tensor on the scaler's device type; None for the
                automatic update.

        Raises:
            AssertionError: If nothing was scaled or checked since the last update, or `new_scale`
                is not as described.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._set_scale(new_scale)
        else:
            scale, growth_tracker = self._check_scale_growth_tracker("update")
            flags = self._flags_besides(None, scale.device)
            if not flags:
                raise add_note(
                    AssertionError("No inf checks were recorded prior to update."),
                    "Neither step() nor unscale_() found a gradient since the last update().",
                )
            self._update(scale, growth_tracker, flags)
        self._end_iteration()
        if new_scale is None:
            self._kept().heed_minimum()

    @_not_compiled
    def step_and_update(self, *optimizers: torch.optim.Optimizer) -> list[float | None]:
        """`step` for each optimizer, then `update`, which rides in the last check where it can.

        Nobody can look in between: while the last optimizer steps, `get_scale()` is the next scale
        already, and what its `step` writes to the scaler comes too late for the update. If it
        raises, the scale is as if `update` had not been called.

        Args:
            *optimizers: As for `step`.

        Returns:
            What `step` returned for each.

        Raises:
            TypeError: If a list or tuple is given in place of an optimizer; else as `step` and
                `update`.
        """
        for optimizer in optimizers:
            if isinstance(optimizer, (list, tuple)):
                raise TypeError(
                    "step_and_update takes optimizers one by one, as in step_and_update(a, b), "
                    f"got a {type(optimizer).__name__}"
                )
        *first, last = optimizers or (None,)
        if last is None or not self._enabled or self._overrides(_HOOKS):
            results = [self.step(optimizer) for optimizer in optimizers]
            self.update()
            return results
        results = [self.step(optimizer) for optimizer in first]
        scale, growth_tracker = self._check_scale_growth_tracker("step")
        flags = self._flags_besides(last, scale.device)
        update = self._scale_update(scale, growth_tracker, flags)
        try:
            results.append(self._step(last, (), {}, update))
        except BaseException:
            if update is not None and update.applied:
                update.undo()
            raise
        if update is not None and update.applied:
            update.bump_version()
            self._end_iteration()
            self._kept().heed_minimum()
        else:
            self.update()
        return results

    @_not_compiled
    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        in_place: bool = True,
    ) -> Tensor:
        """Unscales gradients and clips them by their total norm; no host sync.

        It takes the place of `unscale_` and `torch.nn.utils.clip_grad_norm_`: the norm comes with
        the check, in one read, and then what unscaling would write is multiplied by
        min(1, max_norm / (norm + 1e-6)), in one pass. Gradients are checked here: what is written
        to them later is not. A norm that is not finite needs no
        `error_if_nonfinite`: its step is skipped, unless finite gradients are so large that only
        their norm overflows, which makes them 0, as in torch.

        Args:
            optimizer: One, or a list or tuple of them whose gradients are clipped by their joint
                norm; if one must be skipped, all are. Anything with `param_groups`.
            max_norm: At least 0; infinity leaves the gradients at what `unscale_` writes.
            norm_type: Above 0; "inf" for the largest magnitude. Others than 2 and infinity are
                taken by torch's ops.
            in_place: If False, the gradients stay scaled and unclipped: an optimizer that takes
                `grad_scale` gets scale / coefficient for it, times its own, and its gradients are
                only read; they count as 0 where that overflows float32. One with the older
                `grad_scaler` keyword is clipped in place all the same.

        Returns:
            The norm before clipping: a new 0-dim tensor on the device of the first gradients,
            float32, or float64 if a gradient is. On GPUs, squares of float32 and 16-bit gradients
            are float32 until a window of 8 KiB is summed, so it can be infinite or 0 where those
            overflow or vanish.

        Raises:
            AssertionError: If nothing was scaled yet.
            RuntimeError: After `unscale_`, `clip_grad_norm_` or `step` since the last `update`.
            TypeError: If an argument has the wrong type.
            ValueError: If `max_norm` or `norm_type` is out of range, an optimizer is given twice or
                cannot take `in_place=False`, or as `unscale_`.
        """
        return clipping.clip_grad_norm_(
            self, optimizer, max_norm, norm_type, in_place, self._overrides(_CLIP)
        )

    @_not_compiled
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
        return clipping.grad_norm(self, optimizer, norm_type)

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
        pairs = tracking.named(model)
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

    def get_scale(self) -> float:
        """Returns the scale, with one host sync, or 1.0 if disabled; warns once that 0 stays 0."""
        if self._enabled:
            refuse_capture("a scale that the host reads", "read it after the replay")
        scale = super().get_scale()
        if scale == 0.0 and not self._warned_of_zero:
            self._warned_of_zero = True
            warn_caller(
                "The scale is 0 and cannot recover: every step will be skipped. Set it with "
                "update(new_scale), and look for NaN in the model or its input."
            )
        return scale

    def stats(self) -> ScalerStats:
        """Returns the counts of steps since the scaler was made, with one host sync.

        Raises:
            FloatingPointError: As `update`, with `on_min_scale="raise"`.
        """
        if not self._enabled:
            return ScalerStats(0, 0, 0, 0, 0, 1.0, 0)
        if self._scale is None or self._growth_tracker is None:
            scale = torch.tensor(self.get_scale(), dtype=torch.float32, device="cpu")
            tracker = torch.tensor(self._init_growth_tracker, dtype=torch.int32, device="cpu")
        else:
            scale, tracker = self._scale, self._growth_tracker
            refuse_capture("counts that the host reads", "read them after the replay")
        return self._kept().stats(scale, tracker)

    def history(self) -> History:
        """Returns the last 1,024 steps, with one host sync."""
        refuse_capture("a history that the host reads", "read it after the replay")
        return self._kept().history()

    def state_dict(self) -> dict[str, Any]:
        """As torch's; with limits of the scale or hysteresis, one more entry, "ampfast"."""
        state = super().state_dict()
        kept = self._kept()
        if self._enabled and not kept.policy.is_torchs:
            state["ampfast"] = kept.policy.state_dict(kept.hysteresis_tracker())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which checkpoints of torch's scaler may come from.

        Raises:
            RuntimeError: If the checkpoint is of a disabled scaler.
            ValueError: If it is of a scaler with other limits or hysteresis, its scale is beyond
                this one's limits, or only one of the two is static. As with torch, a scaler
                without limits and hysteresis becomes static. Nothing is loaded then.
        """
        kept = self._kept()
        tracker = kept.policy.hysteresis
        if self._enabled:
            if not self._dynamic and not _is_static(state_dict):
                raise ValueError(
                    "this scaler was made with dynamic=False, but the checkpoint's scale changes: "
                    f"growth_interval {state_dict.get('growth_interval')}, backoff_factor "
                    f"{state_dict.get('backoff_factor')}"
                )
            if state_dict and "ampfast" in state_dict:
                tracker = kept.policy.tracker_of(state_dict["ampfast"])
            if state_dict and not kept.policy.is_torchs:
                kept.policy.require_within(state_dict["scale"], "the checkpoint's scale")
                if _is_static(state_dict):
                    raise ValueError(
                        "the checkpoint's scale is static, but this scaler was made with limits or "
                        "hysteresis, which are for one that changes"
                    )
        super().load_state_dict(state_dict)
        if self._enabled:
            kept.set_hysteresis_tracker(tracker)
            kept.forget_minimum()

    def check_ranks(self) -> None:
        """Raises the same error on every rank if their scalers' settings or states differ.

        Every rank of the process group calls it, or of the default group where the scaler has none.
        It compares the arguments of the constructor, except `backend`, the scale and the counts
        that decide on it, and the versions of torch and ampfast; with host syncs. Of disabled
        scalers less. Without an initialised process group it does nothing.

        Raises:
            RuntimeError: Naming what differs on which ranks, or under capture.
        """
        refuse_capture("a comparison that the host makes", "compare after the replay")
        kept = self._kept()
        settings = {
            "enabled": self._enabled,
            "device": torch.device(self._device).type,
            **{name.strip("_"): value for name, value in super().state_dict().items()},
            **kept.policy.state_dict(kept.hysteresis_tracker()),
            "on_min_scale": kept.on_min_scale,
            "dynamic": self._dynamic,
            "allow_fp16": self._allow_fp16,
            "track": self._track,
            "torch": str(torch.__version__),
            "ampfast": __version__,
        }
        rank_check.require_same(settings, self._others())

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Of this process: weak references, and what its backends can.
        for name in ("_last_checks", "_choice", "_norms", "_tracking"):
            state.pop(name, None)
        if self._ranks is not None and self._ranks.is_alone:
            state.pop("_ranks")
        # A shallow copy of a scaler counts by itself, too.
        state["_scale_state"] = copy.deepcopy(self._scale_state)
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
        if self._overrides(_UNSCALE):
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
            refuse_capture(*_HOST_DECIDES)
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

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if str(dev) != "cpu":
            refuse_capture("the creation of the scale, which every replay would reset")
        super()._lazy_init_scale_growth_tracker(dev)
        if self._scale is not None:
            self._kept().on(self._scale.device)

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
        if self._overrides(_UNSCALE):
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

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        update: backends.Update | None,
    ) -> float | None:
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise add_note(
                RuntimeError("step() has already been called since the last update()."), ONCE
            )

        if getattr(optimizer, "_step_supports_amp_scaling", False):
            if takes_grad_scaler(optimizer.step):
                result = self._legacy_step(optimizer, args, kwargs)
            else:
                result = self._fused_step(optimizer, state, args, kwargs, update)
        else:
            if state["stage"] is OptState.READY:
                if scale.is_cuda and not self._overrides(_MAYBE_STEP):
                    # Here, or the gradients would count as unscaled.
                    refuse_capture(*_HOST_DECIDES)
                if update is None:
                    self.unscale_(optimizer)
                else:
                    self._unscale(optimizer, update)
            if not state["found_inf_per_device"]:
                raise no_inf_checks(optimizer)
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        self._record(optimizer, state["found_inf_per_device"])
        return result

    def _legacy_step(
        self,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float | None:
        warn_caller(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
            "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
            FutureWarning,
        )
        return optimizer.step(*args, **{**kwargs, "grad_scaler": self})

    def _fused_step(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        update: backends.Update | None,
    ) -> float | None:
        overridden = self._overrides(_CHECK)
        unscaled = state["stage"] is OptState.UNSCALED
        if not unscaled:
            if overridden:
                self._check_inf_per_device(optimizer)
            else:
                self._check_scale_growth_tracker("_check_inf_per_device")
        scale = self._get_scale_async()
        if scale is None:
            raise AssertionError("_get_scale_async returned None")
        deferred: clipping.Deferred | None = state.get(clipping.DEFERRED)
        if unscaled:
            grad_scale = getattr(optimizer, "grad_scale", None)
        else:
            grad_scale = scale * getattr(optimizer, "grad_scale", 1)
        checked = False
        if deferred is not None:
            flags = state["found_inf_per_device"]
            grad_scale, state["found_inf_per_device"] = deferred.handed_over(grad_scale, flags)
        elif isinstance(grad_scale, Tensor) and not overridden:
            self._check_quotients(optimizer, state, grad_scale, update)
            checked = True
        flags = list(state["found_inf_per_device"].values())
        if checked and len(flags) == 1 and flags[0].device == scale.device:
            found_inf = flags[0]  # exactly 0 or 1, and new
        else:
            # Nothing checked is 0, as torch's sum over nothing.
            found_inf = aten.any_found(flags, scale.device) if flags else 0
        self._record(optimizer, state["found_inf_per_device"])
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            if flags and lacks_momentum(optimizer):
                refuse_capture(
                    "the first step of a fused SGD with momentum, which may have to be skipped"
                )
                if found_inf.item():
                    return None
            return optimizer.step(*args, **kwargs)
        finally:
            for name in ("grad_scale", "found_inf"):
                with suppress(AttributeError):
                    delattr(optimizer, name)

    def _check_quotients(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        grad_scale: Tensor,
        update: backends.Update | None,
    ) -> None:
        """Checks what an optimizer that divides by `grad_scale` will work with."""
        grads = self._collect(optimizer, allow_fp16=True, writes=False)
        agreement, tracks = self._agreement([grads]), self._tracks(optimizer, grads)
        unscaled = state["stage"] is OptState.UNSCALED
        flags = gradients.check_(
            grads,
            grad_scale.detach().float(),
            choice=self._kernels(),
            update=None if unscaled or agreement else update,
            tracks=tracks,
        )
        flags = self._agreed(agreement, flags)
        if unscaled:
            # What unscale_ found counts too; in new tensors, for its own may have been handed out.
            for device, flag in state["found_inf_per_device"].items():
                both = [flag, flags[device]] if device in flags else [flag]
                flags[device] = aten.any_found(both, flag.device)
        state["found_inf_per_device"] = flags

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
            devices=self._kernels().devices,
            clips=clips,
            parts=self._others().parts(),
        )

    def _others(self) -> distributed.Ranks:
        if self._ranks is None:
            self._ranks = distributed.Ranks(is_default=self._is_for_all)
        return self._ranks

    def _agreement(self, passes: Sequence[gradients.Gradients]) -> distributed.Agreement | None:
        """How the ranks that hold other parts of these gradients agree, if there are any."""
        others = self._others()
        layouts: list[distributed.Layout] = []
        for grads in passes:
            if grads.parts is not None:
                layouts += grads.parts.layouts.values()
        if not layouts and (others.is_alone or not (self._enabled or dist.is_initialized())):
            return None
        return others.agreement(layouts)

    def _agreed(
        self, agreement: distributed.Agreement | None, flags: dict[Any, Tensor]
    ) -> dict[Any, Tensor]:
        """What all ranks found together, where a pass here found `flags`."""
        scale = None if agreement is None else self._get_scale_async()
        if agreement is None or scale is None:
            return flags
        return agreement.share([flags], scale.device)[0]

    def _tracks(
        self, optimizer: torch.optim.Optimizer, grads: gradients.Gradients
    ) -> tracking.Tracks | None:
        """Where the pass that begins notes what it sees of each parameter."""
        scale = None if self._track is None else self._get_scale_async()
        if scale is None:
            return None
        state = self._per_optimizer_states.get(id(optimizer))
        is_scaled = state is None or state["stage"] is OptState.READY
        steps = self._kept().on(scale.device)
        return self._notes().start(optimizer, grads.identity, scale, steps, measures=is_scaled)

    def _notes(self) -> tracking.Tracking:
        if self._tracking is None:
            self._tracking = tracking.Tracking(health=self._track == "health")
        return self._tracking

    def _report(self, method: str, keywords: tuple[str, ...]) -> tracking.Tracking:
        if self._track not in keywords:
            kinds = " or ".join(map(repr, keywords))
            raise RuntimeError(
                f"{method}() needs a scaler that was made with track={kinds}; this one has "
                f"track={self._track!r}"
            )
        refuse_capture("a report that the host reads", "ask after the replay")
        notes = self._notes()
        if self._enabled and notes.is_empty and self._overrides(_UNSCALE):
            raise RuntimeError(
                f"{method}() knows nothing: {type(self).__name__} overrides _unscale_grads_, and "
                "only gradients that ampfast's own method reads are tracked"
            )
        return notes

    def _kernels(self) -> backends.Choice:
        if self._choice is None:
            self._choice = backends.choose(self._backend)
        return self._choice

    def _flags_besides(self, optimizer: object, device: torch.device) -> list[Tensor]:
        """The found_inf tensors of this iteration, without those of one optimizer."""
        return [
            aten.moved(flag, device)
            for key, state in self._per_optimizer_states.items()
            for flag in state["found_inf_per_device"].values()
            if key != id(optimizer)
        ]

    def _set_scale(self, new_scale: float | Tensor) -> None:
        """Takes a scale from the caller; a step that was checked is kept all the same."""
        scale, growth_tracker = self._scale, self._growth_tracker
        if scale is None or growth_tracker is None:
            super().update(new_scale)  # refuses
            return
        before, flags = scale.detach().clone(), self._flags_besides(None, scale.device)
        super().update(new_scale)
        if flags:
            self._update(before, growth_tracker.clone(), flags, native.Factors(1.0, 1.0, 0))
        self._kept().forget_minimum()

    def _update(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        flags: list[Tensor],
        factors: native.Factors | None = None,
    ) -> None:
        """Updates the scale by itself."""
        update = self._scale_update(scale, growth_tracker, flags, factors)
        if update is not None:
            update.apply()
            update.bump_version()
        else:
            first, *others = flags
            # Out of place: a flag that was handed out stays as it is.
            found_inf = sum(others, start=first)
            kept, norm = self._kept().on(scale.device), self._norm_of_iteration(scale.device)
            aten.update_scale_(
                *(scale, growth_tracker, found_inf), *(factors or self._factors()), kept, norm
            )

    def _factors(self) -> native.Factors:
        return native.Factors(self._growth_factor, self._backoff_factor, self._growth_interval)

    def _scale_update(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        flags: list[Tensor],
        factors: native.Factors | None = None,
    ) -> backends.Update | None:
        """The update as the kernels do it, or None where torch's own op must."""
        kernels = self._kernels().kernels_for(scale.device)
        factors = factors or self._factors()
        if kernels is None or type(factors.growth_interval) is not int:
            return None
        if not all(isinstance(factor, (int, float)) for factor in factors):
            return None
        kept = self._kept().on(scale.device)
        norm = self._norm_of_iteration(scale.device)
        return kernels.scale_update(scale, growth_tracker, flags, factors, kept, norm)

    def _note_norm(self, optimizers: Sequence[object], norm: Tensor, norm_type: float) -> None:
        """Remembers the norm of these optimizers' gradients for the history of this iteration.

        What was taken of others together with them stays.
        """
        names = frozenset(map(id, optimizers))
        before = self._norms or {}
        if not any(names < others for others in before):
            kept = {others: entry for others, entry in before.items() if not names & others}
            self._norms = {**kept, names: (norm, norm_type)}

    def _norm_of_iteration(self, device: torch.device) -> Tensor | None:
        """The norm of all gradients whose norm was taken, if all norms are of one type."""
        if not self._norms:
            return None
        norms = list(self._norms.values())
        norm_type = norms[0][1]
        if any(other != norm_type for _, other in norms):
            return None
        parts = [aten.moved(norm.detach(), device).float().reshape(()) for norm, _ in norms]
        if len(parts) == 1:
            return parts[0]
        return torch.linalg.vector_norm(torch.stack(parts), norm_type)

    def _kept(self) -> ScaleState:
        if self._scale_state is None:
            self._scale_state = ScaleState(ScalePolicy())
        return self._scale_state

    def _end_iteration(self) -> None:
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._norms = None
        if self._last_checks is not None:
            self._last_checks.end_iteration()
        if self._tracking is not None:
            self._tracking.end_iteration()

    def _record(self, optimizer: object, flags: dict[Any, Tensor]) -> None:
        if self._last_checks is None:
            self._last_checks = LastChecks()
        self._last_checks.record(optimizer, flags)

    def _overrides(self, hooks: dict[str, Callable[..., Any]]) -> bool:
        """Whether a subclass or this instance replaced one of `hooks`."""
        kind, own = type(self), self.__dict__
        for name, hook in hooks.items():
            if getattr(kind, name) is not hook or name in own:
                return True
        return False


def _is_static(state_dict: dict[str, Any]) -> bool:
    if not state_dict:
        return True  # which torch refuses
    return state_dict.get("growth_interval") == 0 and state_dict.get("backoff_factor") == 1.0


def _original(*names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(GradScaler, name) for name in names}


# As they are here: what replaces one of them later, on the class too, decides.
_UNSCALE = _original("_unscale_grads_")
_MAYBE_STEP = _original("_maybe_opt_step")
_CHECK = _original("_unscale_grads_", "_check_inf_per_device")
_CLIP = _original("_unscale_grads_", "_check_inf_per_device", "unscale_")
_HOOKS = _original(
    *("_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step", "unscale_", "step", "update"),
    *("_check_scale_growth_tracker", "_get_scale_async", "_found_inf_per_device"),
)


# Values of `track` that overflow_report() needs; health() needs the last.
_KEYWORDS = ("overflow", "health")

_HOST_DECIDES = (
    "a step that the host may skip",
    "take an optimizer with fused=True, which decides on the device",
)
