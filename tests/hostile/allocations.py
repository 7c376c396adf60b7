"""Failing allocations in a scaler's calls, one at a time: Python's, and those of C and C++."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from atomic import SCENARIOS, Trials
from tally import Tally, main

# Set in processes that preload it in front of the C library.
SHIM = "AMPFAST_FAILING_MALLOC"
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"track": "overflow"})


class PythonFails:
    """Context in which the n-th allocation of Python fails."""

    def __init__(self, point: int) -> None:
        import _testcapi

        self._begin, self._end = _testcapi.set_nomemory, _testcapi.remove_mem_hooks
        self._range = point + 1, point + 2

    def __enter__(self) -> None:
        self._begin(*self._range)

    def __exit__(self, *error: object) -> None:
        self._end()


class MallocFails:
    """Context in which the n-th allocation of C and C++ fails."""

    def __init__(self, point: int) -> None:
        self._fail_after = ctypes.CDLL(None).fail_after
        self._point = ctypes.c_long(point)
        self._never = ctypes.c_long(-1)

    def __enter__(self) -> None:
        self._fail_after(self._point)

    def __exit__(self, *error: object) -> None:
        self._fail_after(self._never)


def shim(folder: Path) -> Path | None:
    """Library for LD_PRELOAD; None without glibc or a compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if not sys.platform.startswith("linux") or compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    made, source = folder / "failing_malloc.so", Path(__file__).with_name("failing_malloc.c")
    command = [compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, check=False)
    return made if done.returncode == 0 else None


def run_here(width: int) -> Tally:
    """Lets each allocation of this process fail, or each `width`-th."""
    tally = Tally("failing allocations")
    fault = MallocFails if os.environ.get(SHIM) else PythonFails
    # Ignored exceptions would be printed.
    sys.unraisablehook = lambda _: None
    for arguments in VARIANTS:
        for scenario in SCENARIOS:
            tally.add(Trials(scenario, **arguments).all_points(fault, width))
    return tally


def run_in_process(environment: dict[str, str], width: int, tally: Tally) -> None:
    """The same in a process with that environment, which may crash."""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", __file__, "--here", str(width)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        found = Tally(**json.loads(done.stdout.splitlines()[-1]))
        tally.count += found.count
        tally.failures += found.failures
    else:
        tally.count += 1
        places = [line for line in done.stderr.splitlines() if "/ampfast/" in line]
        tally.fail(f"ended with {done.returncode} at {' '.join(places[:1]) or done.stderr[-300:]}")


def run(width: float, seed: int = 0) -> Tally:
    """Lets allocations of Python, C and C++ fail."""
    tally = Tally("failing allocations")
    if importlib.util.find_spec("_testcapi") is None:
        print("Python's allocations: no _testcapi here")
    else:
        run_in_process({}, int(width), tally)
    library = shim(Path(__file__).parents[2] / "build" / "hostile")
    if library is None:
        print("allocations of C and C++: no compiler or glibc here")
    else:
        run_in_process({SHIM: "1", "LD_PRELOAD": str(library)}, int(width), tally)
    return tally


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        torch.set_num_threads(1)
        print(json.dumps(vars(run_here(int(sys.argv[2])))))
    else:
        sys.exit(main(run, "width", 1))
