"""Results of a run, and their file."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

# Version of the files.
FORMAT = 3
# Sides other than ampfast.
NO_SCALER = "no scaler"
OTHERS = (NO_SCALER, "torch")
# Load average per core beyond which times are not trusted.
BUSY = 1.5


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
class Row:
    """A measurement; missing values are None, never an estimate."""

    subject: str  # part of the run
    case: str  # gradients or net; "cold" if so many took turns that none stayed in the cache
    dtype: str  # of the gradients, or of autocast
    call: str
    side: str  # "torch", "ampfast" (with its backend, but for a CPU's) or "no scaler"
    ms: Spread | None = None  # device time; on a CPU the wall time of the call
    # Until the call returns, on a GPU from an empty queue; in a loop the scaler's own time.
    host_us: Spread | None = None
    rounds: int | None = None  # in which all sides took turns
    # How `ms` was taken: "wall"; "graph", replayed from a CUDA graph; "events", one after the other
    # as in training, where the slower of host and device counts.
    timer: str | None = None
    replaces: str | None = None  # torch's call to compare with, if it has another name
    vs_torch: float | None = None  # torch's time over this one's, the median over rounds
    over_none: float | None = None  # time over the same without a scaler
    bytes: int | None = None  # that the call must move, as in `providers.moved_bytes`
    copy_gb_s: float | None = None  # of a copy of as many bytes
    tensors: int | None = None
    elements: int | None = None

    @property
    def name(self) -> tuple[str, ...]:
        """Name of the row, the same in files, tables, pictures and comparisons."""
        return self.subject, self.case, self.dtype, self.call, self.side

    @property
    def gb_s(self) -> float | None:
        """Bytes that the call must move over its median time."""
        return self.bytes / self.ms.p50 / 1e6 if self.bytes and self.ms else None

    @property
    def percent_of_copy(self) -> float | None:
        """Percentage of the copy bandwidth in the same rounds."""
        return 100 * self.gb_s / self.copy_gb_s if self.gb_s and self.copy_gb_s else None


@dataclass
class Results:
    """All measurements of a run."""

    machine: dict[str, Any]
    torch: str
    triton: str | None
    ampfast: str
    commit: str | None
    date: str
    complete: bool = True  # false if a part was cut off, failed or did not fit
    seconds: float | None = None
    asked: dict[str, Any] = field(default_factory=dict)  # requested parts
    notes: list[str] = field(default_factory=list)  # omissions with their reasons
    rows: list[Row] = field(default_factory=list)

    @property
    def place(self) -> str:
        """Machine of the measurement, on one line."""
        of = self.machine
        place = f"{of.get('cpu')} ({of.get('cores')} cores, threads: {of.get('threads')})"
        return f"{of['gpu']} (driver {of.get('driver')}), {place}" if of.get("gpu") else place

    @property
    def versions(self) -> str:
        """Versions of the measurement, on one line."""
        versions = f"torch {self.torch}"
        if self.machine.get("gpu"):
            versions += f", triton {self.triton or 'not installed'}"
        return f"{versions}, commit {self.commit or 'unknown'}"

    @property
    def caveats(self) -> list[str]:
        """Sentences on what limits these figures."""
        load, cores = self.machine.get("load") or 0.0, self.machine.get("cores") or 1
        return [
            *([] if self.complete else ["The run was not complete; its notes say why."]),
            *([f"The load average was {load:.1f} when it began."] if load > BUSY * cores else []),
        ]

    def write(self, path: Path) -> None:
        """Writes the file atomically, a line for each row."""
        about = {"format": FORMAT, **vars(self)}
        rows = (json.dumps(_small(row), separators=(",", ":")) for row in about.pop("rows"))
        parts = [f'"{key}":{json.dumps(value)}' for key, value in about.items()]
        parts.append('"rows":[\n' + ",\n".join(rows) + "\n]")
        write_whole(path, "{" + ",\n".join(parts) + "}\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads a file of `write`, without what only earlier versions wrote; or ValueError."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if (version := content.get("format")) != FORMAT:
                raise ValueError(f"its format is {version}, not {FORMAT}")
            content["rows"] = [_made(Row, each) for each in content["rows"]]
            return _made(cls, content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no result of `python -m benchmarks`: {error}") from error


def _small(row: Row) -> dict[str, Any]:
    """Fields that have values, with five digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return [rounded(each) for each in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return {key: rounded(value) for key, value in asdict(row).items() if value is not None}


def _made(kind: type[Any], content: dict[str, Any]) -> Any:
    """Row or results of a file."""
    known = {each.name: content[each.name] for each in fields(kind) if each.name in content}
    for key in ("ms", "host_us"):
        if key in known:
            known[key] = Spread(*known[key])
    return kind(**known)


def write_whole(path: Path, text: str) -> None:
    """Replaces or creates a file; an interrupted write leaves it unchanged."""
    # Named by process, so that concurrent writes do not collide.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
