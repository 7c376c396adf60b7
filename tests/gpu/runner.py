"""Runs the parts of a proof, each a process with a time limit and a log, and sums up."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

# Seconds for a terminated part to write its results.
GRACE_SECONDS = 10.0
# Exit code of a shell for a missing command.
MISSING = 127
LEFT = "SECONDS_LEFT"
# Seconds that a command with a time limit keeps for its end.
MARGIN_SECONDS = 15
WIDTH = 100
MOST_LINES = 15
# Of each log, its end: all of them are one file of a few megabytes.
LOG_BYTES = 2 << 20
CLOCKS = (
    *("clocks.sm", "clocks.mem", "clocks_event_reasons.active"),
    *("temperature.gpu", "power.draw", "pstate"),
)


@dataclass(frozen=True)
class Part:
    """Part of a run.

    Attributes:
        name: Name for `--parts` and the log.
        commands: Commands, begun in order whether or not earlier ones failed. `LEFT` stands for the
            seconds in which a command should end.
        seconds: Time limit of all commands together.
        each: Time limit of each command; later ones run in any case.
        at_once: Number of commands that run side by side, each with a log of its own.
        least: Seconds of the run that earlier parts must leave, as far as it has as many.
        vital: Whether a failure of the first command ends the run.
        shown: Whether its output is printed, too.
        environment: Variables added to those of this process.
        summary: Pattern; the last matching line of each command is shown.
        details: Pattern; matching lines are shown below the verdict.
        unavailable: Pattern of a line that tells why this machine cannot run the part.
        after: Called at the end of the part, in any case, with the exit codes of its commands.
    """

    name: str
    commands: Sequence[Sequence[str]]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    summary: str = ""
    details: str = r"^(FAILED|ERROR|WRONG)\b|\bExit: "
    unavailable: str = ""
    after: Callable[[list[int | None]], None] | None = None
    each: float = math.inf
    at_once: int = 1
    least: float = 0.0
    vital: bool = False
    shown: bool = False


@dataclass
class Outcome:
    """Verdict of a part: "ok", "failed", "cut off", "unavailable" or "not run"."""

    part: Part
    verdict: str = "not run"
    seconds: float = 0.0
    line: str = ""
    details: list[str] = field(default_factory=list)
    # Clocks of the GPU before and after.
    clocks: list[dict[str, str]] = field(default_factory=list)


class Run:
    """Parts in stages; those of a stage run side by side.

    Args:
        stages: The parts.
        out: Folder of `verdict.txt`, `run.json` and `logs.tar.gz`, which are always up to date.
        root: Working directory of the commands.
        seconds: Limit of the whole run, which shortens those of the parts. At most half of it is
            kept for the `least` of later ones.
        logs: Folder of the logs, which is emptied.
        facts: Machine and versions, for the two files.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Part]],
        out: Path,
        root: Path,
        seconds: float,
        logs: Path,
        facts: dict[str, str],
    ) -> None:
        self.outcomes = [Outcome(part) for stage in stages for part in stage]
        self._stages = stages
        self._out = out
        self._root = root
        self._logs = logs
        self._facts = facts
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
        shutil.rmtree(self._logs, ignore_errors=True)
        self._logs.mkdir(parents=True)
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
        """Facts; a table of part, verdict, seconds and summary; then details."""
        width = max((len(o.part.name) for o in self.outcomes), default=0)
        lines = [", ".join(f"{name} {value}" for name, value in self._facts.items())]
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
        codes: list[int | None] = []
        outcome.clocks.append(clocks())
        try:
            with ThreadPoolExecutor(part.at_once) as pool:
                begun = list(
                    pool.map(lambda n: self._run_nth(part, n, end), range(len(part.commands)))
                )
            told = list(zip(part.commands, begun, strict=True))
            if part.vital and begun[0] is not None and begun[0][0] != 0:
                told = told[:1]
            elif not any(begun):
                told = []
            codes += [each and each[0] for _, each in told]
            summaries = [each[1] for each in begun if each]
            cut_off = [
                f"{'cut off' if each else 'not begun'}: {command[-1]}"
                for (command, each), code in zip(told, codes, strict=True)
                if code is None and len(part.commands) > 1
            ]
            logs = [self._log(part, number) for number in range(len(part.commands))]
            text = "".join(
                log.read_text(errors="replace") for log in dict.fromkeys(logs) if log.exists()
            )
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
            outcome.clocks.append(clocks())
            if part.after is not None:
                part.after(codes)
            self._write()
        print(f"{part.name}: {outcome.verdict}, {outcome.seconds:.0f} s", flush=True)

    def _log(self, part: Part, number: int) -> Path:
        """Log of a part, or of each of its commands that run side by side."""
        return self._logs / f"{part.name}{f'-{number}' if part.at_once > 1 else ''}.log"

    def _run_nth(self, part: Part, number: int, end: float) -> tuple[int | None, str] | None:
        """Exit code and summary of a command; None if it was not begun."""
        begins = not self._stopped.is_set() and time.monotonic() < end
        if self._broken or not begins:
            return None
        with open(self._log(part, number), "ab") as log:
            start = log.tell()
            code = self._run_command(part, part.commands[number], log, end)
        if part.vital and number == 0 and code != 0:
            self._broken = part.name
        return code, _last_line(self._log(part, number), start, part.summary)

    def _run_command(
        self, part: Part, command: Sequence[str], log: io.BufferedWriter, end: float
    ) -> int | None:
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
                stdout=log.fileno(),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError:
            os.write(log.fileno(), f"{command[0]} is not installed\n".encode())
            return MISSING
        with open(log.name, "rb") as written:
            written.seek(0, os.SEEK_END)
            try:
                while not self._stopped.is_set() and time.monotonic() < end:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(0.1)
                    _show(part, written)
                return None
            finally:
                _end(process)
                _show(part, written)

    def _write(self) -> None:
        parts = [
            {
                "name": o.part.name,
                "verdict": o.verdict,
                "seconds": round(o.seconds, 1),
                "line": o.line,
                "details": o.details,
                "clocks": o.clocks,
            }
            for o in self.outcomes
        ]
        content = json.dumps({**self._facts, "parts": parts}, indent=1)
        with self._lock:
            _replace(self._out / "verdict.txt", f"{self.verdict()}\n".encode())
            _replace(self._out / "run.json", f"{content}\n".encode())
            _replace(self._out / "logs.tar.gz", archive(self._logs))


def clocks() -> dict[str, str]:
    """Clocks, reasons of throttling, temperature and power of the GPU, as nvidia-smi tells."""
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": str(error)}
    values = done.stdout.partition("\n")[0].split(", ")
    if len(values) != len(CLOCKS):
        return {"error": (done.stdout + done.stderr).strip()}
    return dict(zip(CLOCKS, values, strict=True))


def archive(folder: Path) -> bytes:
    """Files of a folder as a tar.gz, of each its last `LOG_BYTES`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES))
                content = file.read(LOG_BYTES)
            info = tarfile.TarInfo(path.relative_to(folder).as_posix())
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def _show(part: Part, written: io.BufferedReader) -> None:
    """Prints what a part has written since."""
    if part.shown and (text := written.read().decode(errors="replace")):
        sys.stdout.write(text)
        sys.stdout.flush()


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that is whole at any time."""
    partial = path.with_name(f"{path.name}.new")
    partial.write_bytes(content)
    partial.replace(path)


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
