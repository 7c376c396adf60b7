"""Arguments of norms, and their sums where ranks agree or torch's ops take them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampfast.backends import aten
from ampfast.backends.aten import p_norm
from ampfast.backends.core import Factor, Found, Pass
from ampfast.backends.scalars import allocate, any_found, moved, widest
from ampfast.clip.norm_history import ClipLimit, Sigmas, clip_limit_of, skip_limit_of
from ampfast.distributed import Agreement, Layout, LocalShards, marks_of
from ampfast.errors import float_of
from ampfast.gradients import READY, Flags

# Orders whose norm is computed in the pass of the check.
FUSED_ORDERS = (2.0, math.inf)


@dataclass
class NormTerm:
    """Gradients of one optimizer, or of a list of tensors, in a norm.

    Attributes:
        grads: The gradients by number, None where there is none; read, which may warn of tensors
            that are no leaves, only where torch's ops take them.
        found: The gradients, as kernels take them.
        work: The pass that reads them.
        shards: The collector of the local shards of distributed ones, or None.
        rows: The tables of tracking, or None.
        words: The state of which the first word counts the steps, or None.
        turn: The optimizer's turn, or None.
    """

    grads: Iterable[Tensor | None]
    found: Found
    work: Pass
    shards: LocalShards | None = None
    rows: Any = None
    words: Tensor | None = None
    turn: Any = None

    @property
    def layouts(self) -> dict[int, Layout]:
        """Layouts of distributed gradients, by number."""
        return {} if self.shards is None else self.shards.layouts

    def unscaling_on(self, device: torch.device) -> tuple[Factor, Tensor | None]:
        """Returns how, and by what factor on a device, gradients are still to be unscaled."""
        work = self.work
        if work.write or work.factor is None:
            return Factor.NONE, None
        return Factor(work.how), moved(work.factor, device)


def order_of(norm_type: object) -> float:
    """Returns the order of a norm as a float; raises for invalid ones."""
    order = math.inf if norm_type == "inf" else float_of("norm_type", norm_type, ' or "inf"')
    if not order > 0:
        raise ValueError(f'norm_type must be a number above 0 or "inf", got {norm_type!r}')
    return order


def measured(
    given: list[tuple[Any, Any, Found, Pass, Any]],
    order: float,
    device: torch.device,
    agreement: Agreement | None,
    words: Tensor | None,
) -> tuple[Tensor, list[Flags]]:
    """Returns what `sums_of` does, of an optimizer, its turn, gradients, pass and rows each."""
    terms: list[NormTerm] = []
    for optimizer, turn, found, work, rows in given:
        grads = (param.grad for group in optimizer.param_groups for param in group["params"])
        terms.append(NormTerm(grads, found, work, found.shards, rows, words, turn))
    return sums_of(terms, order, device, agreement)


def sums_of(
    terms: list[NormTerm], order: float, device: torch.device, agreement: Agreement | None
) -> tuple[Tensor, list[Flags]]:
    """Returns the sums of a `Clip` and the flags of each term; of all ranks if they agree.

    Turns that are ready get this rank's flags, on which `update` agrees if the collective fails.
    """
    read = [_read(term, agreement) for term in terms]
    flags = [found for found, _ in read]
    for term, found in zip(terms, flags, strict=True):
        if agreement is not None and term.turn is not None and term.turn["stage"] is READY:
            term.turn["found_inf_per_device"], term.turn.agreement = found, agreement
    wide = widest(device)
    if order in FUSED_ORDERS:
        counted = [each.reshape(2) for _, sums in read for each in sums]
        # Of complex gradients the passes have read the parts.
        whole = [term for term in terms if term.found.has_complex and order != 2.0]
        counted += [norm.repeat(2) for term in whole for norm in _p_norms(term, order, agreement)]
        counted = counted or [allocate(torch.zeros, 2, dtype=wide, device=device)]
        sums = torch.stack([moved(each, device) for each in counted])
        if agreement is None:
            return sums, flags
        largest = order != 2.0
        mine = sums[:, 1].amax() if largest else sums[:, 0].sum()
        flags, total = agreement.all_reduce_norm(flags, device, mine, largest=largest)
    else:
        norms = [allocate(torch.zeros, (), dtype=wide, device=device)]
        norms += [moved(n, device) for term in terms for n in _p_norms(term, order, agreement)]
        total = torch.linalg.vector_norm(torch.stack(norms), order)
        if agreement is not None:
            flags = agreement.all_reduce(flags, device)
            total = agreement.norm(total, order)
    # A total that is known is in both columns.
    return torch.stack([total, total]).unsqueeze(0), flags


def _read(term: NormTerm, agreement: Agreement | None) -> tuple[Flags, list[Tensor]]:
    """Computes flags, and sums of the gradients that this rank counts."""
    if agreement is None:
        each: tuple[Flags, list[Tensor]] = term.found.run(term.work, term.rows, term.words, True)
        return each
    marks, layouts, others = marks_of(term.found.groups), term.layouts, agreement.counts(None)
    # What this rank counts in the norm unless it counts the others; the norm of a partial sum is
    # not that of a summand.
    apart = set[int]()
    for number in {*layouts, *marks}:
        layout = layouts.get(number)
        is_whole = layout is None or not layout.is_partial
        if (is_whole and agreement.counts(layout, marks.get(number))) != others:
            apart.add(number)
    parts = [(term.found, others)]
    if apart:
        inside, outside = term.found.split(apart)
        parts = [(outside, others), (inside, not others)]
    # A device whose shards are all empty has no flag yet.
    flags: dict[Any, list[Tensor]] = {device: [] for device in term.found.devices}
    counted: list[Tensor] = []
    for found, counts in parts:
        here, sums = found.run(term.work, term.rows, term.words, True)
        counted += sums if counts else []
        for device, flag in here.items():
            flags.setdefault(device, []).append(flag)
    # Partial sums are replaced by reduced ones.
    for number, reduced in term.shards.reduced() if term.shards is not None else ():
        row = aten.norms([reduced], *term.unscaling_on(reduced.device))
        if term.rows is not None and term.words is not None:
            now = moved(term.words[:1], reduced.device)
            aten.mark_(term.rows.counters_on(reduced.device), now, [number], row[1:])
        counted += [row] if agreement.counts(layouts[number], marks.get(number)) else []
        flags.setdefault(row.device, []).append((~row[1].isfinite()).float())
    return {device: any_found(found, device) for device, found in flags.items()}, counted


def _p_norms(term: NormTerm, order: float, agreement: Agreement | None) -> Iterator[Tensor]:
    """Norm, by torch's ops, of each gradient that this rank counts and that has elements."""
    marks = {} if agreement is None else marks_of(term.found.groups)
    for number, grad in enumerate(term.grads):
        layout = term.layouts.get(number)
        if grad is not None and layout is not None:
            grad = layout.local_tensor(grad)  # type: ignore[arg-type]
        counts = agreement is None or agreement.counts(layout, marks.get(number))
        values = grad._values() if grad is not None and grad.is_sparse else grad
        if values is not None and values.numel() and counts:
            yield p_norm(values, order, *term.unscaling_on(values.device))


def clip_arguments(
    optimizer: object, max_norm: Any, norm_type: object, in_place: object, skip_above: Any
) -> tuple[list[Any], float | ClipLimit, float, float | Sigmas | None]:
    """Returns the optimizers of a clip, its limit and order, and the largest norm of a step."""
    # What is most usual needs no frame of Python, each of which is cold in a training loop.
    is_usual = type(norm_type) is float and norm_type > 0
    order: Any = norm_type if is_usual else order_of(norm_type)
    if type(max_norm) is not float or not max_norm >= 0:
        max_norm = clip_limit_of(max_norm)
    highest = skip_above
    if skip_above is not None and type(skip_above) is not Sigmas:
        highest = skip_limit_of(skip_above)
    if not isinstance(in_place, bool):
        raise TypeError(f"in_place must be a bool, got {type(in_place).__name__}")
    is_one = hasattr(optimizer, "param_groups") and not isinstance(optimizer, (list, tuple))
    return [optimizer] if is_one else optimizers_of(optimizer), max_norm, order, highest


def optimizers_of(optimizer: object) -> list[Any]:
    """Returns the optimizers of a call: one, or a list or tuple of them."""
    given: Any = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        raise ValueError("the list of optimizers is empty")
    for each in given:
        if not hasattr(each, "param_groups"):
            raise TypeError(
                "expected an optimizer or a list of optimizers, not parameters; got "
                f"{type(each).__name__}, which has no param_groups"
            )
    if len(given) > 1:
        params = [p for each in given for group in each.param_groups for p in group["params"]]
        if len({id(param) for param in params}) < len(params):
            raise ValueError("an optimizer is given twice, or two of them share a parameter")
    return list(given)
