"""Kernels of devices, without one; skips the importing module where none can be launched."""

from __future__ import annotations

import torch
from support.launchers import chosen, compiled

from ampfast.backends.gpu import DeviceKernels

launch = chosen()
KERNELS = DeviceKernels(launch)
# Backend of the kernels, for tests that choose one by name; compiled ones are the default.
BACKEND = None if compiled() else "triton"
CPU = torch.device("cpu")
