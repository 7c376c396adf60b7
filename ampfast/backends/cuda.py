"""Launches of the CUDA kernels by the compiled core, through CUDA's driver."""

from __future__ import annotations

from pathlib import Path

import torch

from ampfast.backends import cuda_graphs
from ampfast.backends.core import compiled

# One file has the kernels for every architecture; setup.py makes it where nvcc is.
KERNELS = Path(__file__).parents[1] / "kernels.fatbin"

# As in _C.pyi.
is_capturing = cuda_graphs.is_stream_capturing
multi_tensor = compiled.cuda_multi_tensor
update_scale = compiled.cuda_update_scale
clip_coefficient = compiled.cuda_clip_coefficient
limit_programs = compiled.cuda_limit_programs


def missing() -> str:
    """Returns what the kernels lack here besides a GPU; else an empty text."""
    if torch.version.hip is not None:
        return "the CUDA kernels are for NVIDIA's GPUs, and this torch is for AMD's"
    return "" if KERNELS.exists() else "ampfast was built without its CUDA kernels"


def load(device: torch.device) -> None:
    """Loads all kernels onto a device, which a capture could not."""
    compiled.cuda_load_kernels(device.index or 0, KERNELS.read_bytes())
