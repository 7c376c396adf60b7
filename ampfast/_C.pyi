"""The compiled core, built from csrc/."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK: int
SPIKE: float
SPIKE_BOUND: float
CPU: int
CUDA: int
HEALTH_WORDS: int
MARK_WORDS: int
WINDOW_BYTES: int
MOST_CHUNK_BYTES: int
ENOUGH_CHUNKS: int

def build_info() -> dict[str, str]: ...
def state_layout() -> dict[str, int]: ...
def cpu_capability() -> str: ...
def cpu_capabilities() -> list[str]: ...
def set_cpu_capability(name: str) -> None: ...
def set_grain(bytes: int) -> int: ...
def is_scalar(tensor: Tensor, dtype: torch.dtype) -> bool: ...
def uploads() -> int: ...
def clear_tables() -> None: ...
def set_enough_chunks(count: int, /) -> None: ...

# Raw calls for regular gradients on the CPU; None, before any side effect, for the general way.
# `usual_entry` returns the scale of an enabled scaler that takes the short way and overrides no
# method given to `watch_hooks`, the entry in it of an optimizer, and the casts of one of the class
# `casting`.
# `unscale_groups` returns whether the step is skipped; `record` replaces the value next to an
# existing weak reference to the optimizer. `state` is an optimizer's entry, which gets the stage
# `unscaled` and the flag before the first write.
def watch_hooks(
    hooks: dict[str, Any], factory: Any, new_entry: dict[str, Any], casting: type, /
) -> None: ...
def usual_entry(
    scaler: Any, optimizer: Any, /
) -> tuple[Tensor, dict[str, Any], Casts | None] | None: ...
def record(entries: dict[int, Any], optimizer: Any, value: Any, /) -> bool | None: ...
def unscale_groups(
    param_groups: Any,
    scale: Tensor,
    allow_fp16: bool,
    state: dict[str, Any],
    unscaled: Any,
    casts: Casts | None,
    /,
) -> bool | None: ...
def check_groups(
    param_groups: Any, grad_scale: Tensor, /
) -> tuple[Tensor, Tensor, Tensor] | None: ...
def clip_groups(
    param_groups: Any,
    scale: Tensor,
    allow_fp16: bool,
    state: dict[str, Any],
    unscaled: Any,
    casts: Casts | None,
    max_norm: float,
    largest: bool,
    skip_above: float | None,
    taken: Tensor | None,
    /,
) -> Tensor | None: ...
def any_found(flags: dict[Any, Tensor], /) -> bool | None: ...
def update_scale(scaler: Any, words: Tensor | None, norm: Tensor | None, /) -> bool | None: ...

# The same for gradients and a scale on a device, whose kernels `launch` queues. `pass_on_device`
# returns its result, which is for a table of the gradients, the scale, a new flag to write, and if
# it clips whether a gradient is float64; without a `state` gradients are only read.
def pass_on_device(
    param_groups: Any,
    scale: Tensor,
    allow_fp16: bool,
    state: dict[str, Any] | None,
    unscaled: Any,
    casts: Casts | None,
    clips: bool,
    launch: Callable[..., Any],
    /,
) -> Any: ...
def update_on_device(
    scaler: Any, words: Tensor | None, norm: Tensor | None, launch: Callable[..., object], /
) -> bool | None: ...

class GradList:
    @staticmethod
    def of(
        tensors: Sequence[Tensor],
        device: torch.device,
        parameters: list[int] | None = ...,
        wide: Sequence[Tensor | None] | None = ...,
    ) -> GradList | None: ...
    def split(self, parameters: set[int]) -> tuple[GradList, GradList]: ...
    def pairs(self) -> GradList: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def has_float64(self) -> bool: ...
    @property
    def chunks(self) -> int: ...

WITH_CUDA: bool

# Only in a build that has the CUDA kernels:

def cuda_load_kernels(device: int | None) -> None: ...
def cuda_limit_programs(programs: int) -> None: ...
def cuda_multi_tensor(
    table: DeviceTable,
    segment: Segment,
    *,
    write: bool,
    use: int,
    factor: Tensor | None,
    coefficient: Tensor | None,
    norms: Tensor | None,
    marks: tuple[Tensor, Tensor] | None,
    epilogue: bool,
    found_inf: Tensor,
    accumulate: bool,
    scale: Tensor | None,
    growth_tracker: Tensor | None,
    state: Tensor | None,
    other_found_inf: Tensor | None,
    factors: tuple[float, float, int],
    divisor: Tensor | None,
) -> None: ...
def cuda_measure(table: DeviceTable, segment: Segment, health: Tensor, /) -> None: ...
def cuda_narrow(table: DeviceTable, segment: Segment, found_inf: Tensor | None, /) -> None: ...
def cuda_clip_coefficient(*clip: Any) -> None: ...
def cuda_update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    factors: tuple[float, float, int],
    state: Tensor | None,
    norm: Tensor | None,
    /,
) -> None: ...

class Segment:
    dtype: torch.dtype
    word: int
    chunks: int
    partials: int
    is_paired: bool
    is_aligned: bool

class DeviceTable:
    @staticmethod
    def of(grads: GradList, capturing: bool, /) -> DeviceTable: ...
    @property
    def buffer(self) -> Tensor: ...
    @property
    def segments(self) -> list[Segment]: ...

def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    state: Tensor | None,
    norm: Tensor | None,
    /,
) -> bool: ...
def require_storage(tensor: Tensor) -> None: ...
def lacks_state(params: Iterable[Tensor], state: dict[Any, Any], name: str, /) -> bool: ...
def walk(
    param_groups: Iterable[dict[str, Any]],
    allow_fp16: bool,
    writes: bool,
    devices: int,
    bumps_versions: bool = ...,
    local_shard_of: Callable[[Tensor, Tensor | None, int], Tensor | None] | None = ...,
    casts: Casts | None = ...,
) -> tuple[list[GradList], list[tuple[Tensor, Tensor, int]], tuple[int, int, object] | None]: ...
def unscale_(
    grads: GradList,
    factor: Tensor,
    is_scale: bool,
    found_inf: Tensor | None,
    marks: tuple[Tensor, Tensor] | None,
    coefficient: Tensor | None,
    norms: Tensor | None,
    /,
) -> Tensor: ...
def check_(
    grads: GradList,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    marks: tuple[Tensor, Tensor] | None,
    norms: Tensor | None,
    /,
) -> Tensor: ...
def norms(
    grads: GradList,
    factor: Tensor,
    is_scale: bool,
    norms: Tensor,
    marks: tuple[Tensor, Tensor] | None,
    /,
) -> Tensor: ...
def measure_(grads: GradList, health: Tensor, /) -> None: ...
def narrow_(pairs: GradList, found_inf: Tensor | None, /) -> bool: ...
def irregular_casts(param_groups: Any, devices: int, /) -> list[Tensor]: ...
def stamp_of(param_groups: Any, /) -> bytes | None: ...
def lend_grads(
    param_groups: Any, weights: tuple[Tensor | None, ...], stamp: object, /
) -> bytes | None: ...
def stepped_pairs(
    param_groups: Any, weights: tuple[Tensor | None, ...], lent: bytes, stamp: object, /
) -> tuple[GradList, bytes] | None: ...
def take_grads(weights: tuple[Tensor | None, ...], /) -> bool: ...
def have_same_entries(
    a: Mapping[Any, Any],
    keys: tuple[Any, ...],
    b: Mapping[Any, Any],
    other_keys: tuple[Any, ...],
    /,
) -> bool: ...

class Casts:
    def __init__(self) -> None: ...
    def finish(self) -> None: ...

# Arguments: those of `backends.cpu.Clip`, in order.
def clip_coefficient(*clip: Any) -> None: ...
