"""A learning rate schedule that leaves out skipped steps and waits for none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampfast.backends import aten
from ampfast.errors import refuse_capture

__all__ = ["LateScheduler"]


class LateScheduler:
    """Advances a scheduler one iteration late, for the steps that ran; the host never waits.

    Whether a step ran is known on the device only. The exact way asks, and waits for the step::

        if not scaler.step_skipped(optimizer):
            scheduler.step()

    This one sends the answer to the host and reads it when the next iteration has been queued::

        scheduler = LateScheduler(scheduler, scaler, optimizer)
        ...
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    So the learning rate in iteration i is that of the exact way in iteration i - 1: what counts is
    how many steps ran before that one. Nothing else decides, neither timing nor device nor whether
    the scaler is enabled. A host that is more than one iteration ahead of the device waits until
    the previous step is done, never for the one just queued.

    Every other attribute is read from the wrapped scheduler. One that is stepped once per epoch
    needs none of this.

    Args:
        scheduler: Anything with `step`, `state_dict` and `load_state_dict`.
        scaler: An `ampfast.GradScaler`.
        optimizer: The one that `scaler.step` is called with.

    Attributes:
        scheduler: The wrapped scheduler.

    Raises:
        TypeError: If the scaler cannot tell what its checks found, as torch's.
    """

    def __init__(self, scheduler: Any, scaler: Any, optimizer: Any) -> None:
        if not hasattr(scaler, "found_inf"):
            kind = type(scaler)
            raise TypeError(
                "LateScheduler needs an ampfast.GradScaler, got "
                f"{kind.__module__}.{kind.__qualname__}"
            )
        self.scheduler = scheduler
        self._scaler = scaler
        self._optimizer = optimizer
        self._outstanding: _Outstanding | None = None

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances the scheduler for the previous iteration, if its step ran.

        Call it once per iteration, after `scaler.step`; before or after `update` is the same.

        Args:
            *args: What the scheduler's `step` gets for this iteration, one call later.
            **kwargs: Likewise.

        Raises:
            LookupError: If the scaler never checked the optimizer.
            RuntimeError: Under CUDA graph capture.
        """
        refuse_capture("a schedule that the host advances", "advance it after the replay")
        found_inf = self._scaler.found_inf(self._optimizer)
        last, self._outstanding = (
            self._outstanding,
            _Outstanding(*aten.copy_to_host_async(found_inf), args, kwargs),
        )
        self._advance(last)

    def flush(self) -> None:
        """Advances the scheduler for the last iteration, too, if its step ran; waits for that step.

        The schedule is then where the exact way has it. Not needed before `state_dict`.
        """
        last, self._outstanding = self._outstanding, None
        self._advance(last)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped scheduler's state and what is outstanding; waits for the last step.

        Returns:
            "scheduler": what the wrapped one's `state_dict` returns; "outstanding": None, or the
            positional and the keyword arguments of the call that is still to come.
        """
        last = self._outstanding
        outstanding = (last.args, last.kwargs) if last is not None and last.ran() else None
        return {"scheduler": self.scheduler.state_dict(), "outstanding": outstanding}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken, or where a checkpoint of the wrapped scheduler was.

        Args:
            state_dict: From this class, or from the wrapped scheduler without it.
        """
        outstanding = None
        if state_dict.keys() == {"scheduler", "outstanding"}:
            state_dict, outstanding = state_dict["scheduler"], state_dict["outstanding"]
        self.scheduler.load_state_dict(state_dict)
        self._outstanding = None if outstanding is None else _Outstanding(None, None, *outstanding)
        if outstanding is not None and isinstance(self._optimizer, torch.optim.Optimizer):
            # Its step ran before the checkpoint; torch's schedulers look here before they warn.
            self._optimizer.__dict__["_opt_called"] = True

    def _advance(self, last: _Outstanding | None) -> None:
        if last is not None and last.ran():
            self.scheduler.step(*last.args, **last.kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.scheduler, name)


@dataclass
class _Outstanding:
    """A call of the scheduler's `step` that waits for its flag; without one it takes place."""

    flag: Tensor | None
    arrival: torch.cuda.Event | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def ran(self) -> bool:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.flag is None or not self.flag.item()
