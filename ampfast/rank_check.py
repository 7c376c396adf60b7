"""Whether what each rank was given is the same on all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from ampfast.distributed import Ranks, gathered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["differences", "require_same"]


def require_same(settings: Mapping[str, object], others: Ranks) -> None:
    """Raises the same error on every rank unless all were given the same; one call on each.

    Args:
        settings: Values by name, with a `repr` that tells them apart. A name that only some ranks
            have is compared among those.
        others: The ranks to compare with, all of the default group if there are none. Where there
            is no such group, nothing is compared.

    Raises:
        RuntimeError: Naming what differs, and where.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    groups = others.groups()
    size = math.prod(group.size() for group in groups) if groups else None
    found = differences({**settings, "process_group size": size}, groups or [None])
    if found:
        raise RuntimeError(f"the ranks' scalers differ: {found}")


def differences(settings: Mapping[str, object], groups: Iterable[ProcessGroup | None]) -> str:
    """Returns which settings differ on which ranks, or an empty text; the same on every rank.

    Args:
        settings: As for `require_same`.
        groups: As for `distributed.gathered`.
    """
    seen = gathered({name: repr(value) for name, value in settings.items()}, groups)
    names = {name: None for values in seen.values() for name in values}
    found = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, values in seen.items():
            if name in values:
                ranks.setdefault(values[name], []).append(rank)
        if len(ranks) > 1:
            where = [f"{value} on {_in_words(held_by)}" for value, held_by in ranks.items()]
            found.append(f"{name}: {', '.join(where)}")
    return "; ".join(found)


def _in_words(ranks: list[int]) -> str:
    """Ascending ranks, neighbours together, as in "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"
