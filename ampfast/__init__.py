"""A drop-in replacement for torch.amp.GradScaler that costs close to nothing."""

from ampfast import backends, functional, report
from ampfast._version import __version__
from ampfast.grad_scaler import GradScaler
from ampfast.patching import Patch, patch, unpatch
from ampfast.sync_free import sync_free_

__all__ = [
    "GradScaler",
    "Patch",
    "__version__",
    "backends",
    "functional",
    "patch",
    "report",
    "sync_free_",
    "unpatch",
]
