"""How the core finds CUDA's driver and launches through it: over a stand-in, in processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

START = """
import os, sys
sys.path += ["tests", "tools/ptx_emulator"]
os.environ.setdefault("PTX_EMULATOR_CACHE", "build/ptx")
import torch
from ampfast import _C
from ampfast.backends import cuda

def failure(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

one, tracker = torch.tensor(4.0), torch.zeros(1, dtype=torch.int32)
update = (one, tracker, [torch.zeros(())], 2.0, 0.5, 3, None, None)
IMAGE = b"// PTX"
"""
STAND_IN = """
from ptx_emulator import driver
made = driver.stand_in()
"""


def said(program: str) -> list[str]:
    """Lines that a program prints."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "AMPFAST_TEST_KERNELS": ""}
    command = [sys.executable, "-c", START + program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_a_driver_or_a_load() -> None:
    program = """
try:
    __import__("ctypes").CDLL("libcuda.so.1")
    print("there is one")
except OSError:
    print(failure(_C.cuda_load_kernels, 0, IMAGE))
print(failure(_C.cuda_update_scale, update))
"""
    load, launch = said(program)
    if load == "there is one":
        pytest.skip("this machine has a driver of CUDA")
    assert load.startswith("RuntimeError: ampfast: no driver of CUDA: libcuda.so.1: ")
    assert launch == "RuntimeError: ampfast: the CUDA kernels are not loaded on device 0"


def test_errors_have_the_drivers_names() -> None:
    program = """
print(failure(_C.cuda_load_kernels, 0, b"no image"))
made.fail("cuInit", 100)
print(failure(_C.cuda_load_kernels, 0, IMAGE))
_C.cuda_load_kernels(0, IMAGE)
made.fail("cuLaunchKernel", 801)
print(failure(_C.cuda_update_scale, update))
print(failure(_C.cuda_update_scale, update))
"""
    expected = [
        "cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE",
        "cuInit: 100",
        "cuLaunchKernel: CUDA_ERROR_NOT_SUPPORTED",
    ]
    end = "as the stand-in was told"
    lines = [f"RuntimeError: ampfast: {each}: {end}" for each in expected]
    assert said(STAND_IN + program) == [*lines, "None"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("another",), "cuModuleGetFunction: CUDA_ERROR_NOT_FOUND: "),
        (
            ("check", "check_norm", "unscale", "unscale_norm", "clip", "clip_by", "narrow"),
            "the CUDA kernels are of another build than the core: "
            "ampfast_check_float32 takes 3 bytes, not ",
        ),
    ],
)
def test_other_kernels_are_refused(names: tuple[str, ...], told: str) -> None:
    program = f"""
for name in {names}:
    for table in ("float32", "float64", "float16", "bfloat16", "float16_pairs", "bfloat16_pairs"):
        made.add_kernel(f"ampfast_{{name}}_{{table}}", 3)
print(failure(_C.cuda_load_kernels, 0, IMAGE))
print(failure(_C.cuda_update_scale, update))
"""
    load, launch = said(STAND_IN + program)
    assert load.startswith(f"RuntimeError: ampfast: {told}")
    assert "not loaded" in launch


def test_what_is_missing_is_told() -> None:
    program = """
from pathlib import Path
from unittest import mock
from ampfast import backends
with mock.patch.object(torch.cuda, "is_available", lambda: True):
    with mock.patch.object(cuda, "KERNELS", Path("/nowhere")):
        print(failure(backends.choose, "cuda"))
    backends._unavailable_reason.cache_clear()
    with mock.patch.object(torch.version, "hip", "7.0"):
        print(backends._unavailable_reason("cuda"))
"""
    refused, other = said(program)
    missing = "RuntimeError: backend 'cuda' cannot run here: ampfast was built without its CUDA"
    assert refused.startswith(missing)
    assert other.startswith("the CUDA kernels are for NVIDIA's GPUs, and this torch is for AMD's")
