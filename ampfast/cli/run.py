"""A program of the user's under `patch()`, unedited, with its scalers watched."""

import atexit
import builtins
import io
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ampfast
from ampfast import StepGuard
from ampfast.cli.guarded_steps import GuardedSteps
from ampfast.cli.scaler_clock import Record, ScalerClock

_NO_SCALER = (
    "the program used no gradient scaler in this process. bfloat16 and float32 need none: with "
    "`run --guard` steps with inf, NaN or a spike of the norm are skipped. float16 needs one: use "
    "ampfast.GradScaler. (Processes that it starts are not seen: torchrun starts ranks.)"
)
_NO_STEP = "no step of a torch optimizer was guarded in this process"
_NO_GUARD = "ampfast: --guard had no effect beside the program's own scaler, which decides"


# ampfast's classes, and torch's, from which they derive.
_KINDS = getattr(ampfast, "ShardedGradScaler", ampfast.GradScaler).__mro__


def run(
    program: str,
    arguments: list[str],
    is_module: bool,
    record: str | None,
    stop: int | None,
    keep_torch: bool,
    clip: bool,
    guard: bool,
    **given: Any,
) -> int:
    """Runs a script or module as Python would, and prints a line about its scaler at the end.

    Args:
        program: Path of a script, or name of a module.
        arguments: The program's own arguments.
        is_module: Whether it is a module, as after ``python -m``.
        record: File for the records of all scalers, as JSON, instead of the line.
        stop: Number of updates of a scaler after which the process ends.
        keep_torch: Whether torch's scaler stays, and is watched.
        clip: Whether torch's `clip_grad_norm_` is replaced, too.
        guard: Whether the steps of all torch optimizers are guarded.
        given: Arguments of `GradScaler` that scalers get by default.

    Returns:
        The exit code 0; 2 without this script. Exceptions are the program's own.
    """
    path = os.path.abspath(program)
    if not is_module and (os.path.isdir(program) or not os.path.exists(program)):
        print(f"ampfast: there is no script {program!r}", file=sys.stderr)
        return 2
    process, failed, is_over = os.getpid(), False, False

    def finish() -> None:
        # It reports neither in a fork of the program's, nor a second time, nor for other ranks.
        is_first = os.environ.get("RANK", "0") == "0"
        if os.getpid() == process and is_first and not is_over:
            _report(clock, record, _NO_STEP if guard else _NO_SCALER, failed)

    def ended(one: Record) -> None:
        nonlocal is_over
        # compare refuses a program with our scaler, without the rest of its training.
        is_refused = keep_torch and isinstance(one.scaler, ampfast.GradScaler)
        if (one.steps == stop or is_refused) and not is_over:
            finish()
            is_over = True
        if is_over:
            sys.exit(0)

    clock = ScalerClock(*_KINDS, keeps_values=record is not None, ended=ended)
    if not keep_torch:
        ampfast.patch(clip_grad_norm=clip)
        if guard:
            GuardedSteps(clock, given)
        defaults: Any = ampfast.GradScaler.__init__.__kwdefaults__
        defaults.update(given)
    # The first one registered runs last, after a traceback.
    atexit.register(finish)
    sys.argv = [program, *arguments]
    try:
        _execute(program, path, is_module)
    except BaseException as error:
        if is_over:
            return 0
        failed = not isinstance(error, SystemExit) or bool(error.code)
        raise
    return 0


def _execute(program: str, path: str, is_module: bool) -> None:
    """Runs the program as `__main__`, also of the functions that run at exit."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if is_module:
        runpy._run_module_as_main(program)  # type: ignore[attr-defined]
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        vars(main).update(__file__=path, __cached__=None)
        with io.open_code(path) as source:
            code = compile(source.read(), path, "exec")
        exec(code, vars(main))


def _report(clock: ScalerClock, file: str | None, nothing: str, failed: bool) -> None:
    """Writes the records to a file, or prints a line for each; `nothing` if there is none."""
    records = list(clock.records.values())
    # A guard of an optimizer in another one has no steps.
    records = [one for one in records if one.steps or not isinstance(one.scaler, StepGuard)]
    if file is not None:
        weights = clock.weights()
        Path(file).write_text(json.dumps([_facts(one, weights) for one in records]))
        return
    # A program may make one in each iteration.
    for number, one in enumerate(records[:4], start=1):
        which = f" scaler {number}:" if len(records) > 1 else ""
        print(f"ampfast:{which} {describe(one)}", file=sys.stderr)
        if getattr(one.scaler, "_track", None) is not None:
            print(one.scaler._report_or_reason(), file=sys.stderr)
    if not records and not failed:
        print(f"ampfast: {nothing}", file=sys.stderr)
    scalers = [one.scaler for one in records if one.scaler._enabled]
    if nothing is _NO_STEP and not all(isinstance(each, StepGuard) for each in scalers):
        print(_NO_GUARD, file=sys.stderr)


def describe(record: Record) -> str:
    """Returns a sentence about a scaler."""
    scaler, found = record.scaler, record.medians()
    if not scaler._enabled:
        return "the gradient scaler is disabled, by enabled=False or for want of CUDA"
    if not record.steps:
        return "the gradient scaler was never updated: its update() was not called"
    skipped, name, note = "of torch's class, not ampfast's", "scaler", ""
    if isinstance(scaler, ampfast.GradScaler):
        stats, rule = scaler.stats(), scaler.skip_above
        skipped = f"{stats.skipped} skipped"
        if isinstance(rule, ampfast.Sigmas) and stats.steps - stats.skipped <= rule.window:
            note = f"; spikes are compared once {rule.window} steps were taken"
    scale = f", final scale {scaler.get_scale():.15g}"
    if isinstance(scaler, StepGuard):
        name, scale = "guard", f", {stats.spikes} of them for their norm"
    own = f"{found['own']:.1f} us a step, {found['share']:.2%} of a whole step"
    return f"{record.steps} steps, {skipped}{scale}{note}; the {name}'s own time {own}"


def _facts(record: Record, weights: int) -> dict[str, Any]:
    values: dict[str, list[tuple[int, float]]] = {
        name: [(step, value.item()) for step, value in pairs]
        for name, pairs in record.values.items()
    }
    return {
        "told": describe(record),
        "is_ampfast": isinstance(record.scaler, ampfast.GradScaler),
        "final_scale": record.scaler.get_scale(),
        "steps": record.steps,
        "skipped": len({step for step, flag in values["skips"] if flag}),
        "medians": record.medians(),
        "values": {**values, "weights": [(record.steps - 1, weights)]},
    }
