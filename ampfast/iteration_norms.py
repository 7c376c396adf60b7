"""The norms that were taken in one iteration, for its entry in the history."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampfast.backends import aten

__all__ = ["IterationNorms"]


class IterationNorms:
    """Norms by the optimizers whose gradients they are of, which live as long as the iteration."""

    def __init__(self) -> None:
        self._norms: dict[frozenset[int], tuple[Tensor, float]] = {}

    def note(self, optimizers: Sequence[object], norm: Tensor, order: float) -> None:
        """Remembers the joint norm of these optimizers' gradients.

        What was taken of others together with them stays.
        """
        names = frozenset(map(id, optimizers))
        if not any(names < others for others in self._norms):
            kept = {others: entry for others, entry in self._norms.items() if not names & others}
            self._norms = {**kept, names: (norm, order)}

    def together(self, device: torch.device) -> Tensor | None:
        """Returns the norm of all gradients whose norm was taken, if all norms are of one order."""
        norms = list(self._norms.values())
        order = norms[0][1]
        if any(other != order for _, other in norms):
            return None
        parts = [aten.moved(norm.detach(), device).float().reshape(()) for norm, _ in norms]
        if len(parts) == 1:
            return parts[0]
        joint: Tensor = torch.linalg.vector_norm(torch.stack(parts), order)
        return joint
