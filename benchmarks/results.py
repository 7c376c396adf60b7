"""Results of a run: rows, goals with verdicts, and their files."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from . import whole_files

# Version of the files. The first one named neither itself nor the requested run.
FORMAT = 2
READABLE = (1, 2)
# Load average of the last minute from which other processes take a noticeable share of a core.
BUSY = 0.5
SENSES = ("<=", "<", ">=")
# Far above any measurement; sums and ratios of smaller values are finite.
LARGEST = 1e30
# Fields that may be negative, such as the slope through noisy points.
SIGNED = ("ns_each", "vs_torch")
# Fraction of the limit. Identical contenders differ by up to 2% on a quiet machine.
CLOSE = 0.05


@dataclass(frozen=True)
class Spread:
    """Three quantiles of a series of samples, in the unit of the samples."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(fifths[0], statistics.median(samples), fifths[3])


@dataclass(frozen=True)
class Row:
    """A measurement; missing values are None, never an estimate.

    `ms_*` is device time, on a CPU the wall time of the call; `timer` tells how it was taken:
    "wall"; "graph", replayed from a CUDA graph; "events", queued behind one another; "waits",
    including the call's wait for the device; "loop", one after another as in training, where the
    slower of host and device counts. `host_us_*` is the time until the call returns, on a GPU from
    an empty queue. `launches`, `copies` and `syncs` count kernels, copies and fills of memory, and
    host waits per call on a GPU. `list_bytes` is the size of the gradients, `bytes` the least that
    the path must move (`providers.moved_bytes`), `gb_s` that over `ms_p50`, `copy_gb_s` the
    bandwidth of a copy of as many bytes. `vs_torch` is torch's time over this one's, the median
    over rounds in which both ran, `host_vs_torch` the same for host time. `extra_bytes` is memory
    of the call beyond the gradients: growth of the resident set; `allocated_bytes` is the peak of
    torch's allocator. `table_bytes` describes `chunks` chunks of gradients. `lists` lists took
    turns: a single one may stay in the cache, several never do. `ranks` processes shared the list,
    each with a shard of every tensor; times are then those of the slowest rank of each round, and
    `collectives` counts per call. `over_none` is the time relative to the same training without a
    scaler, the median over rounds in which both ran. The gradients are `tensors` tensors of
    `elements` elements in all. `ns_each` is a slope: nanoseconds per additional tensor or element.
    In a training loop `host_us_*` is the scaler's own time per iteration, `scale_us`, `step_us` and
    `update_us` its parts, and `share` its fraction of the iteration.
    """

    subject: str
    case: str
    dtype: str
    path: str
    provider: str
    ms_p20: float | None = None
    ms_p50: float | None = None
    ms_p80: float | None = None
    host_us_p20: float | None = None
    host_us_p50: float | None = None
    host_us_p80: float | None = None
    timer: str | None = None
    lists: int | None = None
    list_bytes: int | None = None
    bytes: int | None = None
    gb_s: float | None = None
    copy_gb_s: float | None = None
    launches: int | None = None
    copies: int | None = None
    syncs: int | None = None
    vs_torch: float | None = None
    host_vs_torch: float | None = None
    extra_bytes: int | None = None
    allocated_bytes: int | None = None
    table_bytes: int | None = None
    chunks: int | None = None
    ranks: int | None = None
    collectives: int | None = None
    over_none: float | None = None
    tensors: int | None = None
    elements: int | None = None
    ns_each: float | None = None
    scale_us: float | None = None
    step_us: float | None = None
    update_us: float | None = None
    share: float | None = None

    @property
    def list_name(self) -> str:
        """List name, with a mark if it was kept out of the cache."""
        return self.case if (self.lists or 1) == 1 else f"{self.case}, cold"

    @property
    def percent_of_copy(self) -> float | None:
        """Percentage of the copy bandwidth in the same rounds."""
        if self.gb_s is None or self.copy_gb_s is None:
            return None
        return 100 * self.gb_s / self.copy_gb_s


@dataclass(frozen=True)
class Goal:
    """Goal and its measurement.

    `sense` is "<=", "<" or ">=". With `spread_counts`, for goals of the form "not slower",
    the goal is also met if the better end of the spread (20% of the rounds) reaches the limit and
    the median is close to it: else a busy machine, whose spread is wide, would meet any goal.
    """

    name: str
    case: str
    dtype: str
    sense: str
    limit: float
    ratio: float
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    spread_counts: bool = False

    @classmethod
    def of_spread(
        cls,
        name: str,
        case: str,
        dtype: str,
        sense: str,
        limit: float,
        ratio: Spread,
        spread_counts: bool = False,
    ) -> Goal:
        return cls(
            name,
            case,
            dtype,
            sense,
            limit,
            ratio.p50,
            ratio.p20,
            ratio.p80,
            spread_counts,
        )

    def _reached_by(self, value: float) -> bool:
        if self.sense == ">=":
            return value >= self.limit
        return value < self.limit if self.sense == "<" else value <= self.limit

    @property
    def verdict(self) -> str:
        if self._reached_by(self.ratio):
            return "met"
        best = self.ratio_p80 if self.sense == ">=" else self.ratio_p20
        near = abs(self.ratio - self.limit) <= CLOSE * self.limit
        if self.spread_counts and near and best is not None and self._reached_by(best):
            return "met within spread"
        return "not met"

    @property
    def met(self) -> bool:
        return self.verdict != "not met"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met, "verdict": self.verdict}


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
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None

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
    def disturbance(self) -> str:
        """Sentence on other load at the start; empty if there was little."""
        load = self.machine.get("load")
        if not isinstance(load, (int, float)) or load <= BUSY:
            return ""
        return f"The load was {load:.1f} before it began: other processes disturb timings."

    def write_json(self, path: Path) -> None:
        """Writes the file atomically."""
        content = {
            "format": FORMAT,
            **asdict(self),
            "goals": [goal.as_json() for goal in self.goals],
        }
        whole_files.write(path, json.dumps(content, indent=1) + "\n")

    def write_csv(self, path: Path) -> None:
        """Writes the rows atomically; missing values are empty."""
        file = io.StringIO()
        table = csv.DictWriter(file, [column.name for column in fields(Row)])
        table.writeheader()
        table.writerows(asdict(row) for row in self.rows)
        whole_files.write(path, file.getvalue())

    @classmethod
    def read_json(cls, path: Path) -> Results:
        """Reads a file of `write_json`, of this or an earlier version.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is no result, or of an unknown version.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            written = content.pop("format", 1) if isinstance(content, dict) else None
            if written is None or (written == 1 and "rows" not in content):
                raise ValueError("it holds something else")
            if written not in READABLE:
                known = " and ".join(map(str, READABLE))
                raise ValueError(f"its format is {written!r}; known formats are {known}")
            content["rows"] = [_made(Row, row) for row in content["rows"]]
            content["goals"] = [
                _made(Goal, goal, extra=("met", "verdict")) for goal in content["goals"]
            ]
            for goal in content["goals"]:
                if goal.sense not in SENSES:
                    raise ValueError(f"sense of a Goal is {goal.sense!r}")
            results = _made(cls, content)
            load = results.machine.get("load")
            if not isinstance(load, (int, float, type(None))) or not _is_figure(load):
                raise TypeError(f"load of the machine is {load!r}")
            if not all(isinstance(note, str) for note in results.notes):
                raise TypeError("a note is not a text")
            return results
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} is damaged or was cut off: it is not JSON ({error})"
            ) from error
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a result of `python -m benchmarks`: {_told(error)}"
            ) from error


Made = TypeVar("Made", Row, Goal, Results)


def _made(kind: type[Made], content: dict[str, Any], extra: Sequence[str] = ()) -> Made:
    """Object from a file's fields, each checked for its type.

    Later uses of a figure would fail otherwise.
    """
    given = {name: value for name, value in content.items() if name not in extra}
    made = kind(**given)
    for name, wanted in TYPES[kind].items():
        value = getattr(made, name)
        origin = typing.get_origin(wanted)
        allowed = origin if origin in (list, dict) else wanted
        if isinstance(value, int) and not isinstance(value, bool) and _is_figure(value):
            value = float(value) if allowed in (float, float | None) else value
        if not isinstance(value, allowed):
            raise TypeError(f"{name} of a {kind.__name__} is {value!r}")
        least = 0 if kind is Row and name not in SIGNED else -math.inf
        if isinstance(value, (int, float)) and not (_is_figure(value) and value >= least):
            raise ValueError(f"{name} of a {kind.__name__} is {value!r}")
    return made


def _is_figure(value: float | None) -> bool:
    """Whether a number is a possible measurement that can be drawn."""
    return value is None or abs(value) < LARGEST


def _told(error: Exception) -> str:
    missing = f"it has no {error}" if isinstance(error, KeyError) else ""
    return missing or str(error) or type(error).__name__


# Cached, since a file has hundreds of rows.
TYPES: dict[type, dict[str, Any]] = {
    kind: typing.get_type_hints(kind) for kind in (Row, Goal, Results)
}
