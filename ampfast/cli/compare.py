"""A program of the user's with torch's scaler and with ampfast's, side by side."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ampfast.cli.scaler_clock import is_first_rank
from ampfast.report import figure_of

SCHEMA = 3
# Updates of the second run with torch's scaler, which tells whether torch's repeats itself.
_SHORT = 20
# Share of a step below which a scaler does not matter.
_SMALL = 0.02
# From which ratio of the runs' steps, without the scalers, on times tell nothing.
_NOISY = 1.5

_NO_SCALER = (
    "used no gradient scaler: there is nothing to compare (processes that it starts are not seen)"
)
_UNSEEN_END = (
    "ended without Python's exit, as by os._exit() or os.execv(): its scalers were not recorded "
    "(--steps N ends it before)"
)
_IS_OURS = "uses ampfast's scaler by itself: compare wants a program with torch's"
_UNSEEDED = "the program does not repeat itself (does it set its seeds?)."
_NAN = "torch's became NaN, ampfast's did not"
_VERDICTS = {
    "equal": "The training is equal bit for bit.",
    "different": "The training DIFFERS, and each scaler repeats itself at that step.",
    "not repeatable": "So a difference from ampfast says nothing.",
}
_NAN_VERDICTS = {
    "different": f"They differ because {_NAN}.",
    "not repeatable": "Only the NaN does: fused SGD reads uninitialised memory after an overflow.",
}

# What one scaler did, as `run` writes it.
_Record = dict[str, Any]


class _CannotCompareError(Exception):
    """What the program lacks, as the end of a sentence."""


def run(
    program: str,
    arguments: list[str],
    is_module: bool,
    steps: int | None,
    as_json: bool,
    plot: str | None,
) -> int:
    """Runs a script or module with each scaler, and prints what differs.

    Args:
        program: Path of a script, or name of a module.
        arguments: The program's own arguments.
        is_module: Whether it is a module, as after ``python -m``.
        steps: Number of updates of a scaler after which a run ends; None for the program's end.
        as_json: Whether one JSON object is printed, instead of text.
        plot: File for a picture of losses, scales and times.

    Returns:
        The exit code: 0 if both are equal or torch's does not repeat itself, 1 if they differ, 2
        if they cannot be compared.
    """
    called = [*(["-m"] if is_module else []), program, *arguments]
    try:
        facts, theirs, ours = _compared(called, steps)
    except _CannotCompareError as error:
        print(f"ampfast compare: {program} {error}", file=sys.stderr)
        return 2
    if is_first_rank():
        print(json.dumps(facts, indent=2) if as_json else describe(facts))
        if plot is not None:
            title = f"{' '.join(called)}: {theirs[0]['steps']} steps"
            _draw(theirs, ours, title, plot)
    return int(facts["verdict"] == "different")


def _compared(
    called: list[str], steps: int | None
) -> tuple[dict[str, Any], list[_Record], list[_Record]]:
    """Runs the program; returns what is printed, and the first runs of each scaler."""
    theirs, ours = (_records(called, number, steps) for number in (1, 2))
    differences = _differences(theirs, ours)
    first = _first(differences)
    longest = max(record["steps"] for record in theirs)
    # All ranks must end at the same step, and one does not know what another found.
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    short = min(longest, max(_SHORT, first or 0)) if is_alone else longest
    is_short = short < longest
    stop = short if is_short else steps
    is_equal = len(ours) == len(theirs) and first is None
    # Before torch's, so that each has had an even and an odd place among the runs.
    ours_again = ours if is_equal and is_alone else _records(called, 4, stop)
    again = _records(called, 3, stop)
    broken, ours_broken = (
        _first(_differences(one, other, is_short))
        for one, other in ((theirs, again), (ours, ours_again))
    )
    is_broken = min(broken or math.inf, ours_broken or math.inf) <= (first or longest)
    again += theirs[len(again) :]  # scalers that a short run does not reach
    scalers = [
        {"torch": _short(a), "ampfast": _short(b), "again": _short(c), "first_differences": each}
        for a, b, c, each in zip(theirs, ours, again, differences, strict=False)
    ]
    facts = {
        "schema": SCHEMA,
        "program": called,
        "verdict": "equal" if is_equal else "not repeatable" if is_broken else "different",
        "torch_again": {"steps": short, "first_difference": broken},
        "ampfast_again": None if is_equal else ours_broken,
        "scalers": scalers,
        "noise": _noise(scalers),
    }
    return facts, theirs, ours


def _short(record: _Record) -> _Record:
    left_out = ("told", "times", "values")
    facts = {name: value for name, value in record.items() if name not in left_out}
    return {**facts, "losses": len(record["values"]["losses"])}


def _records(called: list[str], number: int, stop: int | None) -> list[_Record]:
    """Runs the program in a process of its own; returns what its scalers did.

    Even numbers are runs with ampfast's scaler, odd ones with torch's.
    """
    is_ours = number % 2 == 0
    name, again = "ampfast's" if is_ours else "torch's", ", again" if number > 2 else ""
    if is_first_rank():
        print(f"ampfast compare: runs with {name} scaler{again}", file=sys.stderr)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-m", "ampfast", "run"]
    command += [] if is_ours else ["--keep-torch"]
    command += [] if stop is None else ["--stop", str(stop)]
    environment = dict(os.environ)
    if "TORCHELASTIC_USE_AGENT_STORE" in environment:
        # The store of torchrun has the keys of the run before.
        port = str(int(environment["MASTER_PORT"]) + number)
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "records.json"), Path(folder, "log")
        with log.open("wb") as output:
            code = subprocess.run(
                [*command, "--record", str(file), *called],
                env=environment,
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
    theirs: list[_Record], ours: list[_Record], is_short: bool = False
) -> list[dict[str, tuple[int, str, str]]]:
    """By scaler and kind of value: the first step that differs, and both values.

    Scalers are compared in the order of their first use; of a short run whatever it has, but not
    the weights at its end.
    """
    found: list[dict[str, tuple[int, str, str]]] = [{} for _ in theirs]
    together = zip if is_short else zip_longest
    for differing, a, b in zip(found, theirs, ours, strict=False):
        for name, values in a["values"].items():
            if is_short and name == "weights":
                continue
            for pairs in together(values, b["values"][name]):
                # By their digits, since -0.0 == 0.0 and NaN != NaN.
                if repr(pairs[0]) != repr(pairs[1]):
                    step = min(pair[0] for pair in pairs if pair is not None)
                    told = [repr(p[1]) if p is not None and p[0] == step else "none" for p in pairs]
                    differing[name] = (step + 1, *told)
                    break
    return found


def _first(differences: list[dict[str, tuple[int, str, str]]]) -> int | None:
    """The first step that differs."""
    return min((step for one in differences for step, *_ in one.values()), default=None)


def _noise(scalers: list[dict[str, Any]]) -> float:
    """How many times as long the steps of one run take as another run's, without the scaler."""
    noise = 1.0
    for scaler in scalers:
        medians = [scaler[run]["medians"] for run in ("torch", "ampfast", "again")]
        rests = sorted(one["step"] - one["own"] for one in medians if "step" in one)
        noise = max([noise, *(rests[-1] / max(rest, 1e-9) for rest in rests)])
    return noise


def describe(facts: dict[str, Any]) -> str:
    """Formats the comparison as text."""
    lines, share, tells = [], 0.0, facts["noise"] <= _NOISY
    if not tells:
        lines.append(
            "The times tell nothing: without the scaler, the steps of the runs differ "
            f"{facts['noise']:.1f} times (is the machine busy?)."
        )
    for number, scaler in enumerate(facts["scalers"], start=1):
        lines += [f"scaler {number}"] if len(facts["scalers"]) > 1 else []
        step = scaler["again"]["medians"].get("step", 0.0)
        lines += _table(scaler["torch"], scaler["ampfast"], f"(torch's again: {step:.0f})", tells)
        found = scaler["first_differences"]
        for name in ("losses", "scales", "skips", "weights"):
            if name in found:
                lines.append(f"{name}: {_apart(name, *found[name])}")
            elif name == "losses" and not scaler["torch"]["losses"]:
                lines.append("losses: no losses seen: scale() was given none")
            else:
                lines.append(f"{name}: equal bit for bit")
        lines.append("")
        share += scaler["torch"]["medians"].get("share", 1.0)
    if tells:
        noise = f"{facts['noise']:.2f} times"
        lines.append(f"Without the scaler, the steps of the runs differ {noise}.")
    steps, step = facts["torch_again"].values()
    told = f"differs from the first at step {step}: {_UNSEEDED}" if step else "equals the first."
    lines.append(f"A second run with torch's scaler, of {steps} steps, {told}")
    if facts["ampfast_again"] is not None:
        lines.append(f"One with ampfast's differs from its first at step {facts['ampfast_again']}.")
    lines.append(_VERDICTS[facts["verdict"]])
    if any(_NAN in line for line in lines):
        lines.append(_NAN_VERDICTS[facts["verdict"]])
    if tells and share < _SMALL:
        lines.append(
            f"With torch's scaler {share:.2%} of a step are the scaler's: for the speed of this "
            "program it does not matter which one it has."
        )
    return "\n".join(lines)


def _apart(name: str, step: int, a: str, b: str) -> str:
    if "none" in (a, b):
        return f"differ in number at step {step}: torch {a}, ampfast {b}"
    if name == "weights":
        return f"differ at the end, step {step}"
    if name == "skips":
        return f"differ at step {step}: {'torch' if float(a) else 'ampfast'} alone skips it"
    text = f"differ from step {step} on: torch {a}, ampfast {b}"
    if a == "nan":
        return f"{text}: {_NAN}"
    return text if b == "nan" else f"{text}, apart by {abs(float(a) - float(b)):.3g}"


def _table(theirs: _Record, ours: _Record, again: str, tells: bool) -> list[str]:
    rows: list[tuple[str, ...]] = [("medians of one run each", "torch", "ampfast", "")]
    times, others = theirs["medians"], ours["medians"]
    for name, title, unit, note in (
        ("own", "scaler's own time a step, us", ".1f", ""),
        ("gpu", "the same on the GPU, us", ".1f", ""),
        ("share", "its share of a step", ".2%", " "),
        ("step", "a whole step, us", ".0f", again),
    ):
        if name in times and name in others:
            a, b = times[name], max(others[name], 1e-9)
            word = f"{a / b:.2f}x faster" if a >= b else f"{b / a:.2f}x slower"
            rows.append((title, f"{a:{unit}}", f"{b:{unit}}", note or (word if tells else "")))
    if theirs["waits"] is not None:
        rows.append(("waits of the host a step", str(theirs["waits"]), str(ours["waits"]), ""))
    both = (theirs, ours)
    rows.append(("skipped steps", *(f"{side['skipped']} of {side['steps']}" for side in both), ""))
    rows.append(("final scale", *(f"{side['final_scale']:.15g}" for side in both), ""))
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"{a:{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}  {d}".rstrip() for a, b, c, d in rows]


def _draw(theirs: list[_Record], ours: list[_Record], title: str, path: str) -> None:
    """Draws losses, scales and times of both runs, with a column for each scaler."""
    count = min(len(theirs), len(ours))
    figure = figure_of(6 * count, 8)
    panels = figure.subplots(3, count, sharex="col", squeeze=False)
    for column, sides in zip(panels.T, zip(theirs, ours, strict=False), strict=True):
        for name, record, color, width in zip(
            ("torch", "ampfast"), sides, ("#9ecae1", "#b30000"), (4, 1), strict=True
        ):
            own = list(enumerate(record["times"]["own"]))
            lines = (record["values"]["losses"], record["values"]["scales"], own)
            median = record["medians"].get("own")
            labels = name, name, name if median is None else f"{name}, median {median:.3g} us"
            for panel, line, label in zip(column, lines, labels, strict=True):
                steps, values = [step + 1 for step, _ in line], [value for _, value in line]
                # Several losses of a step are no line.
                mark = "-" if len(set(steps)) == len(steps) else "."
                panel.plot(steps, values, mark, color=color, lw=width, ms=2 * width, label=label)
        column[0].set(ylabel="loss")
        column[1].set(ylabel="scale")
        column[1].set_yscale("log", base=2)
        column[2].set(ylabel="scaler's own time, us", yscale="log", xlabel="step")
        column[2].xaxis.get_major_locator().set_params(integer=True)
        column[0].legend()
        column[2].legend()
    figure.suptitle(title)
    figure.savefig(path)
