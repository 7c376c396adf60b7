"""The compiled core, built from csrc/."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampfast.backends.core import Clip, Pass, Update

CHUNK: int
FACTORS: dict[str, int]
# The found_inf of a spike, and the bound of such flags after reductions; csrc/scale.h.
SPIKE: float
SPIKE_BOUND: float
# The least deviation of norms, relative to their mean.
LEAST_DEVIATION: float
# Added to the norm in the clip coefficient.
CLIP_EPSILON: float
# Device types with kernels, as bits.
CPU: int
CUDA: int
# Columns of a `Track`.
MARK_WORDS: int
MARK_SQUARES: int
WINDOW_BYTES: int
MOST_CHUNK_BYTES: int
ENOUGH_CHUNKS: int

def build_info() -> dict[str, str]: ...

# Return words by name, of a scaler's state and of the norms of the steps taken; in `core` they are
# attributes of these names.
state_layout: Any
norm_layout: Any

def cpu_capability() -> str: ...
def cpu_capabilities() -> list[str]: ...
def set_cpu_capability(name: str) -> None: ...
def set_grain(bytes: int) -> int: ...

# Whether a tensor is a plain one-element tensor of a dtype, as kernels take for a scalar.
def is_scalar(tensor: Tensor, dtype: torch.dtype) -> bool: ...
def tables_made() -> int: ...
def uploads() -> int: ...
def clear_tables() -> None: ...
def set_chunks(most_bytes: int = ..., enough: int = ...) -> None: ...

# The kernels of CPUs, as `backends.Kernels`; None, with nothing done, where tensors or numbers are
# not known exactly, or gradients must be sorted first.
def run(grads: GradList, work: Pass, /) -> Tensor: ...
def clip(clip: Clip, /) -> None: ...

# An entry is marked with the stage `unscaled`, and gets the flag. Without one gradients are only
# read. All gradients are on the device of the scale.
def pass_over(
    optimizer: Any,
    entry: dict[str, Any] | None,
    unscaled: Any,
    work: Pass,
    allow_fp16: bool,
    scale: Tensor,
    /,
) -> Tensor | None: ...

# The clip has limits and `accepted_norms`; its other tensors are made, and the norm is returned.
def clip_over(
    optimizer: Any,
    entry: dict[str, Any],
    unscaled: Any,
    work: Pass,
    allow_fp16: bool,
    scale: Tensor,
    clip: Clip,
    /,
) -> Tensor | None: ...

# The same for kernels that a launcher launches, as the modules `backends.cuda` and
# `backends.triton.launch`.
def pass_over_on(launcher: Any, /, *given: Any) -> Tensor | None: ...
def clip_over_on(launcher: Any, /, *given: Any) -> Tensor | None: ...
def run_on(launcher: Any, grads: GradList, work: Pass, /) -> Tensor: ...
def clip_on(launcher: Any, clip: Clip, /) -> None: ...

# The pass with that ending, made without a Python frame.
def riding(work: Pass, ending: Any, /) -> Pass: ...
def update_on(launcher: Any, update: Update, /) -> bool | None: ...

# Launches of Triton's kernels by the module `backends.triton.launch`.
def triton_multi_tensor(
    module: Any,
    launches: bool,
    work: Pass,
    table: DeviceTable,
    segment: Segment,
    is_last: bool,
    /,
) -> None: ...
def triton_update_scale(module: Any, update: Update, /) -> None: ...

# Whether gradients of these lists of parameters share memory; one that is listed twice does.
def share_memory(groups: Iterable[Iterable[Tensor]], /) -> bool: ...
def is_found(flags: dict[Any, Tensor], /) -> bool | None: ...
def update(fields: tuple[Any, ...], /) -> bool | None: ...

# Whether kernels know the tensors and numbers of an update, on one device, exactly.
def can_update(fields: tuple[Any, ...], /) -> bool: ...

# Whether a scaler or its class replaces one of these methods.
def overrides(scaler: Any, hooks: dict[str, Any], /) -> bool: ...
def has_parameters(param_groups: Any, params: tuple[tuple[Tensor, ...], ...], /) -> bool: ...

# Bytes that tell the dtypes and device types of the parameters that are trained.
def kinds_of(params: Sequence[Any], /) -> bytes: ...

# Drops the tensors that are held by nothing else.
def drop_unheld(values: dict[Tensor, Any], /) -> None: ...

# Of one forward pass under `find_nonfinite`, and its backward; csrc/watch.cpp.
class Reads:
    def __init__(self, words: Callable[[], Tensor | None], earlier: Reads | None) -> None: ...
    def values_of(self, structure: Any) -> list[int]: ...
    def forget(self) -> None: ...
    is_off: bool
    tables: list[Tensor]
    values: list[tuple[tuple[int, int] | None, torch.dtype]]
    gradients: list[tuple[int, tuple[int, int]]]
    updates: Tensor | None

class GradList:
    @staticmethod
    def of(
        tensors: Sequence[Tensor],
        device: torch.device,
        parameters: list[int] | None = ...,
    ) -> GradList | None: ...
    def split(self, parameters: set[int]) -> tuple[GradList, GradList]: ...
    @property
    def device(self) -> torch.device: ...
    # To which the dtypes of the tensors promote.
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def has_float64(self) -> bool: ...
    @property
    def chunks(self) -> int: ...

# Launches of the CUDA kernels through CUDA's driver. An image is a fatbin or PTX.
def cuda_load_kernels(device: int, image: bytes, /) -> None: ...
def cuda_limit_programs(programs: int) -> None: ...
def cuda_multi_tensor(
    work: Pass, table: DeviceTable, segment: Segment, is_last: bool, /
) -> None: ...
def cuda_clip_coefficient(clip: Clip, /) -> None: ...
def cuda_update_scale(update: Update, /) -> None: ...

class Segment:
    dtype: torch.dtype
    word: int
    chunks: int
    first: int

class DeviceTable:
    @staticmethod
    def of(grads: GradList, capturing: bool, /) -> DeviceTable: ...
    @property
    def words(self) -> Tensor: ...
    @property
    def partials(self) -> Tensor: ...
    @property
    def header(self) -> Tensor: ...
    @property
    def segments(self) -> list[Segment]: ...

# Raises RuntimeError if the memory of a tensor was freed or is too small for it.
def require_storage(tensor: Tensor) -> None: ...

# Parts of a complex tensor as its memory holds them, whatever its signs; any other one, or a sparse
# one, itself.
def real_view(tensor: Tensor) -> Tensor: ...

# Whether a parameter with a gradient lacks an entry of its state.
def lacks_state(params: Iterable[Tensor], state: dict[Any, Any], name: str, /) -> bool: ...
def walk(
    param_groups: Iterable[dict[str, Any]],
    allow_fp16: bool,
    writes: bool,
    devices: int,
    bumps_versions: bool,
    local_shard_of: Callable[[Tensor, Tensor | None, int], Tensor | None] | None,
    /,
) -> tuple[
    list[GradList], list[tuple[Tensor, Tensor, int, int]], tuple[int, int, object] | None
]: ...

# A number for each device and dtype of tensors that torch's multi-tensor ops take together; -1 for
# all others.
def kind_of(tensor: Tensor, /) -> int: ...

# Whether nobody but the list `memory` holds its tensors or their memory, and each is float32 and
# else like the dense tensor in that place of `like`.
def can_be_reused(memory: list[Tensor], like: list[Tensor], /) -> bool: ...

# Bytes for each dense tensor that differ after an edit that autograd sees, or of other data.
def looks_of(tensors: list[Tensor], /) -> bytes: ...
