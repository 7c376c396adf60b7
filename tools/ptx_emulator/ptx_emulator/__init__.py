"""Emulator of PTX on a CPU: runs compiled GPU kernels on CPU memory and checks what they access.

`load` assembles PTX, `launch` runs a kernel, `emulation` says what launches may access and whether
data races are errors. `ptx_emulator.triton_driver` runs Triton's kernels, `ptx_emulator.driver`
those of host code that calls CUDA's driver, `ptx_emulator.cuda` compiles CUDA files.
"""

from .assembler import Kernel, Parameter, UnsupportedPtxError, load
from .machine import RACE_CHECK_LIMIT, Emulation, PtxError, emulation, launch
from .memory import Range

__all__ = [
    "RACE_CHECK_LIMIT",
    "Emulation",
    "Kernel",
    "Parameter",
    "PtxError",
    "Range",
    "UnsupportedPtxError",
    "emulation",
    "launch",
    "load",
]
