"""The scale of a scaler: its updates, what is kept of them, and its checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampfast import backends
from ampfast.backends import aten, cpu
from ampfast.errors import refuse_capture, warn_caller
from ampfast.loss_scale import IterationNorms, ScalePolicy, ScaleState
from ampfast.report import History, ScalerStats

__all__ = ["ScaleKeeper"]

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler as TorchGradScaler
else:
    # torch's own class, also where an earlier import of ampfast has patched its name.
    TorchGradScaler = getattr(torch.amp.GradScaler, "_stands_for", torch.amp.GradScaler)


class ScaleKeeper(TorchGradScaler):
    """The part of `GradScaler` that knows no gradients, only whether they were finite."""

    # On the class for instances that torch pickled or whose __init__ was not called.
    _backend: str | None = None
    _choice: backends.Choice | None = None
    _dynamic = True
    _norms: IterationNorms | None = None
    _scale_state: ScaleState | None = None
    _warned_of_zero = False

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
        """Returns torch's; with limits of the scale or hysteresis, one more entry, "ampfast"."""
        state = super().state_dict()
        kept = self._kept()
        if self._enabled and not kept.policy.is_torchs:
            state["ampfast"] = kept.policy.state_dict(kept.hysteresis_tracker())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where a checkpoint was taken, of this class or of torch's.

        Args:
            state_dict: What `state_dict` returned.

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

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Of this process and this iteration.
        for name in ("_choice", "_norms"):
            state.pop(name, None)
        # A shallow copy of a scaler counts by itself, too.
        state["_scale_state"] = copy.deepcopy(self._scale_state)
        return state

    def _scale_settings(self) -> dict[str, object]:
        """What the scale of every rank must have in common."""
        kept = self._kept()
        return {
            **{name.strip("_"): value for name, value in super().state_dict().items()},
            **kept.policy.state_dict(kept.hysteresis_tracker()),
            "on_min_scale": kept.on_min_scale,
            "dynamic": self._dynamic,
        }

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if str(dev) != "cpu":
            refuse_capture("the creation of the scale, which every replay would reset")
        super()._lazy_init_scale_growth_tracker(dev)
        if self._scale is not None:
            self._kept().on(self._scale.device)

    def _kept(self) -> ScaleState:
        if self._scale_state is None:
            self._scale_state = ScaleState(ScalePolicy())
        return self._scale_state

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
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        before, flags = scale.detach().clone(), self._flags_besides(None, scale.device)
        super().update(new_scale)
        if flags:
            self._update(before, growth_tracker.clone(), flags, cpu.UpdateFactors(1.0, 1.0, 0))
        self._kept().forget_minimum()

    def _update(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        flags: list[Tensor],
        factors: cpu.UpdateFactors | None = None,
    ) -> None:
        """Updates the scale by itself."""
        factors = factors or self._factors()
        kernels = self._kernels_for(scale.device, factors)
        kept, norm = self._kept().on(scale.device), self._noted_norm(scale.device)
        if kernels is None or not kernels.update_scale_(
            scale, growth_tracker, flags, factors, kept, norm
        ):
            first, *others = flags
            # Out of place: a flag that was handed out stays as it is.
            found_inf = sum(others, start=first)
            aten.update_scale_(scale, growth_tracker, found_inf, factors, kept, norm)

    def _factors(self) -> cpu.UpdateFactors:
        interval: Any = self._growth_interval
        # As torch's op takes it: an integer of numpy's counts as one, a bool does not.
        if not isinstance(interval, bool) and isinstance(interval, Integral):
            interval = int(interval)
        return cpu.UpdateFactors(self._growth_factor, self._backoff_factor, interval)

    def _scale_update(
        self, scale: Tensor, growth_tracker: Tensor, flags: list[Tensor]
    ) -> backends.Update | None:
        """The update as the kernels do it, or None where torch's own op must."""
        factors = self._factors()
        kernels = self._kernels_for(scale.device, factors)
        if kernels is None:
            return None
        kept, norm = self._kept().on(scale.device), self._noted_norm(scale.device)
        return kernels.scale_update(scale, growth_tracker, flags, factors, kept, norm)

    def _kernels_for(
        self, device: torch.device, factors: cpu.UpdateFactors
    ) -> backends.Kernels | None:
        """The kernels that update a scale there; None where torch's own op must."""
        given: Any = factors  # attributes that a caller may have set to anything
        growth_factor, backoff_factor, growth_interval = given
        if type(growth_interval) is not int:
            return None
        if not (
            isinstance(growth_factor, (int, float)) and isinstance(backoff_factor, (int, float))
        ):
            return None
        return self._kernels().kernels_for(device)

    def _note_norm(self, optimizers: Sequence[object], norm: Tensor, order: float) -> None:
        """Remembers the norm of these optimizers' gradients for the history of this iteration."""
        if self._norms is None:
            self._norms = IterationNorms()
        self._norms.note(optimizers, norm, order)

    def _noted_norm(self, device: torch.device) -> Tensor | None:
        return None if self._norms is None else self._norms.together(device)


def _is_static(state_dict: dict[str, Any]) -> bool:
    if not state_dict:
        return True  # which torch refuses
    return state_dict.get("growth_interval") == 0 and state_dict.get("backoff_factor") == 1.0
