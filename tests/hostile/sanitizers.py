"""The extension's tests over a build with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREE = ROOT / "build" / "hostile" / "sanitized"
COPIED = ("ampfast", "csrc", "tests", "examples", "setup.py", "pyproject.toml", "README.md")
# Tests of the extension: on CPU tensors, and of the host side of device kernels.
TESTS = (
    *("backends/test_choice", "backends/test_cpu", "backends/device_kernels/test_lists"),
    *("backends/test_device_costs", "backends/test_device_hosts", "backends/test_threads"),
    *("clip/test_global_norm", "clip/test_norm_history"),
    *("diagnose/test_overflow_report", "test_gradients"),
    *("optim/test_master_weights", "scaler/test_bad_input"),
    *("scaler/test_contract", "scaler/test_differences", "scaler/test_differential"),
    *("scaler/test_found_inf", "scaler/test_loss_scale", "scaler/test_overrides"),
    *("scaler/test_state", "scaler/test_step_and_update", "scaler/test_step_guard"),
    "test_functional",
)
# vptr needs type information of torch's classes, which its libraries do not export.
FLAGS = "-fsanitize=address,undefined -fno-sanitize=vptr -fno-omit-frame-pointer -g1 -O1"


def library(name: str) -> str:
    """Path of one of the compiler's libraries."""
    compiler = os.environ.get("CXX", "c++").split()
    command = [*compiler, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        raise SystemExit(f"{compiler[0]} has no {name}: AddressSanitizer needs it")
    return os.path.realpath(found)


def build() -> None:
    """Builds the extension in a copy of the sources, incrementally."""
    TREE.mkdir(parents=True, exist_ok=True)
    ignored = shutil.ignore_patterns("__pycache__", "_C.*.so")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, TREE / name, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy2(ROOT / name, TREE / name)
    # After the flags of setup.py, whose -O3 would take many minutes.
    compiler = TREE / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" {FLAGS}\n')
    compiler.chmod(0o755)
    # Without CUDA kernels, which have their own tools.
    environment = {**os.environ, "CXX": str(compiler), "CUDA_HOME": "/nowhere"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=TREE, env=environment, check=True)


def main() -> int:
    """Builds, runs pytest over the build and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", default=",".join(TESTS), help="test files, as scaler/test_state")
    options, more = parser.parse_known_args()
    build()
    # Also C++'s library, or the first exception finds no handler.
    preloaded = map(library, ("libasan.so", "libubsan.so", "libstdc++.so"))
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        # Python and torch keep memory until exit.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONPATH": str(TREE),
    }
    files = (f"tests/{name}.py" for name in options.tests.split(","))
    # Output of a sanitizer at exit is lost when the descriptor is captured.
    command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", *files, *more]
    return subprocess.run(command, cwd=TREE, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
