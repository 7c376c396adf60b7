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
from ampfast.watch import Record, Watch

NEVER_UPDATED = "the gradient scaler was never updated: its update() was not called"
# Scalers that are described.
_MOST = 4

# Files whose frames come before the program's own in a traceback.
_OUTER = (__file__, runpy.run_module.__code__.co_filename)


def run(
    program: str,
    arguments: list[str],
    is_module: bool,
    record: str | None,
    stop: int | None,
    keep_torch: bool,
    clip: bool,
) -> int:
    """Runs a script or module as Python would, and prints a line about its scaler at the end.

    Args:
        program: Path of a script, or name of a module.
        arguments: The program's own arguments.
        is_module: Whether it is a module, as after ``python -m``.
        record: File for the records of all scalers, as JSON, in place of the line.
        stop: Number of updates of a scaler after which the process ends.
        keep_torch: Whether torch's scaler stays, and is watched.
        clip: Whether torch's `clip_grad_norm_` is replaced, too.

    Returns:
        The exit code 0; 2 without such a script. Exceptions are the program's own.
    """
    if not (is_module or os.path.isfile(program)):
        print(f"ampfast: there is no script {program!r}", file=sys.stderr)
        return 2
    # ampfast's classes, and torch's, from which they derive.
    kinds = getattr(ampfast, "ShardedGradScaler", ampfast.GradScaler).__mro__
    if not keep_torch:
        ampfast.patch(clip_grad_norm=clip)
    process, failed = os.getpid(), False

    def finish() -> None:
        records = list(watch.records.values())
        if os.getpid() != process:
            return  # a fork of the program's
        if record is not None:
            Path(record).write_text(json.dumps([_facts(one) for one in records]))
        elif os.environ.get("RANK", "0") == "0":
            for number, one in enumerate(records[:_MOST], start=1):
                which = f" scaler {number}:" if len(records) > 1 else ""
                print(f"ampfast:{which} {describe(one)}", file=sys.stderr)
            if len(records) > _MOST:
                more = f"{len(records) - _MOST} more scalers: is one made in every step?"
                print(f"ampfast: {more}", file=sys.stderr)
            if not records and not failed:
                print("ampfast: the program used no gradient scaler", file=sys.stderr)

    def ended(one: Record) -> None:
        if one.steps == stop:
            finish()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # nothing that the program does after an exception may follow

    watch = Watch(*kinds, keeps_values=record is not None, ended=ended)
    # The first one registered runs last, behind a traceback.
    atexit.register(finish)
    sys.argv = [program, *arguments]
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            return 0
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.path.dirname(os.path.realpath(program))
        # Not runpy.run_path, which takes __main__ away again before exit functions run.
        main = sys.modules["__main__"] = ModuleType("__main__")
        path = os.path.abspath(program)
        vars(main).update(__file__=path, __builtins__=builtins, __cached__=None)
        with io.open_code(path) as source:
            code = compile(source.read(), path, "exec")
        exec(code, vars(main))
    except BaseException as error:
        failed = not isinstance(error, SystemExit) or bool(error.code)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OUTER:
            trace = trace.tb_next
        hook = sys.excepthook
        sys.excepthook = lambda kind, value, _: hook(kind, value.with_traceback(trace), trace)
        raise
    return 0


def describe(record: Record) -> str:
    """Returns a sentence about a scaler."""
    scaler, found = record.scaler, record.medians()
    if not scaler._enabled:
        return "the gradient scaler is disabled, by enabled=False or for want of CUDA"
    if not record.steps:
        return NEVER_UPDATED
    is_ours = isinstance(scaler, ampfast.GradScaler)
    skipped = f"{scaler.stats().skipped} skipped" if is_ours else "of torch's class, not ampfast's"
    text = f"{record.steps} steps, {skipped}, final scale {scaler.get_scale():.15g}; "
    share = f", {found['share']:.2%} of a whole step" if "share" in found else ""
    return f"{text}the scaler's own time {found['own']:.1f} us a step{share}"


def _facts(record: Record) -> dict[str, Any]:
    record.flush()
    scaler = record.scaler
    scale = getattr(scaler, "_scale", None)  # a disabled one has none
    return {
        "is_ampfast": isinstance(scaler, ampfast.GradScaler),
        "is_enabled": scaler._enabled,
        "device": None if scale is None else str(scale.device),
        "final_scale": scaler.get_scale(),
        "steps": record.steps,
        "skipped": len({step for step, flag in record.values["skips"] if flag}),
        "waits": record.waits,
        "medians": record.medians(),
        "times": record.times,
        "values": record.values,
    }
