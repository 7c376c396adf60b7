"""Results of a run: rows, goals with verdicts, and their file."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

# Version of the files.
FORMAT = 3
# Subjects and a kind of calls that only earlier files have; their rows are not read.
DROPPED = ("memory", "ranks")
DROPPED_CALLS = "by torch's name"
# Load average of the last minute, per core, beyond which others take the cores from a run.
BUSY = 1.5
# Cores that other programs took during the run, as a fraction of all, likewise.
TAKEN = 0.1
# Fraction of the limit. Identical contenders differ by up to 2% on a quiet machine.
CLOSE = 0.05
MET, NEAR, MISSED = VERDICTS = ("met", "met within spread", "not met")


class Spread(NamedTuple):
    """Three quantiles of a series of samples, in the unit of the samples."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float], factor: float = 1.0) -> Spread:
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(factor * fifths[0], factor * statistics.median(samples), factor * fifths[3])


@dataclass(frozen=True)
class Name:
    """Name of a row, the same in files, tables, pictures, comparisons and goals.

    Attributes:
        subject: Part of the run.
        case: Gradients or net; "cold" if as many lists took turns as keep each out of the cache.
        dtype: Dtype of the gradients, or of autocast.
        call: Calls that were timed.
        side: "torch", "ampfast" (on a GPU with its backend), "no scaler" or "a loop".
    """

    subject: str
    case: str
    dtype: str
    call: str
    side: str

    @property
    def name(self) -> tuple[str, ...]:
        return self.subject, self.case, self.dtype, self.call, self.side


@dataclass(frozen=True)
class Row(Name):
    """A measurement; missing values are None, never an estimate.

    Attributes:
        ms: Device time; on a CPU the wall time of the call.
        host_us: Time until the call returns, on a GPU from an empty queue. In a training loop the
            scaler's own time.
        rounds: Rounds in which all sides took turns.
        timer: How `ms` was taken: "wall"; "graph", replayed from a CUDA graph; "events", queued
            behind one another; "waits", including the call's wait for the device; "loop", one after
            another as in training, where the slower of host and device counts.
        replaces: torch's call that this one is compared with, if it has another name.
        vs_torch: torch's time over this one's, the median over rounds.
        host_vs_torch: The same for host time.
        over_none: Time over that of the same training without a scaler, the median over rounds.
        list_bytes: Size of the gradients.
        bytes: The least that the call must move, as in `providers.moved_bytes`.
        copy_gb_s: Bandwidth of a copy that moves as many bytes.
        launches: Kernels per call on a GPU.
        copies: Copies and fills of memory per call on a GPU.
        syncs: Host waits per call on a GPU.
        tensors: Number of gradients.
        elements: Their elements in all.
        ns_each: Nanoseconds per additional tensor or element.
        parts_us: The scaler's own time in `scale`, `step` and `update`.
        share: Its fraction of the iteration.
        missing: Why it has no figures, such as a dtype that this side has no kernel for.
    """

    ms: Spread | None = None
    host_us: Spread | None = None
    rounds: int | None = None
    timer: str | None = None
    replaces: str | None = None
    vs_torch: float | None = None
    host_vs_torch: float | None = None
    over_none: float | None = None
    list_bytes: int | None = None
    bytes: int | None = None
    copy_gb_s: float | None = None
    launches: int | None = None
    copies: int | None = None
    syncs: int | None = None
    tensors: int | None = None
    elements: int | None = None
    ns_each: float | None = None
    parts_us: Spread | tuple[float, float, float] | None = None
    share: float | None = None
    missing: str | None = None

    @property
    def gb_s(self) -> float | None:
        """Bytes that the call must move over its median time."""
        return self.bytes / self.ms.p50 / 1e6 if self.bytes and self.ms else None

    @property
    def percent_of_copy(self) -> float | None:
        """Percentage of the copy bandwidth in the same rounds."""
        return 100 * self.gb_s / self.copy_gb_s if self.gb_s and self.copy_gb_s else None


@dataclass(frozen=True)
class Goal(Name):
    """Limit of a row's ratio to another row.

    With `lenient`, for goals of the form "not slower", it is also met if the better end of the
    spread reaches the limit and the median is close to it: else a busy machine, whose spread is
    wide, would meet any goal.

    Attributes:
        over: Call and side of the other row.
        ratio: Ratio to it, by rounds.
        limit: Largest median that meets the goal.
        lenient: Whether the spread counts.
    """

    over: str
    ratio: Spread
    limit: float
    lenient: bool = False

    @property
    def verdict(self) -> str:
        if self.ratio.p50 <= self.limit:
            return MET
        near = self.ratio.p50 - self.limit <= CLOSE * self.limit
        return NEAR if self.lenient and near and self.ratio.p20 <= self.limit else MISSED


@dataclass
class Results:
    """All measurements of a run.

    `complete` is false if a part was cut off, failed or did not fit; `notes` give omissions with
    their reasons. `asked` are the requested parts, `seconds` the duration.
    """

    machine: dict[str, Any]
    torch: str
    triton: str | None
    ampfast: str
    commit: str | None
    date: str
    complete: bool = True
    seconds: float | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def place(self) -> str:
        """Machine of the measurement, on one line."""
        of = self.machine
        place = f"{of.get('cpu')} ({of.get('cores')} cores, threads: {of.get('threads')})"
        if of.get("gpu"):
            place = f"{of['gpu']} (driver {of.get('driver') or 'unknown'}), {place}"
        return place

    @property
    def versions(self) -> str:
        """Versions of the measurement, on one line."""
        versions = f"torch {self.torch}"
        if self.machine.get("gpu"):
            tensors = self.machine.get("tensors_per_launch")
            versions += f" ({tensors} tensors a launch), triton {self.triton or 'not installed'}"
        return f"{versions}, commit {self.commit or 'unknown'}"

    @property
    def caveats(self) -> list[str]:
        """Sentences on what limits these figures."""
        load = self.machine.get("load") or 0.0
        is_busy = load > BUSY * (self.machine.get("cores") or 1)
        taken = (self.machine.get("cores_of_others") or 0.0) > TAKEN * (
            self.machine.get("cores") or 1
        )
        failed = sum(note.startswith("FAILED") for note in self.notes)
        return [
            *([] if self.complete else ["The run was not complete; its notes say why."]),
            *([f"{failed} of its parts failed."] if failed else []),
            *([f"The load average was {load:.1f} when it began."] if is_busy else []),
            *([f"{self.during} The machine was BUSY: do not trust the times."] if taken else []),
        ]

    @property
    def during(self) -> str:
        """Sentence on what other programs took during the run; empty where it is not known."""
        others = self.machine.get("cores_of_others")
        cores = self.machine.get("cores") or 1
        return "" if others is None else f"Other programs took {others:.2f} of {cores} cores."

    def write(self, path: Path) -> None:
        """Writes the file atomically, a line for each row."""
        parts = [f'"format":{FORMAT}']
        for key in (each.name for each in fields(self)):
            value = getattr(self, key)
            if key in ("goals", "rows"):
                items = (json.dumps(_small(item), separators=(",", ":")) for item in value)
                parts.append(f'"{key}":[\n' + ",\n".join(items) + "\n]")
            else:
                parts.append(f'"{key}":{json.dumps(value)}')
        write_whole(path, "{" + ",\n".join(parts) + "}\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads a file of `write`; ValueError if it is no result, or of another version."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is damaged or cut off: it is not JSON ({error})") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a result of `python -m benchmarks`") from error
        if not isinstance(content, dict) or "rows" not in content:
            raise ValueError(f"{path} is not a result of `python -m benchmarks`: it has no rows")
        if (version := content.pop("format", 1)) != FORMAT:
            raise ValueError(
                f"{path} is of version {version}, not {FORMAT}: `make bench` makes a new one"
            )
        try:
            _check(cls, content)
            for key in ("load", "cores", "cores_of_others"):
                if not _is_figure(content["machine"].get(key) or 0):
                    raise ValueError(f"machine.{key} is {content['machine'][key]!r}")
            for key, kind in (("rows", Row), ("goals", Goal)):
                content[key] = [_made(kind, each) for each in content[key] if not _is_gone(each)]
            return cls(**content)
        except (KeyError, TypeError, ValueError) as error:
            missing = "it has no " if isinstance(error, KeyError) else ""
            raise ValueError(
                f"{path} is not a result of `python -m benchmarks`: {missing}{error}"
            ) from error


def _is_gone(row: dict[str, Any]) -> bool:
    return row.get("subject") in DROPPED or DROPPED_CALLS in str(row.get("call"))


def _small(item: Name) -> dict[str, Any]:
    """Fields that have values, with five digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return [rounded(each) for each in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return {key: rounded(value) for key, value in asdict(item).items() if value is not None}


def _made(kind: type[Any], content: dict[str, Any]) -> Any:
    """Row or goal of a file."""
    _check(kind, content)
    return kind(**{k: Spread(*v) if isinstance(v, list) else v for k, v in content.items()})


def _check(kind: type[Any], content: dict[str, Any]) -> None:
    """Raises ValueError for a value that is not of its field's type, as later uses would fail."""
    for each in fields(kind):
        value = content.get(each.name)
        named = each.name in content
        if named and not any(FITS[name](value) for name in str(each.type).split(" | ")):
            raise ValueError(f"{each.name} is {value!r}")


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _are_three(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_figure, value))


def _are_all(kind: type[Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(v, kind) for v in value)


# By annotation, whether a value of a file is of that type.
FITS: dict[str, Callable[[Any], bool]] = {
    "None": lambda value: value is None,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": _is_figure,
    "float": _is_figure,
    # Others are divided by the median.
    "Spread": lambda value: _are_three(value) and value[1] > 0,
    "tuple[float, float, float]": _are_three,
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "list[str]": _are_all(str),
    "list[Goal]": _are_all(dict),
    "list[Row]": _are_all(dict),
}


def write_whole(path: Path, text: str) -> None:
    """Replaces or creates a file; an interrupted write leaves it unchanged."""
    # Named by process, so that concurrent writes do not collide.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
