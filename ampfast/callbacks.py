"""Figures of a trainer's scaler in the trainer's own logger, such as TensorBoard or W&B."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from ampfast.report import figures
from ampfast.scaler.grad_scaler import GradScaler

_logger = logging.getLogger("ampfast")
_Write = Callable[[dict[str, float]], object]


def attach(trainer: Any, prefix: str = "scaler/") -> None:
    """Has a trainer log the `report.figures` of its scaler where it logs its own figures.

    The host reads them once for each line of the trainer's log, and not in other steps. After an
    overflow the report of a scaler that tracks goes to Python's logger "ampfast" as a warning. Call
    it once, after the trainer was made and before it trains.

    Args:
        trainer: A `Trainer` of Transformers or of a library that derives from it, such as TRL, or
            of Lightning.
        prefix: Prefix of the names.

    Raises:
        TypeError: If it is another trainer; as the training begins, if its scaler is not ampfast's.
    """
    for kind in type(trainer).__mro__:
        library = kind.__module__.partition(".")[0]
        if library == "transformers":
            trainer.add_callback(_for_transformers(trainer, prefix))
            return
        if library in ("lightning", "pytorch_lightning"):
            trainer.callbacks.append(_for_lightning(library, prefix))
            return
    raise TypeError(
        "attach takes a Trainer of Transformers or Lightning, got "
        f"{type(trainer).__module__}.{type(trainer).__qualname__}; any other loop can log "
        "ampfast.report.figures(scaler)"
    )


class _Figures:
    """The figures of a trainer's scaler since they were last taken."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._steps = prefix, 0

    def begin(self, scaler: Any) -> None:
        if not isinstance(scaler, GradScaler):
            raise TypeError(
                f"the trainer's scaler is {type(scaler).__name__}, not one of ampfast: call "
                "ampfast.patch() before the trainer is made, or give it a scaler"
            )
        self._steps = scaler.stats().steps

    def take(self, scaler: GradScaler, write: _Write, *, is_first_rank: bool) -> None:
        found = figures(scaler, since=self._steps)
        if found["steps"] == self._steps:
            return  # batches whose gradients accumulate
        self._steps = int(found["steps"])
        write({f"{self._prefix}{name}": value for name, value in found.items()})
        if is_first_rank and found["nonfinite"] and scaler._track is not None:
            _logger.warning("%s", scaler._report_or_reason())


def _for_transformers(trainer: Any, prefix: str) -> Any:
    callback: type = importlib.import_module("transformers").TrainerCallback
    taken = _Figures(prefix)

    class ScalerCallback(callback):  # type: ignore[misc]
        _is_due = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            taken.begin(trainer.accelerator.scaler)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._is_due = control.should_log

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # After the trainer's own line, which a call of its log() before would suppress.
            if self._is_due:
                self._is_due = False
                is_first = state.is_world_process_zero
                taken.take(trainer.accelerator.scaler, trainer.log, is_first_rank=is_first)

    return ScalerCallback()


def _for_lightning(library: str, prefix: str) -> Any:
    package = "lightning.pytorch" if library == "lightning" else library
    callback: type = importlib.import_module(package).Callback
    taken = _Figures(prefix)

    class ScalerCallback(callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            taken.begin(getattr(trainer.precision_plugin, "scaler", None))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            def write(found: dict[str, float]) -> None:
                for logger in trainer.loggers:
                    logger.log_metrics(found, step=trainer.global_step)

            if trainer.global_step and trainer.global_step % trainer.log_every_n_steps == 0:
                scaler = trainer.precision_plugin.scaler
                taken.take(scaler, write, is_first_rank=trainer.is_global_zero)

    return ScalerCallback()
