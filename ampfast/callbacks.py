"""One line for a trainer of another project: a guard for its steps, figures in its logger."""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from ampfast.clip.norm_history import Sigmas
from ampfast.report import figures
from ampfast.scaler.grad_scaler import GradScaler
from ampfast.scaler.step_guard import StepGuard

__all__ = ["Guarded", "guard"]

_logger = logging.getLogger("ampfast")
# File of a guard's state in a checkpoint of Transformers.
_STATE = "ampfast_guard.pt"


class Guarded:
    """What `guard` has installed in a trainer.

    Attributes:
        scaler: The guard; in float16, where the trainer has a scaler, a `GradScaler`.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._undo: list[Callable[[], object]] = []

    def remove(self) -> None:
        """Gives the trainer back what it had before."""
        while self._undo:
            self._undo.pop()()

    def _put(self, owner: Any, name: str, value: Any) -> None:
        is_property = isinstance(getattr(type(owner), name, None), property)
        is_own = is_property or name in vars(owner)
        undo = (setattr, getattr(owner, name)) if is_own else (delattr,)
        self._undo.append(partial(undo[0], owner, name, *undo[1:]))
        setattr(owner, name, value)

    def _measure(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks gradients before a trainer clips them, unless that is done."""
        if self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.scaler.unscale_(optimizer)


def guard(
    trainer: Any,
    *,
    skip_above: float | Sigmas | None = None,
    max_skips: int | None = None,
    prefix: str = "scaler/",
) -> Guarded:
    """Has a trainer skip the steps of bad batches: inf, NaN and, on request, spikes of the norm.

    Where the trainer has a scaler, as for float16 on a GPU, a `GradScaler` takes its place and its
    state; elsewhere a `StepGuard` is installed. The norm is that before the trainer clips, and the
    other steps stay equal bit for bit. A scaler of ampfast stays; a guard from an earlier call is
    removed first. The trainer's checkpoints have the state. `report.figures` go to the
    trainer's logger where that logs its own figures, or with each `log` of an `Accelerator`; the
    host reads them only then. After an overflow the report of a scaler that tracks goes to Python's
    logger "ampfast". Steps of LBFGS are not guarded.

    Args:
        trainer: A `Trainer` of Transformers or of a library that derives from it, such as TRL; an
            `Accelerator`, before or after `prepare`; or a `Trainer` of Lightning.
        skip_above: As for `GradScaler`.
        max_skips: As for `GradScaler`.
        prefix: Prefix of the names of figures.

    Returns:
        A handle with the scaler, and `remove()`.

    Raises:
        TypeError: If it is another trainer, or as `GradScaler`.
        ValueError: If DeepSpeed or Megatron-LM takes the steps; for FSDP1 without a scaler, where
            the error names what to do; or as `GradScaler`.
    """
    library = _library_of(trainer)
    by_lightning = library in ("lightning", "pytorch_lightning")
    accelerator = trainer.accelerator if library == "transformers" else trainer
    owner = trainer.precision_plugin if by_lightning else accelerator
    where = type(trainer.strategy).__name__ if by_lightning else str(accelerator.distributed_type)
    if any(name in where.lower() for name in ("deepspeed", "megatron")):
        raise ValueError(f"{where} takes the steps itself: a guard cannot skip them")
    limits: dict[str, Any] = {"skip_above": skip_above, "max_skips": max_skips}
    StepGuard(**limits)  # raises before anything is changed
    if earlier := vars(owner).get("_ampfast"):
        earlier.remove()
    scaler = getattr(owner, "scaler", None)
    if scaler is None and "FSDP" in where and not getattr(owner, "is_fsdp2", False):
        raise ValueError(
            "with FSDP1 all ranks must agree: give the trainer a "
            "ampfast.StepGuard(process_group=torch.distributed.group.WORLD) as its scaler first"
        )
    device = None if by_lightning else accelerator.device.type
    handle = Guarded(_scaler_for(scaler, device, **limits))
    handle._put(owner, "_ampfast", handle)
    for name, value in limits.items():
        if scaler is handle.scaler and value is not None:
            handle._put(scaler, name, value)
    taken = _Figures(handle.scaler, prefix)
    if by_lightning:
        callback = _for_lightning(library, taken)
        if scaler is None:
            _guard_lightning(owner, handle)
            callback.state_dict = handle.scaler.state_dict
            callback.load_state_dict = handle.scaler.load_state_dict
        else:
            handle._put(owner, "scaler", handle.scaler)
        trainer.callbacks.insert(0, callback)
        handle._undo.append(partial(trainer.callbacks.remove, callback))
        return handle
    _guard_accelerator(accelerator, handle)
    if library == "transformers":
        callback = _for_transformers(trainer, taken)
        trainer.add_callback(callback)
        if scaler is None and hasattr(trainer, "_save_scaler"):
            _keep_apart(trainer, handle)
        handle._undo.append(partial(trainer.remove_callback, callback))
    else:
        taken.begin(None, math.inf, is_first_rank=accelerator.is_main_process)
        _log_with(accelerator, handle, taken)
    return handle


def _scaler_for(scaler: Any, device: str | None, **limits: Any) -> GradScaler:
    """What replaces a trainer's scaler: the scaler itself, if it is ampfast's."""
    if scaler is None or not scaler.is_enabled():
        # 16-bit models train without a scaler, too.
        return StepGuard(device, allow_fp16=True, **limits)
    if isinstance(scaler, GradScaler):
        return scaler
    kind: Any = GradScaler
    if type(scaler).__name__ == "ShardedGradScaler":
        kind = importlib.import_module("ampfast.scaler.fsdp").ShardedGradScaler
        limits["process_group"] = scaler.process_group
    made: GradScaler = kind(scaler._device, **limits)
    made.load_state_dict(scaler.state_dict())
    return made


def _guard_accelerator(accelerator: Any, handle: Guarded) -> None:
    before, scaler = accelerator.scaler, handle.scaler

    def give(old: Any, new: Any) -> None:
        accelerator.scaler = new
        for optimizer in accelerator._optimizers:
            if optimizer.scaler is old:
                optimizer.__setstate__({"scaler": new})  # which wraps its step, too

    def unscale_gradients(optimizer: Any = None) -> None:
        given = accelerator._optimizers if optimizer is None else optimizer
        for each in given if isinstance(given, (list, tuple)) else [given]:
            while type(each).__module__.startswith("accelerate."):
                each = each.optimizer
            if accelerator.sync_gradients:  # else more of them are yet to be added
                handle._measure(each)

    handle._undo.append(partial(give, scaler, before))
    give(before, scaler)
    # Both of Accelerate's clips call it, but it does nothing unless in float16.
    if not (accelerator.native_amp and accelerator.mixed_precision == "fp16"):
        handle._put(accelerator, "unscale_gradients", unscale_gradients)


def _keep_apart(trainer: Any, handle: Guarded) -> None:
    """Keeps a guard's state where Transformers does not look for one of a scaler."""

    def save(folder: str) -> None:
        if trainer.args.should_save:
            torch.save(handle.scaler.state_dict(), os.path.join(folder, _STATE))

    def load(folder: str | None) -> None:
        if folder and os.path.isfile(path := os.path.join(folder, _STATE)):
            handle.scaler.load_state_dict(torch.load(path, weights_only=True))

    handle._put(trainer, "_save_scaler", save)
    handle._put(trainer, "_load_scaler", load)


def _log_with(accelerator: Any, handle: Guarded, taken: _Figures) -> None:
    log = accelerator.log

    def log_with_figures(values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        more = dict(values)
        taken.take(more.update, is_first_rank=accelerator.is_main_process)
        log(more, *args, **kwargs)

    handle._put(accelerator, "log", log_with_figures)


def _guard_lightning(precision: Any, handle: Guarded) -> None:
    """Steps by the guard, in the order in which the precision "16-mixed" steps by its scaler."""
    step, clip = precision.optimizer_step, precision.clip_gradients

    def optimizer_step(optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):
            return step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        handle._measure(optimizer)
        precision._after_closure(model, optimizer)
        handle.scaler.step(optimizer, **kwargs)
        handle.scaler.update()
        return result

    def clip_gradients(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        is_wrapper = type(optimizer).__name__ == "LightningOptimizer"
        handle._measure(optimizer.optimizer if is_wrapper else optimizer)
        clip(optimizer, *args, **kwargs)

    handle._put(precision, "optimizer_step", optimizer_step)
    handle._put(precision, "clip_gradients", clip_gradients)


def _library_of(trainer: Any) -> str:
    """The library of a trainer, or of the class from which it derives."""
    for kind in type(trainer).__mro__:
        library = kind.__module__.partition(".")[0]
        is_known = library in ("transformers", "lightning", "pytorch_lightning", "accelerate")
        if is_known and kind.__name__.endswith(("Trainer", "Accelerator")):
            return library
    raise TypeError(
        "wanted a Trainer of Transformers or Lightning, or an Accelerator, got "
        f"{type(trainer).__module__}.{type(trainer).__qualname__}; any other loop can make a "
        "scaler or a StepGuard itself, and log ampfast.report.figures(scaler)"
    )


class _Figures:
    """The figures of a scaler since they were last taken."""

    def __init__(self, scaler: GradScaler, prefix: str) -> None:
        self._scaler, self._prefix, self._steps = scaler, prefix, scaler.stats().steps

    def begin(self, step: int | None, end: float, *, is_first_rank: bool) -> None:
        if step is not None:
            self._scaler._skip_log.first = step - self._scaler.stats().steps
        steps, rule = end - (step or 0), self._scaler.skip_above
        if is_first_rank and isinstance(rule, Sigmas):
            wanted = rule.window - len(self._scaler._norm_histories.window())
            if steps <= wanted:
                _logger.warning(
                    "Sigmas compares norms once %d more steps were taken: in this training of %g "
                    "steps it skips no spike. Set a smaller window, or a number as skip_above",
                    *(wanted, steps),
                )

    def take(self, write: Callable[[dict[str, float]], object], *, is_first_rank: bool) -> None:
        found = figures(self._scaler, since=self._steps)
        if found["steps"] == self._steps:
            return  # batches whose gradients accumulate
        self._steps = int(found["steps"])
        write({f"{self._prefix}{name}": value for name, value in found.items()})
        if is_first_rank and found["nonfinite"] and self._scaler._track is not None:
            _logger.warning("%s", self._scaler._report_or_reason())


def _for_transformers(trainer: Any, taken: _Figures) -> Any:
    callback: type = importlib.import_module("transformers").TrainerCallback

    class ScalerCallback(callback):  # type: ignore[misc]
        _is_due = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            is_first = state.is_world_process_zero
            taken.begin(state.global_step, state.max_steps, is_first_rank=is_first)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._is_due = control.should_log

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            # After the trainer's own line, which a call of its log() before would suppress. The
            # last line comes after the last step, and before loggers are closed.
            if self._is_due or "train_runtime" in logs:
                self._is_due = False
                taken.take(trainer.log, is_first_rank=state.is_world_process_zero)

    return ScalerCallback()


def _for_lightning(library: str, taken: _Figures) -> Any:
    package = "lightning.pytorch" if library == "lightning" else library
    callback: type = importlib.import_module(package).Callback

    class ScalerCallback(callback):  # type: ignore[misc]
        state_key = "ampfast"

        def on_train_start(self, trainer: Any, _: Any) -> None:
            end = trainer.estimated_stepping_batches
            taken.begin(trainer.global_step, end, is_first_rank=trainer.is_global_zero)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step and trainer.global_step % trainer.log_every_n_steps == 0:
                self.on_train_end(trainer)

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            def write(found: dict[str, float]) -> None:
                for logger in trainer.loggers:
                    logger.log_metrics(found, step=trainer.global_step)

            taken.take(write, is_first_rank=trainer.is_global_zero)

    return ScalerCallback()
