"""What the host will read later, sent without waiting."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sent"]


def sent(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Starts a tensor's way to the host; the event tells when the copy there has arrived.

    Of a tensor on the host it is the tensor itself, and no event.
    """
    if not tensor.is_cuda:
        return tensor, None
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    with torch.cuda.device(tensor.device):
        buffer.copy_(tensor, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
    return buffer, arrival
