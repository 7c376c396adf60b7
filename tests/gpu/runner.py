"""Runs the parts of a proof, each of commands with a time limit and logs, and sums up."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# The backends of a GPU.
BACKENDS = ("triton", "cuda")
# Seconds for a terminated command to write its results.
GRACE_SECONDS = 10.0
# In a command, stands for the seconds in which it should end; some are kept for its end.
LEFT = "SECONDS_LEFT"
MARGIN_SECONDS = 15
# What is shown of a log.
MOST_LINES, WIDTH = 15, 200
UNAVAILABLE = "Device not supported|ERR_NVGPUCTRPERM"
DETAILS = (
    r"^(FAILED|ERROR|WRONG|skipped|left out|stopped)\b|\bExit: |AddressSanitizer|runtime error:"
)


@dataclass
class Part:
    """Part of a run, and how it ended.

    Attributes:
        name: Name for `--parts` and the logs.
        commands: Commands, begun in order whether or not earlier ones failed.
        seconds: Time limit of all commands together.
        environment: Variables added to those of this process.
        at_once: Number of commands that run side by side.
        summary: Pattern of the line of a log that sums it up, by default the last one.
        vital: Whether nothing runs behind a failure.
        shown: Whether its output is printed, too.
        after: Called at its end with the exit codes; None of a command that was cut off.
        verdict: "ok", "failed", "cut off", "unavailable" or "not run".
        took: Seconds.
        lines: What its logs say: a summary for each command, then details.
    """

    name: str
    commands: Sequence[Sequence[str]]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    at_once: int = 1
    summary: str = "."
    vital: bool = False
    shown: bool = False
    after: Callable[[list[int | None]], None] | None = None
    verdict: str = "not run"
    took: float = 0.0
    lines: list[str] = field(default_factory=list)


def run(
    parts: Sequence[Part], logs: Path, root: Path, seconds: float, written: Path, about: str = ""
) -> int:
    """Runs parts in order; returns 0 if none failed.

    Args:
        parts: The parts.
        logs: Folder of the logs, which is emptied.
        root: Working directory of the commands.
        seconds: Limit of the whole run.
        written: File that has `about` and the verdicts so far, at any time.
        about: A line on the machine and the versions.
    """
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    written.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    for part in parts:
        begin = time.monotonic()
        paths = [logs / f"{part.name}-{number}.log" for number in range(len(part.commands))]
        codes: list[int | None] = [None] * len(paths)
        try:
            run_commands(part, paths, root, min(end, begin + part.seconds), codes)
        finally:
            part.took = time.monotonic() - begin
            sum_up(part, paths, codes)
            written.write_text(f"{about}\n{table(parts)}")
        print(f"{part.name}: {part.verdict}, {part.took:.0f} s", flush=True)
        if part.shown:
            print("".join(path.read_text(errors="replace") for path in paths if path.exists()))
        if part.after is not None:
            part.after(codes)
        if part.vital and part.verdict != "ok":
            break
    return 0 if all(part.verdict in ("ok", "unavailable") for part in parts) else 1


def run_commands(
    part: Part, paths: list[Path], root: Path, end: float, codes: list[int | None]
) -> None:
    """Runs the commands of a part until a time, each with its log; writes exit codes."""
    waiting = list(range(len(paths)))
    running: dict[int, subprocess.Popen[bytes]] = {}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **part.environment}
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < part.at_once:
                number = waiting.pop(0)
                left = str(max(1, int(end - time.monotonic() - MARGIN_SECONDS)))
                command = [word.replace(LEFT, left) for word in part.commands[number]]
                with paths[number].open("wb") as log:
                    try:
                        running[number] = subprocess.Popen(
                            command,
                            cwd=root,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    except FileNotFoundError:
                        log.write(f"{command[0]}: {UNAVAILABLE.split('|')[0]}, missing\n".encode())
                        codes[number] = 127
            for number, process in list(running.items()):
                if process.poll() is not None:
                    codes[number] = running.pop(number).returncode
            time.sleep(0.02)
    finally:
        for process in running.values():
            _end(process)


def sum_up(part: Part, paths: list[Path], codes: list[int | None]) -> None:
    """Sets the verdict of a part, and what its logs say."""
    summaries, details, reasons = [], [], []
    for command, path, code in zip(part.commands, paths, codes, strict=True):
        text = path.read_text(errors="replace") if path.exists() else "not begun"
        lines = [line for line in text.splitlines() if line.strip()] or [""]
        told = [line for line in lines if re.search(part.summary, line)] or lines
        summaries.append(("" if code is not None else f"cut off: {command[-1]}: ") + told[-1])
        details += [line for line in lines if re.search(DETAILS, line)]
        if code:
            reasons.append(re.search(UNAVAILABLE, text))
    if None in codes:
        part.verdict = "cut off" if any(path.exists() for path in paths) else "not run"
    elif any(codes):
        part.verdict = "unavailable" if all(reasons) else "failed"
    else:
        part.verdict = "ok"
    part.lines = [line.strip("= ")[:WIDTH] for line in (*summaries, *details[:MOST_LINES])]


def table(parts: Sequence[Part]) -> str:
    """Part, verdict and seconds in a line each, with what its logs say below."""
    lines = []
    for part in parts:
        lines.append(f"{part.name:<9}  {part.verdict:<11}  {part.took:6.1f} s")
        lines += [f"    {line}" for line in dict.fromkeys(part.lines)]
    return "\n".join(lines) + "\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    # Remaining children have had time to end.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
