"""What is known of an optimizer, and what the walk over its gradients leaves to Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampfast.backends import aten, core
from ampfast.backends.aten import TensorList
from ampfast.backends.core import Factor, Pass, Update
from ampfast.backends.scalars import moved, new_flag
from ampfast.errors import add_note, warn_caller

if TYPE_CHECKING:
    from ampfast.distributed import Agreement, LocalShards

# torch's own class, before patch() gives its name to another.
TorchGradScaler = torch.amp.GradScaler

Flags = dict[Any, Tensor]

# Cold, reading an enum's member from its class would cost as much as all other lines of `step`.
READY, UNSCALED, STEPPED = OptState


class Turn(dict[str, Any]):
    """An optimizer's entry in `_per_optimizer_states`, with torch's two keys, of one iteration.

    Attributes:
        record: What is known of the optimizer besides.
        last_flags: The flags of the optimizer's last check in an earlier iteration, by device;
            after a fused step its own, of which there may be none.
        agreement: What the ranks still have to agree on these flags by, or None.
        divisor: The `grad_scale` by which the optimizer clips in its step: 0-dim float32, the
            scale over the clip coefficient; or None.
        ending: The update of the scale that the last check of the iteration does, too, or None.
        grad_scale: The copy of the scale, 0-dim float32, that the last check made, or None.
        may_spike: Whether a norm was compared, so that a flag may be that of a spike.
        is_measured: Whether the norm of a fused step's gradients was recorded: one that is repeated
            only checks.
        is_late: Whether a backward has written gradients since they were unscaled.
    """

    # Not set by a constructor, which would be a cold Python frame.
    record: Record
    last_flags: Flags | None = None
    agreement: Agreement | None = None
    divisor: Tensor | None = None
    ending: Update | None = None
    grad_scale: Tensor | None = None
    may_spike = False
    is_measured = False
    is_late = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, ({**self},)  # what is known besides is of this process


class Record:
    """What a scaler knows of one optimizer, for as long as that lives.

    Attributes:
        optimizer: Returns it, or None once it is deleted.
        turn: Its last turn.
        divides_by: What decides by what its step divides, and that; or None before it is known.
        rows: The tables by parameter, of `diagnose.overflow_report`, or None.
        norms: Histories of the norms of its steps by the name of their rule, of
            `clip.norm_history`.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer: Callable[[], Any] = lambda: optimizer
        self.turn = new_turn()
        self.divides_by: tuple[list[Any], str | None] | None = None
        self.rows: Any = None
        self.norms: dict[str, Any] = {}


class Records:
    """The records of a scaler's optimizers, which are held by weak reference if they take one.

    Attributes:
        known: Records by the id of an optimizer that lives.
    """

    def __init__(self) -> None:
        self.known: dict[int, Record] = {}

    def get(self, optimizer: object) -> Record | None:
        """Returns the record of an optimizer, or of that in a trainer's, if it had a turn."""
        inner = getattr(optimizer, "optimizer", None)
        return self.known.get(id(optimizer)) or self.known.get(id(inner))

    def last_flags(self, optimizer: object) -> Flags:
        """The flags of an optimizer's last check, by device.

        Raises:
            LookupError: If it was never checked.
        """
        record = self.get(optimizer)
        turn = new_turn() if record is None else record.turn
        flags: Flags | None = turn.get("found_inf_per_device") or turn.last_flags
        if flags is None:
            raise LookupError(
                f"this optimizer ({type(optimizer).__name__}) was never checked: "
                "call step() or unscale_() first"
            )
        return flags

    def in_iteration(self, turns: dict[int, dict[str, Any]]) -> list[tuple[Any, Turn]]:
        """Returns the living optimizers that have these turns, and their turns."""
        known = [(record.optimizer(), record.turn) for record in list(self.known.values())]
        return [(each, turn) for each, turn in known if turns.get(id(each)) is turn]

    def of(self, optimizer: Any) -> Record:
        """Returns the record of an optimizer, which is made if there is none."""
        key = id(optimizer)
        if key in self.known:
            return self.known[key]
        record = self.known[key] = Record(optimizer)
        with suppress(TypeError):  # It may take no weak reference.
            # No Python code, in which an interrupt would be lost and with it the end of the record.
            record.optimizer = weakref.ref(optimizer, partial(self.known.pop, key))
        return record


def new_turn() -> Turn:
    """Returns the turn of an optimizer that did nothing yet."""
    return Turn(stage=READY, found_inf_per_device={})


def grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Returns the gradients of parameters, without the warning of a non-leaf tensor."""
    return [p.grad for p in params if (p.is_leaf or p.retains_grad) and p.grad is not None]


# What the core calls, where a gradient is irregular.


def lists_aside(
    found: list[tuple[Any, Tensor, int, int]], coalesces: bool
) -> list[aten.TensorList]:
    """Returns the irregular gradients that a walk has found, in lists for torch's ops."""
    return aten.lists_of(found, partial(_values_of, coalesces=coalesces))


@torch.no_grad()
def _values_of(param: Any, grad: Tensor, coalesces: bool) -> Tensor:
    """Tensor for torch's op: the values of a parameter's sparse gradient, as real numbers."""
    if param is None:
        return grad
    if coalesces or grad.dtype in (torch.float16, torch.complex32):
        # Duplicates add up, which overflows easily in float16: the sums are checked.
        param.grad = grad = grad.coalesce()
    return core.real_view(grad._values())


def check_reduced(shards: LocalShards, work: Pass, flags: Flags, rows: Any, words: Tensor) -> Flags:
    """Checks partial gradients, which all ranks reduce, as the optimizer uses the sums.

    Returns:
        The flags, also of further devices.
    """
    # torch's op writes as it checks.
    how = Factor.NONE if work.write else work.how
    for number, reduced in shards.reduced():
        device, given = reduced.device, work.found_inf
        flag = flags.get(device)
        if flag is None and given is not None:
            flag = moved(given, device, copy=True)
        here = Pass(False, how, found_inf=flag)
        if how != Factor.NONE and work.factor is not None:
            here.factor = moved(work.factor, device)
        if rows is not None:
            here.marks, here.now = rows.counters_on(device), moved(words[:1], device)
        flags[device] = aten.run(TensorList.of([reduced.clone()], [number]), here)
    return flags


def warn_of_duplicates() -> None:
    """Warns of a gradient that is listed twice, which a scaler does once."""
    warn_caller(
        "A gradient is listed twice, as that of a parameter that is: as by torch, it is unscaled, "
        "counted in the norm and clipped as often. List each parameter once."
    )


def refusal(group: int, index: int, param: Any) -> Exception:
    """Returns the error for a parameter that torch refuses."""
    place = f"parameter {index} of group {group}"
    if not isinstance(param, Tensor):  # torch's own error, whose text depends on the version
        optimizer: Any = SimpleNamespace(param_groups=[{"params": [param]}])
        unused = new_flag(torch.device("cpu"))
        try:
            TorchGradScaler("cpu")._unscale_grads_(optimizer, unused, unused, False)
        except Exception as error:
            return add_note(error, f"It is {place}.")
    note = (
        f"The gradient is that of {place}, of shape {tuple(param.shape)} and dtype {param.dtype}. "
        "Keep the parameters in float32 and let autocast choose float16; small gradients vanish in "
        "float16 unless a GradScaler scales them. allow_fp16=True takes them all the same, in the "
        "constructor of a GradScaler or of a StepGuard, which scales nothing."
    )
    return add_note(ValueError("Attempting to unscale FP16 gradients."), note)
