"""The compiled core, built from csrc/."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampfast.backends.core import Aim, Use

CHUNK: int
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
# Words in a row of overflow counters, and the place of the squares; csrc/track.h.
MARK_WORDS: int
MARK_SQUARES: int
WINDOW_BYTES: int
MOST_CHUNK_BYTES: int
ENOUGH_CHUNKS: int

TORCH: str  # which it was built for

# Words by name, of a scaler's state and of the norms of the steps taken; in `core` they are
# attributes of these names.
state_layout: Any
norm_layout: Any

# Instruction set of the CPU kernels, "avx2" or "baseline", and a switch to "baseline" for tests.
CPU_CAPABILITY: str

def use_baseline(uses: bool, /) -> None: ...

# Whether a tensor is a plain one-element tensor of a dtype, as kernels take for a scalar.
def is_scalar(tensor: Tensor, dtype: torch.dtype, devices: int = ...) -> bool: ...
def tables_made() -> int: ...
def uploads() -> int: ...
def clear_tables() -> None: ...
def set_chunks(enough: int, /) -> None: ...

# The kernels of CPUs, as `backends.Kernels`.
def run(grads: GradList, work: Pass, /) -> Tensor: ...
def clip(clip: Clip, /) -> None: ...
def update(update: Update, /) -> bool: ...

# The same for kernels that a launcher launches, as `backends` describes it. `update_on` returns
# None, with nothing written, where tensors or numbers are not known exactly.
def run_on(launcher: Any, grads: GradList, work: Pass, /) -> Tensor: ...
def clip_on(launcher: Any, clip: Clip, /) -> None: ...
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

# Whether one of these flags is set, and a new flag, 0 or 1; None where one is not on the CPU.
def is_found(flags: dict[Any, Tensor], /) -> bool | None: ...
def flag_of(flags: dict[Any, Tensor], /) -> Tensor | None: ...

# Updates a scale by these kernels; returns what they left, which is all if there are none.
def update_by(
    kernels: Any,
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    growth_factor: Any,
    backoff_factor: Any,
    growth_interval: Any,
    state: Tensor | None,
    norm: Tensor | None,
    /,
) -> Update | None: ...

# Returns the turn of an optimizer in an iteration, which may begin with this call.
def turn_of(records: Any, turns: dict[int, Any], optimizer: Any, /) -> Any: ...

# Returns the found_inf tensors of an iteration; `agree` ends what ranks have to agree on.
def flags_of(turns: dict[int, Any], agree: Callable[[Any], Any], /) -> list[Tensor]: ...

# Whether kernels know the tensors and numbers of an update, on one device, exactly.
def can_update(update: Update, /) -> bool: ...

# Whether a scaler or its class replaces one of these methods.
def overrides(scaler: Any, hooks: dict[str, Any], /) -> bool: ...

# As `optim.fused_support.decide_division`; an optimizer's record keeps the answer.
def divides_by(records: Any, optimizer: Any, /) -> str | None: ...

# Drops the tensors that are held by nothing else.
def drop_unheld(values: dict[Tensor, Any], /) -> None: ...

# Of one forward pass under `find_nonfinite`, and its backward; csrc/watch.cpp.
class Reads:
    def __init__(self, words: Callable[[], Tensor | None]) -> None: ...
    def values_of(self, structure: Any) -> list[int]: ...
    def forget(self) -> None: ...
    def so_far(
        self,
    ) -> tuple[
        list[tuple[int | None, torch.dtype]],
        list[tuple[int, int]],
        list[Tensor],
    ]: ...
    is_off: bool
    has_gradients: bool

class Pass:
    """One pass over gradients of one device; all tensors are on it.

    Attributes:
        write: Whether values times the factor are written in place; else gradients are only read.
        how: How the factor is applied; a division never writes.
        factor: One-element float32; None with `Factor.NONE`.
        found_inf: One-element float32 that is set to 1 if a value as it is used is inf or NaN; by
            default a new 0-dim tensor.
        accumulate: Whether a `found_inf` that is set stays; else, as for the new one of
            `DeviceKernels`, it is assigned, 0 or 1.
        coefficient: One-element float64 by which the checked and rounded products are multiplied,
            or None.
        sums: float64 of shape (2,) that gets the sum of squares of the products, not rounded to 16
            bits, or quotients, and the largest magnitude as it is used; NaN wins. Or None.
        marks: Overflow counters: int64 of shape (P, MARK_WORDS), for P parameters: the last step
            with an inf or NaN value as it is used, and the number of such steps, the same of NaN,
            and the bits of a float64 to which a pass with sums adds the sum of squares. Or None.
        now: int64 whose first element is the number of completed steps; None without marks.
        factor_copy: 0-dim float32 that gets the factor, or None.
        ending: An update of the scale by the last program of the pass, or None.
        clip: A clipping that a pass with `sums` decides at its end; the pass gives it these sums
            and, if it has a `skip_above`, its flag. Or None; kernels know it, torch's ops do not.
    """

    write: bool
    how: int
    factor: Tensor | None
    found_inf: Tensor | None
    accumulate: bool
    coefficient: Tensor | None
    sums: Tensor | None
    marks: Tensor | None
    now: Tensor | None
    factor_copy: Tensor | None
    ending: Update | None
    clip: Clip | None
    # Takes the fields in this order, or by name; what is not given is None, or as a new flag.
    def __init__(self, *fields: Any, **named: Any) -> None: ...

class Clip:
    """The norm and coefficient of a clipping; all tensors are on one device.

    Attributes:
        sums: float64 of shape (passes, 2), the sums of each pass.
        max_norm: Limit of the norm.
        largest: Whether the norm is the largest magnitude, else the 2-norm.
        norm: One-element float32 or float64 that gets the norm.
        coefficient: One-element float64 that gets the clip coefficient, at most 1; or None.
        scale: One-element float32, or None.
        divisor: One-element float32 that gets the scale over the coefficient, or None.
        found_inf: One-element float32, the flag of these gradients, or None: where it is 0 and the
            norm too large, it becomes `SPIKE`.
        skip_above: Largest norm of a step that is taken or, with `accepted_norms`, its distance
            from their mean in standard deviations.
        accepted_norms: Norms of the steps that were taken: float64 words, laid out as
            `norm_layout`. A step that is taken joins them.
    """

    sums: Tensor
    max_norm: float
    largest: bool
    norm: Tensor
    coefficient: Tensor | None
    scale: Tensor | None
    divisor: Tensor | None
    found_inf: Tensor | None
    skip_above: float
    accepted_norms: Tensor | None
    def __init__(self, *fields: Any, **named: Any) -> None: ...

class Update:
    """One update of a scale; all tensors are on one device.

    Attributes:
        scale: One-element float32, written in place.
        growth_tracker: One-element int32, written in place.
        found_infs: One-element float32 flags; any that is not 0 counts.
        growth_factor: As for `functional.update_scale_`.
        backoff_factor: As for `functional.update_scale_`.
        growth_interval: As for `functional.update_scale_`.
        state: Counters, history and limits: int64 words, laid out as `state_layout`. Without it
            the rule is torch's.
        norm: One-element float32, the norm of the gradients for the state.
        applied: Whether a pass did it as its ending.
    """

    scale: Tensor
    growth_tracker: Tensor
    found_infs: Sequence[Tensor]
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    state: Tensor | None
    norm: Tensor | None
    applied: bool
    def __init__(self, *fields: Any, **named: Any) -> None: ...

# What a walk over parameters found. `run` runs a pass over all of it, with the rows of tracking and
# the state whose first word counts the steps, or None for both; it returns the flags by device
# and, if it `measures`, the sums of each list.
class Found:
    def run(self, work: Pass, rows: Any, words: Tensor | None, measures: bool, /) -> Any: ...
    # The gradients of the parameters of these numbers, and the others.
    def split(self, numbers: set[int], /) -> tuple[Found, Found]: ...
    # To which all dtypes promote, if they are one list for kernels in which none is twice.
    @property
    def dtype(self) -> torch.dtype | None: ...
    @property
    def devices(self) -> list[torch.device]: ...
    @property
    def groups(self) -> tuple[tuple[Tensor, ...], ...]: ...
    # The collector of local shards, if a gradient may be distributed.
    @property
    def shards(self) -> Any: ...
    @property
    def has_complex(self) -> bool: ...

# The way of one scaler to gradients.
class Finder:
    ranks: Any
    tracking: Any
    has_group: bool
    keeps_norms: bool
    allow_fp16: bool
    def __init__(self, choice: Any, /) -> None: ...
    # The scale by which gradients are scaled, the state, and the passes that unscale and divide.
    def set_scale(
        self, scale: Tensor, words: Tensor, unscaling: Pass, dividing: Pass, /
    ) -> None: ...
    # All raise torch's refusals before a write. `run` is that of a hook: the turn stays as it is.
    def run(
        self, optimizer: Any, turn: Any, work: Pass, allow_fp16: bool, /
    ) -> dict[torch.device, Tensor]: ...
    def find_in(self, param_groups: Any, writes: bool, allow_fp16: bool, /) -> Found: ...
    def find_over(self, grads: Sequence[Tensor], writes: bool, /) -> Found: ...
    # Finds and runs a pass; the turn gets the flags, on which ranks agree, and is unscaled unless
    # the pass divides, and so only checks, float16 gradients, too.
    def take(self, optimizer: Any, turn: Any, work: Pass, /) -> dict[torch.device, Tensor]: ...
    # Gives a turn the flags of all ranks, by the agreement that it has until then.
    def agree(self, turn: Any, /) -> None: ...
    # Takes the norm of optimizers' gradients, or of what was found, and unscales or clips them or
    # lets their steps clip. The limit is a number, or decides the clip as `History.follow`; the
    # rule is the `skip_above` and the `accepted_norms` of a `Clip`, or None.
    def norm(
        self,
        optimizers: list[Any],
        turns: list[Any],
        uses: list[Use],
        aim: Aim,
        limit: Any,
        order: float,
        rule: tuple[float, Tensor | None] | None,
        /,
    ) -> Tensor: ...

class GradList:
    # None if a tensor is irregular or on another device.
    @staticmethod
    def of(tensors: Sequence[Tensor], device: torch.device, /) -> GradList | None: ...

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

# Parts of a complex tensor as its memory holds them, whatever its signs; any other one, or a sparse
# one, itself.
def real_view(tensor: Tensor) -> Tensor: ...

# A number for each device and dtype of tensors that torch's multi-tensor ops take together; -1 for
# all others.
def kind_of(tensor: Tensor, /) -> int: ...

# Whether nobody but the list `memory` holds its tensors or their memory, and each is float32 and
# else like the dense tensor in that place of `like`.
def can_be_reused(memory: list[Tensor], like: list[Tensor], /) -> bool: ...

# Bytes for each dense tensor that differ after an edit that autograd sees, or of other data.
def looks_of(tensors: list[Tensor], /) -> bytes: ...
