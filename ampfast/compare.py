"""A program of the user's with torch's scaler and with ampfast's, side by side."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import select
import socket
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import torch

from ampfast.run import NEVER_UPDATED

SCHEMA = 2
# Updates of the second run with torch's scaler, which tells whether torch's repeats itself.
_SHORT = 20
# Share of a step below which a scaler does not matter.
_SMALL = 0.02
# From which ratio of the runs' steps, without the scalers, on times tell nothing.
_NOISY = 1.5
# Bytes of standard input for a run, and the seconds until its first one.
_MOST_INPUT, _INPUT_WAIT = 2**26, 1.0

_NO_SCALER = (
    "used no gradient scaler: there is nothing to compare (processes that it starts are not seen)"
)
_UNSEEN_END = (
    "ended without Python's exit, as by os._exit() or os.execv(): its scalers were not recorded "
    "(--steps N ends it before)"
)
_DISABLED = "has a gradient scaler that is disabled, by enabled=False or for want of CUDA"
_NO_UPDATE = "never calls update() of its gradient scaler: there is no step to compare"
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
        as_json: Whether one JSON object is printed, in place of text.
        plot: File for a picture of losses, scales and times.

    Returns:
        The exit code: 0 if both are equal or torch's does not repeat itself, 1 if they differ, 2
        if they cannot be compared.
    """
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        print("ampfast compare: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    if plot is not None and not os.access(Path(plot).parent, os.W_OK):
        print(f"ampfast compare: --plot cannot write {plot}", file=sys.stderr)
        return 2
    called = [*(["-m"] if is_module else []), program, *arguments]
    try:
        with tempfile.TemporaryFile() as given:
            _keep_input(given)
            theirs, ours = (_records(called, number, steps, given) for number in (1, 2))
            # Where one of several threads ends the run, the other ones are somewhere.
            is_cut = steps is not None and _has_threads(theirs, ours)
            ours = _matched(theirs, ours, is_cut)
            differences, found = _differences(theirs, ours, is_cut)
            is_equal = not found and (is_cut or _steps(theirs) == _steps(ours))
            longest = max(_steps(theirs))
            # All ranks must end at the same step.
            is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
            short = min(longest, max([_SHORT, *found])) if is_alone else longest
            is_short = short < longest
            stop = short if is_short else steps
            # Before torch's, so that each has had an even and an odd place among the runs. What
            # one rank finds, the other ones do not know.
            is_enough = is_equal and is_alone
            ours_again = ours if is_enough else _records(called, 4, stop, given)
            again = _records(called, 3, stop, given)
        is_short = is_short or is_cut
        again, ours_again = (
            _matched(one, other, is_short) for one, other in ((theirs, again), (ours, ours_again))
        )
    except _CannotCompareError as error:
        print(f"ampfast compare: {program} {error}", file=sys.stderr)
        return 2
    (_, broken), (_, ours_broken) = (
        _differences(one, other, is_short) for one, other in ((theirs, again), (ours, ours_again))
    )
    first = min(found, default=longest)
    is_broken = min([*broken, *ours_broken], default=longest + 1) <= first
    verdict = "equal" if is_equal else "not repeatable" if is_broken else "different"
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "program": called,
        "verdict": verdict,
        "are_weights_compared": not is_cut,
        "torch_again": {"steps": short, "first_difference": min(broken, default=None)},
        "ampfast_again": None if is_equal else min(ours_broken, default=None),
        "scalers": [
            {
                "torch": _short(a),
                "ampfast": _short(b),
                "again": _short(c),
                "first_differences": each,
            }
            for a, b, c, each in zip(theirs, ours, again, differences, strict=False)
        ],
    }
    facts["noise"] = _noise(facts["scalers"])
    if _is_first():
        print(json.dumps(facts, indent=2) if as_json else describe(facts))
        if plot is not None:
            _draw(theirs, ours, plot)
    return int(verdict == "different")


def _short(record: dict[str, Any]) -> dict[str, Any]:
    facts = {name: value for name, value in record.items() if name not in ("times", "values")}
    return {**facts, "losses": len(record["values"]["losses"])}


def _steps(records: list[dict[str, Any]]) -> list[int]:
    return [record["steps"] for record in records]


def _has_threads(*runs: list[dict[str, Any]]) -> bool:
    return any(len({thread for one in run for thread in one["threads"]}) > 1 for run in runs)


def _matched(
    theirs: list[dict[str, Any]], others: list[dict[str, Any]], is_short: bool
) -> list[dict[str, Any]]:
    """Puts the scalers of another run in the order of these, as threads may start in any order.

    Each comes to the place of the one with which it agrees longest. In a short run a scaler may
    not have begun: its place gets the record that is there.
    """
    found_at = dict(enumerate(others))
    is_whole = is_short or len(others) == len(theirs)
    if is_whole and _has_threads(theirs, others) and _differences(theirs, others, is_short)[1]:
        pairs = []
        for i, one in enumerate(theirs):
            for j, other in enumerate(others):
                [found], _ = _differences([one], [other], is_short)
                steps = [step for name, (step, *_) in found.items() if name != "weights"]
                pairs.append((-min(steps, default=math.inf), abs(i - j), i, j))
        left = found_at
        found_at = {}
        for _, _, i, j in sorted(pairs):
            if i not in found_at and j in left:
                found_at[i] = left.pop(j)
    if is_short:
        return [found_at.get(i, one) for i, one in enumerate(theirs)]
    return [found_at[i] for i in sorted(found_at)]


def _keep_input(file: IO[bytes]) -> None:
    """Copies standard input, for every run to read from its start; nothing of a terminal."""
    size = 0
    if sys.stdin is not None and not sys.stdin.isatty():
        # A pipe may stay open, without a byte, for as long as this process lives.
        while size < _MOST_INPUT and (size or select.select([0], [], [], _INPUT_WAIT)[0]):
            part = os.read(0, 2**16)
            if not part:
                break
            size += file.write(part)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _records(
    called: list[str], number: int, stop: int | None, given: IO[bytes]
) -> list[dict[str, Any]]:
    """Runs the program in a process of its own; returns what its scalers did.

    Even numbers are runs with ampfast's scaler, odd ones with torch's.
    """
    is_ours = number % 2 == 0
    name, again = "ampfast's" if is_ours else "torch's", ", again" if number > 2 else ""
    if _is_first():
        print(f"ampfast compare: runs with {name} scaler{again}", file=sys.stderr)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-m", "ampfast", "run"]
    command += [] if is_ours else ["--keep-torch"]
    command += [] if stop is None else ["--stop", str(stop)]
    environment = dict(os.environ)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        environment |= _own_store(number)
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "records.json"), Path(folder, "log")
        given.seek(0)
        with log.open("wb") as output:
            code = subprocess.run(
                [*command, "--record", str(file), *called],
                env=environment,
                stdin=given,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
        is_recorded = file.exists()
        records: list[dict[str, Any]] = json.loads(file.read_text()) if is_recorded else []
        tail = log.read_text(errors="replace").splitlines()[-30:]
    updated = [record for record in records if record["steps"]]
    is_enabled = any(record["is_enabled"] for record in records)
    if code != 0:
        start = f"failed with {name} scaler, with exit code {code}; the end of its output:"
        tail += [f"ampfast: {NEVER_UPDATED}"] if is_enabled and not updated else []
        raise _CannotCompareError("\n".join([start, *tail]))
    if not is_recorded:
        raise _CannotCompareError(_UNSEEN_END)
    if not is_ours and any(record["is_ampfast"] for record in records):
        raise _CannotCompareError(_IS_OURS)
    if not updated:
        raise _CannotCompareError(
            _NO_SCALER if not records else _NO_UPDATE if is_enabled else _DISABLED
        )
    return updated


def _own_store(number: int) -> dict[str, str]:
    """Where the ranks of one run meet: torchrun's own store has the keys of the run before."""
    key, port = f"ampfast/{number}", int(os.environ["MASTER_PORT"])
    connect: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
    store = connect(os.environ["MASTER_ADDR"], port, is_master=False)
    if os.environ["RANK"] == "0":
        with socket.socket() as unused:
            unused.bind(("", 0))
            store.set(key, str(unused.getsockname()[1]))
    return {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": store.get(key).decode()}


def _differences(
    theirs: list[dict[str, Any]], ours: list[dict[str, Any]], is_short: bool = False
) -> tuple[list[dict[str, tuple[int, str, str]]], list[int]]:
    """By scaler and kind of value: the first step that differs, and both values; all such steps.

    Of a short second run, whatever it has is compared, but not the weights at its end.
    """
    found: list[dict[str, tuple[int, str, str]]] = [{} for _ in theirs]
    for first, a, b in zip(found, theirs, ours, strict=False):
        for name, values in a["values"].items():
            if is_short and name == "weights":
                continue
            others = b["values"][name]
            for pairs in (zip if is_short else zip_longest)(values, others):
                # By their digits, since -0.0 == 0.0 and NaN != NaN.
                if repr(pairs[0]) != repr(pairs[1]):
                    step = min(pair[0] for pair in pairs if pair is not None)
                    told = [repr(p[1]) if p is not None and p[0] == step else "none" for p in pairs]
                    first[name] = (step + 1, *told)
                    break
    return found, [step for first in found for step, *_ in first.values()]


def _noise(scalers: list[dict[str, Any]]) -> float:
    """How many times as long the steps of one run take as those of another, without the scaler."""
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
        for name in ("losses", "elements", "scales", "skips", "weights"):
            if name == "weights" and not facts["are_weights_compared"]:
                lines.append("weights: not compared: one thread's last step is not the others'")
            elif name in found:
                lines.append(f"{name}: {_apart(name, *found[name])}")
            elif name == "losses" and not scaler["torch"]["losses"]:
                lines.append("losses: no losses seen: scale() was given none")
            elif name != "elements":
                lines.append(f"{name}: equal bit for bit")
        lines.append("")
        share += scaler["torch"]["medians"].get("share", 1.0)
    steps, step = facts["torch_again"].values()
    told = (
        "equals the first."
        if step is None
        else f"differs from the first at step {step}: {_UNSEEDED}"
    )
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
    place = {"elements": "in a loss of several", "weights": "at the end"}
    if name in place:
        return f"differ {place[name]}, step {step}"
    if name == "skips":
        return f"differ at step {step}: {'torch' if float(a) else 'ampfast'} alone skips it"
    text = f"differ from step {step} on: torch {a}, ampfast {b}"
    if a == "nan":
        return f"{text}: {_NAN}"
    return text if b == "nan" else f"{text}, apart by {abs(float(a) - float(b)):.3g}"


def _table(theirs: dict[str, Any], ours: dict[str, Any], again: str, tells: bool) -> list[str]:
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


def _draw(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], path: str) -> None:
    """Draws losses, scales and times of both runs, with a column for each scaler."""
    from ampfast.report import figure_of

    count = min(len(theirs), len(ours))
    figure = figure_of(6 * count, 8)
    panels = figure.subplots(3, count, sharex="col", squeeze=False)
    for column, sides in zip(panels.T, zip(theirs, ours, strict=False), strict=True):
        for name, record, color, width in zip(
            ("torch", "ampfast"), sides, ("#9ecae1", "#b30000"), (4, 1), strict=True
        ):
            own = list(enumerate(record["times"]["own"]))
            lines = (record["values"]["losses"], record["values"]["scales"], own)
            for panel, line in zip(column, lines, strict=True):
                steps, values = [step + 1 for step, _ in line], [value for _, value in line]
                # Several losses of a step are no line.
                mark = "-" if len(set(steps)) == len(steps) else "."
                panel.plot(steps, values, mark, color=color, lw=width, ms=2 * width, label=name)
        column[0].set(ylabel="loss")
        column[1].set(ylabel="scale", yscale="log")
        column[2].set(ylabel="scaler's own time, us", yscale="log", xlabel="step")
        column[0].legend()
    figure.savefig(path)
