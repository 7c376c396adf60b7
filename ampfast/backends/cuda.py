"""Launches of the CUDA kernels in the compiled core."""

from __future__ import annotations

import torch

from ampfast.backends.core import compiled
from ampfast.capture import is_stream_capturing as is_capturing

if not compiled.WITH_CUDA:
    raise ImportError("the compiled core was built without its CUDA kernels")

# As in _C.pyi.
__all__ = ["is_capturing"]

multi_tensor = compiled.cuda_multi_tensor
narrow = compiled.cuda_narrow
update_scale = compiled.cuda_update_scale
clip_coefficient = compiled.cuda_clip_coefficient
limit_programs = compiled.cuda_limit_programs


def load(device: torch.device) -> None:
    """Loads all kernels onto a device, which a capture could not."""
    compiled.cuda_load_kernels(device.index)
