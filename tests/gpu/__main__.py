"""The proof on a GPU, `python tests/gpu`: builds, measures, tests and sanitizes."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from runner import BACKENDS, LEFT, Part, run, table  # noqa: E402

# Seconds of the whole run; a machine may be available for ten minutes.
SECONDS = 550
LOGS = ROOT / "build" / "gpu-logs"
COMMIT = "AMPFAST_COMMIT"
WITHOUT = "AMPFAST_BENCH_WITHOUT"
# By what they prove; NCCL hangs rather than fails, so it comes last.
SUBJECTS = ("graphs", "costs", "parity", "scaler", "companions", "distributed")
INFO = [sys.executable, "-m", "ampfast", "info"]
FACTS = """
import json, torch
name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps([name, torch.__version__]))
"""


def parts(results: Path, out: Path, rehearses: bool = False) -> list[Part]:
    """Returns all parts, in order.

    Triton compiles first, all variants at once. What decides comes next, in case the time is up.
    Each file of GPU tests has its own process, as everything in a process fails after an illegal
    access; so has the smoke test of each backend, and what is wrong there is not measured.

    Args:
        results: Committed copy of the benchmarks' results.
        out: Folder of the results.
        rehearses: Whether this is without a GPU, with torch's ops on the CPU for its kernels,
            without a build, and with tests that are only collected.
    """
    environment = {"AMPFAST_REHEARSE": "1" if rehearses else ""}
    python = sys.executable
    # With this interpreter, and none of the variables of a make that runs this.
    build = ["make", "--no-print-directory", "VENV=", f"PYTHON={python}", "build"]
    if shutil.which("make") is None:
        build = [python, "setup.py", "build_ext", "--inplace"]
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "--durations=5"]
    sanitizer = [tool("compute-sanitizer"), "--target-processes", "application-only"]
    sanitizer += ["--report-api-errors", "no", "--error-exitcode", "9", "--print-limit", "20"]
    if rehearses:
        build.append("--dry-run")
        pytest += ["--collect-only", "--quiet"]
    tests = [f"tests/gpu/test_gpu_{name}.py" for name in SUBJECTS]
    files = [tests] if rehearses else [[name] for name in tests]
    smoke = [[python, "tests/gpu/smoke.py", name] for name in BACKENDS]
    sound = dict(environment)

    def leave_out(codes: list[int | None]) -> None:
        # One that was cut off may only be slow.
        smoked = zip(BACKENDS, codes, strict=True)
        sound[WITHOUT] = ",".join(name for name, code in smoked if code)

    def checked(name: str, seconds: float, **more: str) -> Part:
        command = [*([] if rehearses else [*sanitizer, "--tool", name]), python]
        every = [[*command, "tests/gpu/smoke.py", backend, "0"] for backend in BACKENDS]
        summary = "ERROR SUMMARY|RACECHECK SUMMARY|lists as"
        return Part(name, every, seconds, {**environment, **more}, summary=summary)

    def measuring(name: str, subjects: str, seconds: float) -> Part:
        """Benchmarks whose results are written to `name`.json after each of their jobs."""
        written = out / f"{name}.json"
        before = written.stat().st_mtime_ns if written.exists() else 0
        command = [python, "-m", "benchmarks", "--only", subjects, "--limit", LEFT]
        command += [*(["--rehearse"] if rehearses else []), "--json", str(written)]

        def keep(codes: list[int | None]) -> None:
            # Not the results of an earlier run.
            if written.exists() and written.stat().st_mtime_ns > before:
                results.parent.mkdir(exist_ok=True)
                shutil.copy(written, results.with_name(f"{results.stem}-{name}.json"))

        # The end of a long output may be all that is kept: what decides.
        more: dict[str, Any] = {"summary": "^Against torch", "shown": name == "decisive"}
        return Part(name, [command], seconds, sound, after=keep, **more)

    return [
        Part("build", [build, INFO], 200, {**environment, "MAKEFLAGS": ""}, vital=True),
        Part("compile", [[python, "tests/gpu/precompile.py"]], 90, environment),
        Part("smoke", smoke, 90, environment, at_once=len(BACKENDS), after=leave_out),
        measuring("decisive", "decisive", 170),
        Part("gpu", [[*pytest, *names] for names in files], 200, environment, at_once=4),
        checked("memcheck", 100, PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
        checked("racecheck", 80),
        measuring("bench", "kernels,steps", 300),
    ]


def tool(name: str) -> str:
    """Path of a tool of CUDA, on the PATH or beside the compiler."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [f"{home}/{folder}" for home in homes if home for folder in ("bin", name)]
    path = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    return shutil.which(name, path=path) or name


def facts() -> tuple[str | None, str]:
    """GPU name or None, and torch version.

    Asked in a process of its own, which releases the device.
    """
    done = subprocess.run([sys.executable, "-c", FACTS], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        own = ROOT / ".venv" / "bin" / "python"
        path = own.relative_to(ROOT) if own.exists() else "path"
        raise SystemExit(f"{sys.executable} cannot look for a GPU; say PYTHON={path}")
    name, version = json.loads(done.stdout.splitlines()[-1])
    return name, version


def results_name(gpu: str, torch_version: str, date: datetime.date) -> str:
    """Name as in `h100-80gb-hbm3-torch2.11.0-2026-01-31.json`."""
    short = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")
    return f"{short}-torch{torch_version.split('+')[0]}-{date.isoformat()}.json"


def commit() -> str:
    """Commit of the tree, marked if tracked files differ from it; empty where git knows none."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty"]
    try:
        done = subprocess.run([*command, "--exclude=*"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the selected parts; returns 0 if none failed."""
    names = [part.name for part in parts(Path("none"), Path("none"))]
    parser = argparse.ArgumentParser(prog="python tests/gpu", description=__doc__)
    parser.add_argument("--parts", default=",".join(names), help=f"of {','.join(names)}")
    default = os.environ.get("OUT") or str(ROOT / "build" / "gpu")
    parser.add_argument("--out", type=Path, default=Path(default), help="folder for the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of the whole run")
    known = os.environ.get(COMMIT) or commit()
    parser.add_argument("--commit", default=known, help="where git does not know it")
    told = "run every part without a GPU, with torch's ops on the CPU for its kernels"
    parser.add_argument("--rehearse", action="store_true", help=told)
    options = parser.parse_args(arguments)
    wanted = options.parts.split(",")
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(names)}")
    # Nothing goes without the first, which takes no time where it was done.
    wanted.append(names[0])

    gpu, torch_version = ("rehearsal", "") if options.rehearse else facts()
    if gpu is None:
        print(f"this needs a GPU, and torch {torch_version} sees none", file=sys.stderr)
        return 1
    os.environ[COMMIT] = options.commit
    out = options.out.resolve()
    today = datetime.datetime.now(datetime.timezone.utc).date()
    name = results_name(gpu, torch_version, today)
    results = (out if options.rehearse else ROOT / "benchmarks" / "results") / name
    chosen = [part for part in parts(results, out, options.rehearse) if part.name in wanted]
    about = f"commit {options.commit or 'unknown'}, GPU {gpu}, torch {torch_version}"
    print(f"{about}; results in {out}, logs in {LOGS}", flush=True)
    # What ends this ends what runs, and the verdicts are written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(chosen, LOGS, ROOT, options.seconds, out / "verdict.txt", about)
    except KeyboardInterrupt:
        return 1
    finally:
        print(table(chosen), flush=True)


if __name__ == "__main__":
    sys.exit(main())
