"""Runs the parts of a proof, each a process with a time limit and a log, and sums up."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Seconds for a terminated part to write its results.
GRACE_SECONDS = 10.0
# Exit code of a shell for a missing command.
MISSING = 127
LEFT = "SECONDS_LEFT"
# Seconds that a command with a time limit keeps for its end.
MARGIN_SECONDS = 25
WIDTH = 100
MOST_LINES = 15


@dataclass(frozen=True)
class Part:
    """Part of a run.

    Attributes:
        name: Name for `--parts` and the log.
        commands: Commands, run in order whether or not earlier ones failed. `LEFT` stands for the
            seconds in which a command should end.
        seconds: Time limit of all commands together.
        each: Time limit of each command; later ones run in any case.
        least: Seconds of the run that earlier parts must leave, as far as it has as many.
        vital: Whether a failure of the first command ends the run.
        environment: Variables added to those of this process.
        summary: Pattern; the last matching line of each command is shown.
        details: Pattern; matching lines are shown below the verdict.
        unavailable: Pattern of a line that tells why this machine cannot run the part.
        after: Called at the end of the part, in any case.
    """

    name: str
    commands: Sequence[Sequence[str]]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    summary: str = ""
    details: str = r"^(FAILED|ERROR|WRONG)\b|\bExit: "
    unavailable: str = ""
    after: Callable[[], None] | None = None
    each: float = math.inf
    least: float = 0.0
    vital: bool = False


@dataclass
class Outcome:
    """Verdict of a part: "ok", "failed", "cut off", "unavailable" or "not run"."""

    part: Part
    verdict: str = "not run"
    seconds: float = 0.0
    line: str = ""
    details: list[str] = field(default_factory=list)


class Run:
    """Parts in stages; those of a stage run side by side.

    Args:
        stages: The parts.
        out: Folder of the logs and of `verdict.txt`, which is always up to date.
        root: Working directory of the commands.
        seconds: Limit of the whole run, which shortens those of the parts. At most half of it is
            kept for the `least` of later ones.
    """

    def __init__(
        self, stages: Sequence[Sequence[Part]], out: Path, root: Path, seconds: float
    ) -> None:
        self.outcomes = [Outcome(part) for stage in stages for part in stage]
        self._stages = stages
        self._out = out
        self._root = root
        end = time.monotonic() + seconds
        least = [max((part.least for part in stage), default=0.0) for stage in stages]
        share = min(1.0, seconds / 2 / (sum(least) or 1.0))
        self._ends = [end - share * sum(least[number + 1 :]) for number in range(len(stages))]
        self._broken = ""
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Terminates running parts and keeps others from starting."""
        self._stopped.set()

    def run(self) -> int:
        """Runs everything; returns 0 if no part failed, else 1."""
        self._out.mkdir(parents=True, exist_ok=True)
        self._write()
        for stage, end in zip(self._stages, self._ends, strict=True):
            of_stage = [o for o in self.outcomes if o.part in stage]
            if self._broken:
                for outcome in of_stage:
                    outcome.line = f"cannot run: {self._broken} did not succeed"
                self._write()
                continue
            workers = [threading.Thread(target=self._run_part, args=(o, end)) for o in of_stage]
            for worker in workers:
                worker.start()
            for worker in workers:
                # In slices, so that signals are handled.
                while worker.is_alive():
                    worker.join(0.1)
        return 0 if all(o.verdict in ("ok", "unavailable") for o in self.outcomes) else 1

    def verdict(self) -> str:
        """Table of part, verdict, seconds and summary; then details."""
        width = max((len(o.part.name) for o in self.outcomes), default=0)
        lines = []
        for outcome in self.outcomes:
            line = f"{outcome.part.name:<{width}}  {outcome.verdict:<11}  {outcome.seconds:6.1f} s"
            lines.append(f"{line}  {outcome.line[:WIDTH]}".rstrip())
        for outcome in self.outcomes:
            if not outcome.details:
                continue
            lines += ["", f"{outcome.part.name}:"]
            lines += [f"  {line[: 2 * WIDTH]}" for line in outcome.details[:MOST_LINES]]
            if len(outcome.details) > MOST_LINES:
                lines.append(f"  and {len(outcome.details) - MOST_LINES} more: see its log")
        return "\n".join(lines)

    def _run_part(self, outcome: Outcome, end: float) -> None:
        part = outcome.part
        begin = time.monotonic()
        end = min(begin + part.seconds, end)
        path = self._out / f"{part.name}.log"
        codes: list[int | None] = []
        summaries: list[str] = []
        cut_off: list[str] = []
        try:
            with open(path, "wb") as log:
                for command in part.commands:
                    if self._stopped.is_set() or time.monotonic() >= end:
                        codes += [None] if codes else []
                        cut_off += [f"not begun: {command[-1]}"] if codes else []
                        continue
                    start = log.tell()
                    codes.append(self._run_command(part, command, log.fileno(), end))
                    log.seek(0, os.SEEK_END)
                    summaries.append(_last_line(path, start, part.summary))
                    if codes[-1] is None and len(part.commands) > 1:
                        cut_off.append(f"cut off: {command[-1]}")
                    if part.vital and codes[0] != 0:
                        break
            text = path.read_text(errors="replace")
            # A part that was cut off has no summary, so its last line is shown.
            ended = [s for s, code in zip(summaries, codes, strict=False) if code is not None]
            outcome.line = combined(ended or summaries)
            lines = [line for line in text.splitlines() if re.search(part.details, line)]
            outcome.details = cut_off + lines
            unavailable = part.unavailable and re.search(f"(?m)^.*({part.unavailable}).*$", text)
            if None in codes:
                outcome.verdict = "cut off"
            elif not codes:
                outcome.verdict = "not run"
            elif unavailable and codes[-1] and not any(codes[:-1]):
                outcome.verdict, outcome.line = "unavailable", unavailable[0].strip()
            else:
                outcome.verdict = "failed" if any(codes) else "ok"
        except OSError as error:
            outcome.verdict, outcome.line = "failed", str(error)
        finally:
            if part.vital and (not codes or codes[0] != 0):
                self._broken = part.name
            outcome.seconds = time.monotonic() - begin
            if part.after is not None:
                part.after()
            self._write()
        print(f"{part.name}: {outcome.verdict}, {outcome.seconds:.0f} s", flush=True)

    def _run_command(self, part: Part, command: Sequence[str], log: int, end: float) -> int | None:
        """Returns the exit code, or None if the command was terminated."""
        begin = time.monotonic()
        end = min(end, begin + part.each)
        left = str(max(1, int(end - begin - MARGIN_SECONDS)))
        try:
            process = subprocess.Popen(
                [word.replace(LEFT, left) for word in command],
                cwd=self._root,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError:
            os.write(log, f"{command[0]} is not installed\n".encode())
            return MISSING
        try:
            while not self._stopped.is_set() and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(0.1)
            return None
        finally:
            _end(process)

    def _write(self) -> None:
        with self._lock:
            partial = self._out / "verdict.txt.new"
            partial.write_text(self.verdict() + "\n")
            partial.replace(self._out / "verdict.txt")


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


def _last_line(path: Path, start: int, pattern: str) -> str:
    """Last line from a byte on that matches `pattern`, or else the last nonempty one."""
    with open(path, "rb") as log:
        log.seek(start)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    found = [line for line in lines if line and re.search(pattern, line)]
    found = found or [line for line in lines if line]
    return re.sub(r"^=+ | =+$", "", found[-1]) if found else ""


def combined(summaries: Sequence[str]) -> str:
    """Joins lines; counts such as "3 passed" are added up."""
    if len(summaries) < 2:
        return "".join(summaries)
    counts: dict[str, int] = {}
    for summary in summaries:
        found = re.findall(r"(\d+) (\w+)", summary.rpartition(" in ")[0])
        if not found:
            return "; ".join(filter(None, summaries))
        for count, what in found:
            counts[what] = counts.get(what, 0) + int(count)
    return ", ".join(f"{count} {what}" for what, count in counts.items())


@contextlib.contextmanager
def stopped_by_signals(run: Run) -> Iterator[None]:
    """Context in which SIGTERM and Ctrl-C stop the run, which still sums up."""
    before = {
        number: signal.signal(number, lambda *_: run.stop())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
