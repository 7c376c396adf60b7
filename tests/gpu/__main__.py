"""The proof on a GPU, `python tests/gpu`: builds, tests, sanitizes and measures."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from runner import LEFT, Part, Run, stopped_by_signals  # noqa: E402

# Seconds of the whole run; a machine may be available for ten minutes.
SECONDS = 550
PYTEST_SUMMARY = r"\d+ (passed|failed|skipped|error|deselected).* in [\d.]+s|no tests ran"
FACTS = """
import json, torch
there = torch.cuda.is_available()
name = torch.cuda.get_device_name() if there else None
capability = "{}.{}".format(*torch.cuda.get_device_capability()) if there else ""
print(json.dumps([name, torch.__version__, capability]))
"""


def stages(results: Path, out: Path, capability: str = "") -> list[list[Part]]:
    """Returns all parts by stage; those of one stage run side by side.

    Each file of GPU tests has its own process, as everything in a process fails after an illegal
    access. Every mode runs once before them, so that the sanitizer does not watch compilations.

    Args:
        results: Committed copy of the benchmarks' results.
        out: Folder of their output.
        capability: Compute capability to build for, unless TORCH_CUDA_ARCH_LIST is set.
    """
    # With this interpreter, and none of the variables of a make that runs this.
    build = ["make", "--no-print-directory", "VENV=", f"PYTHON={sys.executable}", "build"]
    building = {"MAKEFLAGS": ""}
    if capability and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        building["TORCH_CUDA_ARCH_LIST"] = capability
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=5"]
    # NCCL hangs rather than fails, so its file comes last.
    paths = sorted(HERE.glob("test_*.py"), key=lambda p: (p.stem == "test_gpu_distributed", p))
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    # Tests of ranks, trainers and kernels on a CPU pass elsewhere. Tests of benchmarks, CUDA
    # sources and packaging need no GPU, and would take all the time.
    no_gpu = ("tests/gpu", "tests/distributed", "tests/trainers")
    no_gpu += ("tests/triton_kernels", "tests/test_over_kernels.py")
    no_gpu += ("tests/benchmarks", "tests/test_cuda_source.py")
    no_gpu += ("tests/project/test_gpu_tools.py", "tests/project/test_packaging.py")
    modes = [sys.executable, "tests/gpu/modes.py"]
    sanitizer = [compute_sanitizer(), "--target-processes", "application-only"]
    sanitizer += ["--report-api-errors", "no", "--error-exitcode", "9", "--print-limit", "20"]
    unavailable = "Device not supported|is not installed"
    bench = [sys.executable, "-m", "benchmarks", "--only", "kernels,steps", "--limit", LEFT]
    bench += ["--folder", str(out / "bench")]
    written = out / "bench" / "results.json"
    before = written.stat().st_mtime_ns if written.exists() else 0

    def keep_results() -> None:
        # Not the results of an earlier run.
        if written.exists() and written.stat().st_mtime_ns > before:
            results.parent.mkdir(exist_ok=True)
            shutil.copy(written, results)

    return [
        [
            Part(
                "build",
                [build, [sys.executable, "tests/gpu/built.py"]],
                200,
                building,
                details=r"^(WRONG|make)\b|\berror\b",
                vital=True,
            )
        ],
        [
            Part(
                "gpu",
                [modes, *([*pytest, file] for file in files)],
                300,
                summary=PYTEST_SUMMARY,
                each=120,
            ),
            Part(
                "suite",
                [[*pytest, "-q", "-m", "not gpu", *map("--ignore={}".format, no_gpu), "tests"]],
                240,
                summary=PYTEST_SUMMARY,
            ),
        ],
        [
            Part(
                "memcheck",
                [[*sanitizer, "--tool", "memcheck", *modes]],
                100,
                {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                summary="ERROR SUMMARY|wrong",
                unavailable=unavailable,
                least=60,
            ),
            Part(
                "racecheck",
                [[*sanitizer, "--tool", "racecheck", *modes]],
                80,
                summary="RACECHECK SUMMARY|ERROR SUMMARY",
                unavailable=unavailable,
            ),
        ],
        [Part("bench", [bench], 280, after=keep_results, least=150)],
    ]


def compute_sanitizer() -> str:
    """Path of compute-sanitizer, on the PATH or beside the compiler."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    compiler = shutil.which("nvcc")
    if compiler is not None:
        homes.append(str(Path(compiler).resolve().parents[1]))
    folders = [f"{home}/bin" for home in homes if home]
    folders += [f"{home}/compute-sanitizer" for home in homes if home]
    path = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    return shutil.which("compute-sanitizer", path=path) or "compute-sanitizer"


def facts() -> tuple[str | None, str, str]:
    """GPU name or None, torch version and compute capability, as in "9.0".

    Asked in a process of its own, which releases the device.
    """
    done = subprocess.run(
        [sys.executable, "-c", FACTS], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SystemExit(f"{sys.executable} cannot look for a GPU: {why}; say PYTHON=path")
    name, version, capability = json.loads(done.stdout.splitlines()[-1])
    return name, version, capability


def results_name(gpu: str, torch_version: str, date: datetime.date) -> str:
    """Name as in `h100-80gb-hbm3-torch2.11.0-2026-01-31.json`."""
    short = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")
    return f"{short}-torch{torch_version.split('+')[0]}-{date.isoformat()}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the selected parts; returns 0 if none failed."""
    names = [part.name for stage in stages(Path("none"), Path("none")) for part in stage]
    parser = argparse.ArgumentParser(prog="python tests/gpu", description=__doc__)
    parser.add_argument("--parts", default=",".join(names), help="comma-separated: %(default)s")
    default = os.environ.get("OUT") or str(ROOT / "build" / "gpu")
    parser.add_argument("--out", type=Path, default=Path(default), help="folder for the logs")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of the whole run")
    options = parser.parse_args(arguments)
    wanted = options.parts.split(",")
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(names)}")

    gpu, torch_version, capability = facts()
    if gpu is None:
        print(f"this needs a GPU, and torch {torch_version} sees none", file=sys.stderr)
        return 1
    out = options.out.resolve()
    today = datetime.datetime.now(datetime.timezone.utc).date()
    name = results_name(gpu, torch_version, today)
    results = ROOT / "benchmarks" / "results" / name
    chosen = [
        [part for part in stage if part.name in wanted]
        for stage in stages(results, out, capability)
    ]
    print(f"{gpu}, torch {torch_version}; logs in {out}", flush=True)
    run = Run(chosen, out, ROOT, options.seconds)
    with stopped_by_signals(run):
        code = run.run()
    print(f"\n{run.verdict()}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
