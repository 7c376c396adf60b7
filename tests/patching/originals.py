"""torch's own gradient scaler classes, their names, and programs that use them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp.sharded_grad_scaler

# In a dict, which patch() does not look into, for names in this module would be replaced.
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


# Read so that no metaclass has a say.
_mro = vars(type)["__mro__"].__get__


def meaning(name: str) -> Any:
    """What "module.name" means now, looked up as a program does."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules[module], attribute)


def is_patched() -> bool:
    """Whether torch's name means ampfast's class."""
    return torch.amp.GradScaler is not TORCH["amp"]


def run(code: str, *arguments: str) -> None:
    """Runs a program of its own, which must succeed."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def snapshot() -> dict[str, Any]:
    """Every name of every module for a gradient scaler class, torch's, ours or anyone's."""
    return {
        f"{name}.{attribute}": value
        for name, module in sys.modules.copy().items()
        if type(module) is ModuleType
        for attribute, value in vars(module).copy().items()
        # A class whose making failed for want of memory has none.
        if issubclass(type(value), type) and TORCH["amp"] in (_mro(value) or ())
    }
