"""Drop-in replacement for torch.amp.GradScaler."""

from typing import TYPE_CHECKING, Any

import torch

from ampfast.cores import folders_for

# Folders in which a wheel for several versions of torch has `ampfast._C`.
__path__ = [*__path__, *folders_for(torch.__version__)]

from ampfast import backends, callbacks, functional, report
from ampfast._version import __version__
from ampfast.clip.norm_history import Percentile, Sigmas, ZScore
from ampfast.diagnose.find_nonfinite import find_nonfinite
from ampfast.distributed import mark_replicated
from ampfast.optim.lr_scheduler import LateScheduler
from ampfast.optim.master_weights import MasterWeights, master_weights_
from ampfast.optim.sync_free import sync_free_
from ampfast.patch import Patch, patch, unpatch
from ampfast.scaler.grad_scaler import GradScaler
from ampfast.scaler.step_guard import StepGuard

if TYPE_CHECKING:
    from ampfast.scaler.fsdp import ShardedGradScaler

__all__ = [
    "GradScaler",
    "LateScheduler",
    "MasterWeights",
    "Patch",
    "Percentile",
    "Sigmas",
    "StepGuard",
    "ZScore",
    "__version__",
    "backends",
    "callbacks",
    "find_nonfinite",
    "functional",
    "mark_replicated",
    "master_weights_",
    "patch",
    "report",
    "sync_free_",
    "unpatch",
]
if torch.distributed.is_available():
    __all__ += ["ShardedGradScaler"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name != "ShardedGradScaler" or not torch.distributed.is_available():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported on first use, since torch.distributed.fsdp takes a while.
    from ampfast.scaler.fsdp import ShardedGradScaler

    return ShardedGradScaler
