"""A program of the user's under `patch()`, unedited, with its scalers watched."""

import atexit
import builtins
import io
import json
import os
import runpy
import sys
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

import ampfast
from ampfast.cli.jsonl_log import StepLog
from ampfast.cli.scaler_clock import Record, Watch, is_first_rank
from ampfast.scaler import loop_checks

# Scalers that are described.
_MOST = 4
_NO_SCALER = (
    "the program used no gradient scaler in this process (one that it started by multiprocessing "
    "has ampfast's, and no line; other ones have torch's)"
)


class _Ended(SystemExit):
    """Ends a program after the asked number of steps, as sys.exit() does: no Exception."""


class _Patched:
    """Patches the process that unpickles it, before that imports the program."""

    def __init__(self, clip: bool, given: dict[str, Any]) -> None:
        self.arguments = clip, given

    def __reduce__(self) -> tuple[Any, ...]:
        # The other process cannot find ampfast yet: its path comes in the same pickle.
        code = f"import sys; sys.path[:] = {sys.path!r}; import ampfast.cli.run as _run; "
        given = json.dumps(self.arguments)  # as repr(inf) is no Python
        return exec, (f"{code}_run.patch_with_children(*_run.json.loads({given!r}))", {})


def patch_with_children(clip: bool, given: dict[str, Any]) -> None:
    """Calls `patch()` here, and in the processes that multiprocessing spawns from here.

    Args:
        clip: Whether torch's `clip_grad_norm_` is replaced, too.
        given: Arguments of `GradScaler` that scalers get by default.
    """
    ampfast.patch(clip_grad_norm=clip)
    defaults: Any = ampfast.GradScaler.__init__.__kwdefaults__
    defaults.update(given)
    prepared = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {**prepared(name), "ampfast": _Patched(clip, given)}


def run(
    program: str,
    arguments: list[str],
    is_module: bool,
    record: str | None,
    stop: int | None,
    keep_torch: bool,
    clip: bool,
    log: str | None,
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
        log: File for a line of JSON for each step, as `StepLog` writes it, on rank 0.
        given: Arguments of `GradScaler` that scalers get by default.

    Returns:
        The exit code 0; 2 without this script. Exceptions are the program's own.
    """
    path = os.path.abspath(program)
    if not (is_module or os.path.exists(program)):
        print(f"ampfast: there is no script {program!r}", file=sys.stderr)
        return 2
    # ampfast's classes, and torch's, from which they derive.
    kinds = getattr(ampfast, "ShardedGradScaler", ampfast.GradScaler).__mro__
    process, failed, is_over = os.getpid(), False, False
    steps = None if log is None or not is_first_rank() else StepLog(log)

    def finish() -> None:
        # Neither in a fork of the program's, nor a second time.
        if os.getpid() == process and not is_over:
            if steps is not None:
                steps.write()
            _report(watch, record, failed)

    def ended(one: Record) -> None:
        nonlocal is_over
        if steps is not None and os.getpid() == process:
            steps.see(one.scaler)
        if one.steps == stop and not is_over:
            finish()
            is_over = True
        if is_over:
            raise _Ended(0)

    watch = Watch(*kinds, keeps_values=record is not None, ended=ended)
    if not keep_torch:
        patch_with_children(clip, given)
        if record is None:  # what is compared has no other cost
            loop_checks.start(ampfast.GradScaler, is_whole=True)
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


def _report(watch: Watch, file: str | None, failed: bool) -> None:
    """Writes the records to a file, or prints a line for each."""
    records = list(watch.records.values())
    if file is not None:
        weights = watch.weights()
        Path(file).write_text(json.dumps([_facts(one, weights) for one in records]))
    elif is_first_rank():
        lines = [describe(one) for one in records[:_MOST]]
        lines += [] if records or failed else [_NO_SCALER]
        for number, line in enumerate(lines, start=1):
            which = f" scaler {number}:" if len(records) > 1 else ""
            print(f"ampfast:{which} {line}", file=sys.stderr)
        for one in records[:_MOST]:
            if getattr(one.scaler, "_track", None) is not None:
                print(one.scaler._report_or_reason(), file=sys.stderr)


def describe(record: Record) -> str:
    """Returns a sentence about a scaler."""
    scaler, found = record.scaler, record.medians()
    if not scaler._enabled:
        return "the gradient scaler is disabled, by enabled=False or for want of CUDA"
    if not record.steps:
        return "the gradient scaler was never updated: its update() was not called"
    is_ours = isinstance(scaler, ampfast.GradScaler)
    skipped = f"{scaler.stats().skipped} skipped" if is_ours else "of torch's class, not ampfast's"
    text = f"{record.steps} steps, {skipped}, final scale {scaler.get_scale():.15g}; "
    share = f", {found['share']:.2%} of a whole step" if "share" in found else ""
    return f"{text}the scaler's own time {found['own']:.1f} us a step{share}"


def _facts(record: Record, weights: int) -> dict[str, Any]:
    record.flush()
    record.values["weights"] = [(record.steps - 1, weights)]
    return {
        "told": describe(record),
        "is_ampfast": isinstance(record.scaler, ampfast.GradScaler),
        "final_scale": record.scaler.get_scale(),
        "steps": record.steps,
        "skipped": len({step for step, flag in record.values["skips"] if flag}),
        "medians": record.medians(),
        "values": record.values,
    }
