"""The drop-in gradient scaler: torch's state machine over ampfast's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.cuda.amp.common import amp_definitely_not_available

from ampfast import backends, clipping, distributed, overflow, stepping
from ampfast._version import __version__
from ampfast.errors import add_note, refuse_capture, warn_caller
from ampfast.gradient_checker import GradientChecker, originals
from ampfast.loss_scale import ScalePolicy, ScaleState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["GradScaler", "OptState"]

Method = TypeVar("Method", bound=Callable[..., Any])


def _not_compiled(method: Method) -> Method:
    """Keeps torch.compile out of a method and of what it calls."""
    return cast(Method, torch._disable_dynamo(method, recursive=True))  # type: ignore[attr-defined]


class GradScaler(GradientChecker):
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
        overflow.require_known(track)
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
        return stepping.step(self, optimizer, args, kwargs, None)

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
            results.append(stepping.step(self, last, (), {}, update))
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
        settings = {
            "enabled": self._enabled,
            "device": torch.device(self._device).type,
            **self._scale_settings(),
            "allow_fp16": self._allow_fp16,
            "track": self._track,
            "torch": str(torch.__version__),
            "ampfast": __version__,
        }
        distributed.require_same(settings, self._others())


# As they are here.
_CLIP = originals(GradScaler, "_unscale_grads_", "_check_inf_per_device", "unscale_")
_HOOKS = originals(
    GradScaler,
    *("_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step", "unscale_", "step", "update"),
    *("_check_scale_growth_tracker", "_get_scale_async", "_found_inf_per_device"),
)
