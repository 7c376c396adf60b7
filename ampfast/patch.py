"""Replacement of torch's scaler classes, and clipping, by name: `patch()` and `unpatch()`."""

from __future__ import annotations

import copyreg
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from typing_extensions import Protocol, deprecated

from ampfast.clip import torch_functions
from ampfast.scaler import grad_scaler

# torch's modules with a scaler class.
_MODULES = [f"torch.{package}.grad_scaler" for package in ("amp", "cuda.amp", "cpu.amp")]
if torch.distributed.is_available():
    _MODULES.append("torch.distributed.fsdp.sharded_grad_scaler")

# torch's module with the clipping functions, and their names in torch.nn.utils.
_CLIP_MODULE = "torch.nn.utils.clip_grad"
_CLIP_NAMES = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_")

_stand_ins: dict[str, Any] = {}

# Re-entrant, since a finalizer that calls unpatch() may run during the walk.
_lock = threading.RLock()


@dataclass(eq=False)
class Patch:
    """Result of `patch()`; as a context manager, it calls `unpatch()` at the end of the block.

    A block within a patched program, or within another block, leaves it patched.

    Attributes:
        replaced: Names of ampfast's class or functions now, as "module.name".
    """

    replaced: list[str] = field(default_factory=list)
    # torch's classes and functions by stand-in, for `unpatch()`.
    _torchs: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with _lock:
            if self is _current:
                unpatch()


# The first call's result, while patched.
_current: Patch | None = None


def patch(*, clip_grad_norm: bool = False) -> Patch:
    """Replaces torch's gradient scaler with ampfast's under every name, until `unpatch()`.

    The names are `torch.GradScaler`, `torch.amp.GradScaler`, `torch.cuda.amp.GradScaler`,
    `torch.cpu.amp.GradScaler`, FSDP's `ShardedGradScaler`, and the names that loaded modules have
    for them, as after `from torch.cuda.amp import GradScaler as Scaler`. A class kept elsewhere,
    such as in a dict or a default argument, stays torch's. Existing scalers are unchanged
    and still pass `isinstance(x, torch.amp.GradScaler)`; while patched they can be copied, not
    pickled. Existing subclasses are unchanged, too; to
    derive one from ampfast's class, import its module after `patch()`. A subclass requires that if
    its methods name the base class, as in `GradScaler.step(self, ...)`.

    The patched names make an `ampfast.GradScaler`: an instance of a subclass that changes none of
    its methods. The names of `torch.cuda.amp` and `torch.cpu.amp` keep their signature and
    their FutureWarning. All take ampfast's keyword arguments.

    A second call has no effect, unless it is the first one with `clip_grad_norm`. Thread-safe. Call
    `unpatch()` before ampfast is reloaded.

    Args:
        clip_grad_norm: Whether to replace `clip_grad_norm_`, `get_total_norm` and
            `clip_grads_with_norm_` of `torch.nn.utils`, too, by `functional`'s, under every
            name that modules have for them. Scalers made from then on measure the norm as they
            unscale. Norms are rounded differently from torch's.

    Returns:
        The replaced names; in `with ampfast.patch(): ...`, the end of the block restores them,
        unless they were patched before.
    """
    # This comes before the names change, else FSDP's class would derive from ours; outside the
    # lock, since an import of a module that calls patch() holds that module's lock.
    stand_ins = {ours._stands_for: ours for ours in map(_stand_in, _MODULES)}
    global _current
    with _lock:
        result = Patch() if _current is None else Patch(_current.replaced)
        if _current is None:
            # Set first, so that unpatch() can undo an interrupted walk.
            _current = result
            _replace(_current, stand_ins)
        if clip_grad_norm and torch_functions.stand_in_clip_grad_norm_ not in _current._torchs:
            theirs = {name: getattr(torch_functions, f"torch_{name}") for name in _CLIP_NAMES}
            ours = (getattr(torch_functions, f"stand_in_{name}") for name in _CLIP_NAMES)
            _replace(_current, dict(zip(theirs.values(), ours, strict=True)))
        return result


def _replace(patch: Patch, stand_ins: dict[Any, Any]) -> None:
    """Replaces torch's classes or functions by stand-ins."""
    patch._torchs.update((ours, torchs) for torchs, ours in stand_ins.items())
    for module, namespace in _namespaces():
        for name, torchs in _names_of(stand_ins, namespace):
            # torch's clip_grad_norm_ calls its parts by private names.
            if module != _CLIP_MODULE or not name.startswith("_"):
                namespace[name] = stand_ins[torchs]
                patch.replaced.append(f"{module}.{name}")


def unpatch() -> None:
    """Restores torch's own classes and functions, also in modules imported while patched.

    Names bound to something else since, and scalers constructed while patched, are unchanged. No
    effect without a patch.
    """
    global _current
    with _lock:
        if _current is None:
            return
        torchs = _current._torchs
        for _, namespace in _namespaces():
            for name, ours in _names_of(torchs, namespace):
                namespace[name] = torchs[ours]
        _current = None


# Protocol's metaclass as base lets a class derive from torch.amp.GradScaler and from a protocol or
# an ABC; its isinstance calls issubclass.
class _StandIn(type(Protocol)):  # type: ignore[misc]
    """Metaclass of ampfast's classes under torch's names, with `isinstance` of torch's class.

    Instances and subclasses from before the patch pass. Classes derived from a stand-in have an
    `isinstance` of their own.
    """

    def __subclasscheck__(cls, subclass: type) -> bool:
        torch_class = vars(cls).get("_stands_for")
        if torch_class is None:
            return bool(super().__subclasscheck__(subclass))
        return issubclass(subclass, torch_class)


# Not ampfast's own class: unpatch() must tell a name taken from torch from one taken from ampfast,
# and a scaler of torch is no ampfast.GradScaler.
def _stand_in(module: str) -> Any:
    """ampfast's class for the scaler class of one of torch's modules."""
    if module in _stand_ins:
        return _stand_ins[module]
    _, kind, *_ = module.split(".")
    name = "ShardedGradScaler" if kind == "distributed" else "GradScaler"
    theirs = getattr(importlib.import_module(module), name)
    torch_class = getattr(theirs, "_stands_for", theirs)  # another thread may have patched it
    if kind in ("cuda", "cpu"):
        made: Any = _deprecated(torch_class, kind)
    else:
        ours = (
            importlib.import_module("ampfast.scaler.fsdp") if kind == "distributed" else grad_scaler
        )
        made = _StandIn(name, (getattr(ours, name),), {})
    # Pickle finds it by `_reduce_stand_in`; checkpoints, and torch's safe globals, by torch's name.
    made.__module__, made.__qualname__, made._stands_for = module, name, torch_class
    return _stand_ins.setdefault(module, made)  # another thread may have been faster


def _deprecated(torch_class: Any, device: str) -> Any:
    """Stand-in of one of torch's deprecated classes, which have no argument for the device."""

    class TorchBase(torch_class):  # type: ignore[misc]
        __init__ = torch_class.__base__.__init__  # takes a device, as ampfast's passes one

    class GradScaler(grad_scaler.GradScaler, TorchBase, metaclass=_StandIn):
        @deprecated(torch_class.__init__.__deprecated__, category=FutureWarning)  # type: ignore[misc]
        @wraps(torch_class.__init__.__wrapped__)
        def __init__(self, *torchs: Any, **ours: Any) -> None:
            super().__init__(device, *torchs, **ours)

    return GradScaler


def _reduce_stand_in(cls: type) -> Any:
    # It names the module of torch's class, since three stand-ins share a name.
    torch_class = vars(cls).get("_stands_for")
    return cls.__qualname__ if torch_class is None else (_stand_in, (torch_class.__module__,))


copyreg.pickle(_StandIn, _reduce_stand_in)


def _namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """Namespaces of the loaded modules, read without running code of a lazy or disguised module."""
    for name, module in sys.modules.copy().items():
        is_ampfast = name.partition(".")[0] == "ampfast"
        if issubclass(type(module), ModuleType) and not is_ampfast:
            yield name, vars(ModuleType)["__dict__"].__get__(module)


def _names_of(named: Iterable[Any], namespace: dict[str, Any]) -> list[tuple[str, Any]]:
    # Identity is compared, since a module may hold values that refuse to be compared or hashed.
    wanted = set(map(id, named))
    return [(name, value) for name, value in namespace.copy().items() if id(value) in wanted]
