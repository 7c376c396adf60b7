"""torch's own gradient scaler classes, and their names."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp.sharded_grad_scaler

# In a dict, where patch() does not look, since names in this module would be replaced.
TORCH = {
    "amp": torch.amp.GradScaler,
    "cuda": torch.cuda.amp.GradScaler,
    "cpu": torch.cpu.amp.GradScaler,
    "sharded": torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler,
}

NAMES = {
    "torch.GradScaler": "amp",
    "torch.amp.GradScaler": "amp",
    "torch.amp.grad_scaler.GradScaler": "amp",
    "torch.distributed.fsdp.sharded_grad_scaler.GradScaler": "amp",
    "torch.cuda.amp.GradScaler": "cuda",
    "torch.cuda.amp.grad_scaler.GradScaler": "cuda",
    "torch.cpu.amp.GradScaler": "cpu",
    "torch.cpu.amp.grad_scaler.GradScaler": "cpu",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": "sharded",
}


# Bypasses any metaclass.
_mro = vars(type)["__mro__"].__get__


def meaning(name: str) -> Any:
    """Current value of "module.name", looked up as a program does."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules[module], attribute)


def is_patched() -> bool:
    """Whether torch's name means ampfast's class."""
    return torch.amp.GradScaler is not TORCH["amp"]


def snapshot() -> dict[str, Any]:
    """Every name in every module of a gradient scaler class."""
    return {
        f"{name}.{attribute}": value
        for name, module in sys.modules.copy().items()
        if type(module) is ModuleType
        for attribute, value in vars(module).copy().items()
        # A class whose creation ran out of memory has no bases.
        if issubclass(type(value), type) and TORCH["amp"] in (_mro(value) or ())
    }
