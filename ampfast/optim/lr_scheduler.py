"""Learning rate schedules without skipped steps and without a host sync."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfast.backends import scalars
from ampfast.backends.cuda_graphs import refuse_capture


class LateScheduler:
    """Learning rate scheduler that omits skipped steps, one iteration late.

    Only the device knows whether a step was skipped. The exact schedule waits for it::

        if not scaler.step_skipped(optimizer):
            scheduler.step()

    This class copies the flag to the host and reads it when the next iteration is queued::

        scheduler = LateScheduler(scheduler, scaler, optimizer)
        ...
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    The learning rate of iteration i is the exact schedule's of iteration i - 1, on any device, with
    any timing, also if the scaler is disabled. The host waits for the previous step at most, never
    for the one just queued.

    Other attributes are the wrapped scheduler's, also where they are set. A scheduler stepped once
    per epoch does not need this class.

    Args:
        scheduler: Scheduler with `step`, `state_dict` and `load_state_dict`.
        scaler: An `ampfast.GradScaler`.
        optimizer: Optimizer that `scaler.step` is called with.

    Attributes:
        scheduler: The wrapped scheduler.

    Raises:
        TypeError: If the scaler has no `found_inf`, as torch's.
    """

    def __init__(self, scheduler: Any, scaler: Any, optimizer: Any) -> None:
        if not hasattr(scaler, "found_inf"):
            kind = f"{type(scaler).__module__}.{type(scaler).__qualname__}"
            raise TypeError(f"LateScheduler needs an ampfast.GradScaler, got {kind}")
        own = {"scheduler": scheduler, "_scaler": scaler, "_optimizer": optimizer}
        vars(self).update(own, _outstanding=None)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances the scheduler for the previous iteration, unless its step was skipped.

        Call it once per iteration, after `scaler.step`, before or after `update`.

        Args:
            *args: Arguments of the scheduler's `step` for this iteration, passed one call later.
            **kwargs: Keyword arguments, passed in the same way.

        Raises:
            LookupError: If the scaler never checked the optimizer.
            RuntimeError: Under CUDA graph capture.
        """
        refuse_capture("a scheduler step on the host", "call it after the replay")
        found_inf = self._scaler.found_inf(self._optimizer)
        self._advance(_Outstanding(*scalars.copy_to_host_async(found_inf), args, kwargs))

    def flush(self) -> None:
        """Advances the scheduler for the last iteration, unless its step was skipped; waits for it.

        The schedule is then the exact one. Not needed before `state_dict`.
        """
        self._advance(None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped scheduler's state and the outstanding call; waits for the last step.

        Returns:
            "scheduler": `state_dict` of the wrapped scheduler; "outstanding": positional and
            keyword arguments of its next `step`, or None.
        """
        last = self._outstanding
        outstanding = (last.args, last.kwargs) if last is not None and last.ran() else None
        return {"scheduler": self.scheduler.state_dict(), "outstanding": outstanding}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of the wrapped scheduler.

        Args:
            state_dict: Result of `state_dict` of either.
        """
        outstanding = None
        if state_dict.keys() == {"scheduler", "outstanding"}:
            state_dict, outstanding = state_dict["scheduler"], state_dict["outstanding"]
        self.scheduler.load_state_dict(state_dict)
        self._outstanding = None if outstanding is None else _Outstanding(None, None, *outstanding)
        if outstanding is not None and isinstance(self._optimizer, torch.optim.Optimizer):
            # Its step ran before the checkpoint; torch's schedulers look here before they warn.
            self._optimizer.__dict__["_opt_called"] = True

    def _advance(self, following: _Outstanding | None) -> None:
        last, self._outstanding = self._outstanding, following
        if last is not None and last.ran():
            self.scheduler.step(*last.args, **last.kwargs)

    def __getattr__(self, name: str) -> Any:
        # `scheduler` is not set yet while a copy is made; Python's protocols, such as __deepcopy__,
        # of the wrapped scheduler would copy or pickle it instead of this object.
        if name == "scheduler" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.scheduler, name, value)


class _Outstanding(NamedTuple):
    """Call of the scheduler's `step`, made unless its flag is set."""

    flag: Tensor | None
    arrival: torch.cuda.Event | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def ran(self) -> bool:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.flag is None or not self.flag.item()
