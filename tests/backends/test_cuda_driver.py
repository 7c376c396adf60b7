"""How the core finds CUDA's driver and launches through it: over a stand-in, in processes."""

from __future__ import annotations

import pytest
from support.processes import forked

START = """
import os, sys
sys.path += ["tests", "tools/ptx_emulator"]
os.environ.setdefault("PTX_EMULATOR_CACHE", "build/ptx")
import torch
from pathlib import Path
from unittest import mock
from ampfast import _C, backends
from ampfast.backends import cuda
from ptx_emulator import driver

def failure(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("None")

one, tracker = torch.tensor(4.0), torch.zeros(1, dtype=torch.int32)
update = _C.Update(one, tracker, [torch.zeros(())], 2.0, 0.5, 3)
IMAGE = b"// PTX"
def load(image=IMAGE):
    failure(_C.cuda_load_kernels, 0, image)
def launch():
    failure(_C.cuda_update_scale, update)
"""

ERROR = "RuntimeError: ampfast: "
NOT_LOADED = "RuntimeError: map::at"
# What a process does, and how the lines that it prints begin.
CASES = {
    "no driver": ("load(); launch()", (f"{ERROR}no driver of CUDA: libcuda.so.1: ", NOT_LOADED)),
    "errors by name": (
        """
made = driver.stand_in()
load(b"no image")
made.fail("cuInit", 100)
load()
_C.cuda_load_kernels(0, IMAGE)
made.fail("cuLaunchKernel", 801)
launch(); launch()
""",
        (
            f"{ERROR}cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE: as the stand-in was told",
            f"{ERROR}cuInit: 100: as the stand-in was told",
            f"{ERROR}cuLaunchKernel: CUDA_ERROR_NOT_SUPPORTED: as the stand-in was told",
            "None",
        ),
    ),
    "missing kernels": (
        "driver.stand_in().add_kernel('another'); load(); launch()",
        (f"{ERROR}cuModuleGetFunction: CUDA_ERROR_NOT_FOUND: ", NOT_LOADED),
    ),
    "no kernels, or another GPU": (
        """
with mock.patch.object(torch.cuda, "is_available", lambda: True):
    with mock.patch.object(cuda, "KERNELS", Path("/nowhere")):
        failure(backends.choose, "cuda")
    with mock.patch.object(torch.version, "hip", "7.0"):
        print(backends._what_is_missing("cuda"))
""",
        (
            "RuntimeError: backend 'cuda' cannot run here: ampfast was built without its CUDA",
            "the CUDA kernels are for NVIDIA's GPUs, and this torch is for AMD's",
        ),
    ),
    # A watched step launches one read for the input, 40 outputs and their gradients.
    "reads": (
        """
made = driver.stand_in()
_C.cuda_load_kernels(0, IMAGE)
finder = __import__("ampfast.diagnose.find_nonfinite", fromlist=["find_nonfinite"])
finder.backends = mock.Mock(default_for=lambda device: "cuda")
net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(40)])
with finder.find_nonfinite(net):
    for _ in range(2):
        net(torch.ones(2, 4)).square().sum().backward()
        print(made.calls("cuLaunchKernel"))
""",
        ("81", "162"),
    ),
}


@pytest.mark.slow
def test_errors_and_launches() -> None:
    programs = [program for program, _ in CASES.values()]
    said = forked(START, *programs, TRITON_INTERPRET="0", AMPFAST_TEST_KERNELS="")
    for (name, (_, expected)), text in zip(CASES.items(), said, strict=True):
        lines = text.splitlines()
        if name == "no driver" and name not in lines[0]:
            continue  # this machine has one
        assert len(lines) == len(expected), text
        for line, start in zip(lines, expected, strict=True):
            assert line.startswith(start), name
