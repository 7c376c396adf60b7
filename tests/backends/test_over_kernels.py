"""GPU kernels without a GPU, one process per kind, and the scaler over them.

Triton's kernels run in its interpreter and, compiled like CUDA's, in tools/ptx_emulator. CUDA's
also run as C++ of this machine, whose sanitizers see what the emulator checks of PTX.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import host_cuda
from support.cuda_kernels import NVCC
from support.launchers import VARIABLE

TESTS = Path(__file__).parents[1]

# Tests that depend on the scaler's kernels.
OVER_THEM = ("scaler/test_contract.py", "scaler/test_differences.py", "scaler/test_state.py")
OVER_COMPILED = (
    *OVER_THEM,
    "scaler/test_step_and_update.py",
    "scaler/test_loss_scale.py",
    "diagnose/test_overflow_report.py",
)
# The oldest architecture converts bfloat16 in software, and Triton's code for the newest multiplies
# pairs: all values run there, too.
ALL = "backends/device_kernels"
VALUES = "backends/device_kernels/test_lists.py"
FINISH = "backends/device_kernels/test_device_finish.py"
STATE = ("test_random_updates", "test_replays_are_torchs_eager_steps")
# Sizes and addresses of lists, and the last program with its update: what `make test` runs.
SHORT = (
    f"{VALUES}::test_small_sizes_at_every_offset",
    f"{FINISH}::test_fused_update[3-grows-True]",
)


@dataclass(frozen=True)
class Run:
    """Tests for one process, with interpreted kernels by default.

    Attributes:
        name: Name of the test that runs them.
        paths: Files, folders and tests of tests/.
        environment: Variables of the process.
        in_every_test: Whether `make test` runs it, too.
    """

    name: str
    paths: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    in_every_test: bool = False


def compiled(name: str) -> dict[str, str]:
    return {VARIABLE: name, "TRITON_INTERPRET": "0"}


OF_TRITON = (
    Run("short-interpreted", SHORT, in_every_test=True),
    # `make test-triton36` interprets all of them.
    Run("interpreted", (FINISH, *(f"{ALL}/test_device_fuzz.py::{name}" for name in STATE))),
    Run("triton-sm_90-races", (ALL,), compiled("triton-sm_90-races")),
    Run("triton-sm_120", (VALUES,), compiled("triton-sm_120")),
    Run("scaler-interpreted", OVER_THEM, {"AMPFAST_BACKEND": "triton"}),
)
OF_CUDA = (
    Run("cuda-sm_90-races", (ALL,), compiled("cuda-sm_90-races")),
    Run("cuda-sm_75", (VALUES,), compiled("cuda-sm_75")),
    Run("scaler-cuda-sm_90", OVER_COMPILED, compiled("cuda-sm_90")),
)
OF_HOST = (
    Run(
        "short-cuda-host",
        (*SHORT, f"{ALL}/test_device_read.py"),
        compiled("cuda-host"),
        in_every_test=True,
    ),
    Run("cuda-host", (ALL,), compiled("cuda-host")),
    Run("scaler-cuda-host", OVER_COMPILED, compiled("cuda-host")),
    Run("cuda-host-address", (ALL,), compiled("cuda-host-address")),
    Run("cuda-host-thread", (FINISH,), compiled("cuda-host-thread")),
)


def cases(runs: tuple[Run, ...], missing: str | None) -> list[Any]:
    skip = [pytest.mark.skip(reason=missing)] if missing else []
    sweep = [pytest.mark.sweep]
    return [
        pytest.param(run, marks=skip + (sweep if not run.in_every_test else []), id=run.name)
        for run in runs
    ]


NO_TRITON = None if importlib.util.find_spec("triton") else "triton is not installed"
NO_NVCC = None if NVCC else "nvcc is not on the PATH"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "run", [*cases(OF_TRITON, NO_TRITON), *cases(OF_CUDA, NO_NVCC), *cases(OF_HOST, None)]
)
def test_in_a_process(run: Run) -> None:
    paths = [str(TESTS / path) for path in run.paths]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "TRITON_INTERPRET": "1", VARIABLE: "", **run.environment}
    if sanitizer := run.name.partition("cuda-host-")[2]:
        # Output of a sanitizer at exit is lost when the descriptor is captured.
        command.append("--capture=sys")
        environment |= host_cuda.environment(sanitizer)
    if sanitizer == "thread":
        if (setarch := shutil.which("setarch")) is None:
            pytest.skip("setarch is missing, without which ThreadSanitizer does not start")
        command = [setarch, "-R", *command]
    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
