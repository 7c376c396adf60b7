"""A program of the user's with torch's scaler and with ampfast's, side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

_NO_SCALER = (
    "used no gradient scaler: there is nothing to compare (processes that it starts are not seen)"
)
_UNSEEN_END = (
    "ended without Python's exit, as by os._exit() or os.execv(): its scalers were not recorded "
    "(--steps N ends it before)"
)
_IS_OURS = "uses ampfast's scaler by itself: compare wants a program with torch's"
_REPEATED = "equals the first."
_UNSEEDED = "the program does not repeat itself (does it set its seeds?)."
_VERDICTS = {
    "equal": "The training is equal bit for bit.",
    "different": "The training DIFFERS, and torch's scaler repeats itself at that step.",
    "not repeatable": "So a difference from ampfast says nothing.",
}

# What one scaler did, as `run` writes it.
_Record = dict[str, Any]


class _CannotCompareError(Exception):
    """Says what the program lacks, as the end of a sentence."""


def run(program: str, arguments: list[str], is_module: bool, steps: int | None) -> int:
    """Runs a script or module with each scaler, and prints what differs.

    Args:
        program: Path of a script, or name of a module.
        arguments: The program's own arguments.
        is_module: Whether it is a module, as after ``python -m``.
        steps: Number of updates of a scaler after which a run ends; None for the program's end.

    Returns:
        The exit code: 0 if both are equal or torch's does not repeat itself, 1 if they differ, 2
        if they cannot be compared.
    """
    called = [*(["-m"] if is_module else []), program, *arguments]
    try:
        if "RANK" in os.environ:
            raise _CannotCompareError("is started by torchrun: compare runs one process, without")
        theirs, ours, again = (_records(called, number, steps) for number in (1, 2, 3))
    except _CannotCompareError as error:
        print(f"ampfast compare: {program} {error}", file=sys.stderr)
        return 2
    differences = _differences(theirs, ours)
    first, broken = (_first(each) for each in (differences, _differences(theirs, again)))
    verdict = "different"
    if len(ours) == len(theirs) and first is None:
        verdict = "equal"
    elif broken is not None and (first is None or broken <= first):
        verdict = "not repeatable"
    for number, records in enumerate(zip(theirs, ours, again, differences, strict=False), start=1):
        title = [f"scaler {number}"] if len(theirs) > 1 else []
        print("\n".join([*title, *describe(*records), ""]))
    told = f"differs from the first at step {broken}: {_UNSEEDED}" if broken else _REPEATED
    print(f"A second run with torch's scaler {told}\n{_VERDICTS[verdict]}")
    return int(verdict == "different")


def _records(called: list[str], number: int, stop: int | None) -> list[_Record]:
    """Runs the program in a process of its own; returns what its scalers did.

    The second run has ampfast's scaler, the first and the third torch's.
    """
    is_ours = number == 2
    name, again = "ampfast's" if is_ours else "torch's", ", again" if number > 2 else ""
    print(f"ampfast compare: runs with {name} scaler{again}", file=sys.stderr)
    command = [sys.executable, "-m", "ampfast", "run"]
    command += [] if is_ours else ["--keep-torch"]
    command += [] if stop is None else ["--stop", str(stop)]
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "records.json"), Path(folder, "log")
        with log.open("wb") as output:
            code = subprocess.run(
                [*command, "--record", str(file), *called],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
        if code != 0:
            start = f"failed with {name} scaler, with exit code {code}; the end of its output:"
            tail = log.read_text(errors="replace").splitlines()[-30:]
            raise _CannotCompareError("\n".join([start, *tail]))
        if not file.exists():
            raise _CannotCompareError(_UNSEEN_END)
        records: list[_Record] = json.loads(file.read_text())
    updated = [record for record in records if record["steps"]]
    if not is_ours and any(record["is_ampfast"] for record in records):
        raise _CannotCompareError(_IS_OURS)
    if not updated:
        raise _CannotCompareError(
            f"has nothing to compare: {records[0]['told']}" if records else _NO_SCALER
        )
    return updated


def _differences(
    theirs: list[_Record], ours: list[_Record]
) -> list[dict[str, tuple[int, str, str]]]:
    """Returns the first step that differs and both values, by scaler and kind of value.

    Scalers are compared in the order of their first use.
    """
    found: list[dict[str, tuple[int, str, str]]] = [{} for _ in theirs]
    for differing, a, b in zip(found, theirs, ours, strict=False):
        for name, values in a["values"].items():
            for pairs in zip_longest(values, b["values"][name]):
                # The digits are compared, since -0.0 == 0.0 and NaN != NaN.
                if repr(pairs[0]) != repr(pairs[1]):
                    step = min(pair[0] for pair in pairs if pair is not None)
                    told = [repr(p[1]) if p is not None and p[0] == step else "none" for p in pairs]
                    differing[name] = (step + 1, *told)
                    break
    return found


def _first(differences: list[dict[str, tuple[int, str, str]]]) -> int | None:
    """The first step that differs."""
    return min((step for one in differences for step, *_ in one.values()), default=None)


def describe(
    theirs: _Record, ours: _Record, again: _Record, differences: dict[str, tuple[int, str, str]]
) -> list[str]:
    """Returns lines about one scaler."""
    lines = _table(theirs, ours, again)
    for name in theirs["values"]:
        if name in differences:
            step, a, b = differences[name]
            lines.append(f"{name}: differ from step {step} on: torch {a}, ampfast {b}")
        elif not theirs["values"][name]:
            lines.append(f"{name}: none seen")
        else:
            lines.append(f"{name}: equal bit for bit")
    return lines


def _table(theirs: _Record, ours: _Record, again: _Record) -> list[str]:
    rows: list[tuple[str, ...]] = [("medians of one run each", "torch", "ampfast", "")]
    for name, title, unit in (
        ("own", "scaler's own time a step, us", ".1f"),
        ("share", "its share of a step", ".2%"),
        ("step", "a whole step, us", ".0f"),
    ):
        a, b = theirs["medians"][name], max(ours["medians"][name], 1e-9)
        word = f"{a / b:.2f}x faster" if a >= b else f"{b / a:.2f}x slower"
        note = f"(torch's again: {again['medians']['step']:.0f})" if name == "step" else word
        rows.append((title, f"{a:{unit}}", f"{b:{unit}}", note if name != "share" else ""))
    both = (theirs, ours)
    rows.append(("skipped steps", *(f"{side['skipped']} of {side['steps']}" for side in both), ""))
    rows.append(("final scale", *(f"{side['final_scale']:.15g}" for side in both), ""))
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"{a:{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}  {d}".rstrip() for a, b, c, d in rows]
