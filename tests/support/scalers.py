"""The scaler to compare with, and scalers in use."""

from __future__ import annotations

from typing import Any

import torch

TorchScaler = torch.amp.GradScaler
Scaler = type[TorchScaler]


def started(scaler_type: Scaler, scale: float = 8.0, **arguments: Any) -> TorchScaler:
    """Scaler that has been used, so its tensors exist."""
    scaler = scaler_type("cpu", init_scale=scale, **arguments)
    scaler.scale(torch.ones(()))
    return scaler
