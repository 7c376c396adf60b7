"""Allocation failures in a scaler's calls, one after another: Python's, and those of C and C++."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from atomic import SCENARIOS, Scenario, Trials
from tally import Tally, main

# In processes that have it in front of the C library's.
SHIM = "AMPFAST_FAILING_MALLOC"
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"track": "overflow"})


class PythonFails:
    """A block in which the allocation of that number fails in Python."""

    def __init__(self, point: int) -> None:
        import _testcapi

        self._begin, self._end = _testcapi.set_nomemory, _testcapi.remove_mem_hooks
        self._range = point + 1, point + 2

    def __enter__(self) -> None:
        self._begin(*self._range)

    def __exit__(self, *error: object) -> None:
        self._end()


class MallocFails:
    """A block in which the allocation of that number fails in C and C++."""

    def __init__(self, point: int) -> None:
        self._fail_after = ctypes.CDLL(None).fail_after
        self._point = ctypes.c_long(point)
        self._never = ctypes.c_long(-1)

    def __enter__(self) -> None:
        self._fail_after(self._point)

    def __exit__(self, *error: object) -> None:
        self._fail_after(self._never)


def shim(folder: Path) -> Path | None:
    """The library for LD_PRELOAD; None without glibc or a compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if not sys.platform.startswith("linux") or compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    made, source = folder / "failing_malloc.so", Path(__file__).with_name("failing_malloc.c")
    command = [compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, check=False)
    return made if done.returncode == 0 else None


def guarded(trials: Trials, fault: Any, width: int) -> Iterator[list[str]]:
    """All points, in processes that may crash: each that does is a failure, and skips its point."""
    start = 0
    while True:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reader)
            status = 1
            # A fork has no other threads, and what is ignored would be printed.
            torch.set_num_threads(1)
            sys.unraisablehook = lambda _: None
            try:
                with os.fdopen(writer, "w", buffering=1) as out:

                    def begun(point: int) -> Any:
                        out.write(f"{point}\n")
                        return fault(point)

                    for _, wrong in trials.all_points(begun, width, start):
                        out.write(json.dumps(wrong) + "\n")
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        point = start
        with os.fdopen(reader) as lines:
            for line in lines:
                value = json.loads(line)
                if isinstance(value, int):
                    point = value
                else:
                    yield value
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        yield [f"{trials.scenario.name} {trials.arguments or ''}: ended with {status} at {point}"]
        start = point + width


def run_here(width: int, scenarios: tuple[Scenario, ...] = SCENARIOS) -> Tally:
    """Every point, or each `width`-th, of what this process can let fail."""
    tally = Tally("failing allocations")
    fault = MallocFails if os.environ.get(SHIM) else PythonFails
    for arguments in VARIANTS:
        for scenario in scenarios:
            for wrong in guarded(Trials(scenario, **arguments), fault, width):
                tally.count += 1
                tally.failures += wrong
    return tally


def run(width: float, seed: int = 0) -> Tally:
    """Python's allocations here, those of C and C++ in a process of their own."""
    total = Tally("failing allocations")
    environments: list[dict[str, str]] = []
    try:
        import _testcapi
    except ImportError:
        print("Python's allocations: no _testcapi here")
    else:
        assert _testcapi
        environments.append({})
    library = shim(Path(__file__).parents[2] / "build" / "hostile")
    if library is None:
        print("allocations of C and C++: no compiler or glibc here")
    else:
        environments.append({SHIM: "1", "LD_PRELOAD": str(library)})
    for environment in environments:
        command = [sys.executable, __file__, "--here", str(int(width))]
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, **environment}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        part = json.loads(done.stdout.splitlines()[-1])
        total.count += part["count"]
        total.failures += part["failures"]
    return total


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(vars(run_here(int(sys.argv[2])))))
    else:
        sys.exit(main(run, "width", 1))
