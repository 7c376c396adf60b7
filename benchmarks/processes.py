"""Cooperating processes: when one fails, all are terminated."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

# Seldom, since the waiting process shares cores with the others.
LOOK_EVERY_S = 0.1
# Characters shown of the end of a process's output.
SHOWN = 2000


def run_together(
    commands: Sequence[Sequence[str]], cwd: Path, logs: Path, timeout_s: float
) -> None:
    """Runs one process per command until all have ended; on return or error none is left.

    Args:
        commands: One for each rank, in order.
        cwd: Working directory.
        logs: Existing directory for their output.
        timeout_s: Limit for all processes, in seconds.

    Raises:
        RuntimeError: If a process fails, or one has not ended in time; it shows what they wrote.
            One that lost the other may end first, so what all wrote is shown.
    """
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout_s
    try:
        for rank, command in enumerate(commands):
            with _log(logs, rank).open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=cwd,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > deadline:
                running = [rank for rank, code in enumerate(codes) if code is None]
                raise RuntimeError(
                    f"{' and '.join(f'rank {rank}' for rank in running)} had not ended after "
                    f"{timeout_s:g} s{_shown(logs, running)}"
                )
            time.sleep(LOOK_EVERY_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        ended = " and ".join(f"rank {rank} ended with code {codes[rank]}" for rank in failed)
        raise RuntimeError(f"{ended}{_shown(logs, range(len(commands)))}")


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.log"


def _shown(logs: Path, ranks: Sequence[int]) -> str:
    texts = [_log(logs, rank).read_text(encoding="utf-8", errors="replace") for rank in ranks]
    return "".join(
        f"; rank {rank} wrote: {text.strip()[-SHOWN:]}"
        for rank, text in zip(ranks, texts, strict=True)
        if text.strip()
    )
