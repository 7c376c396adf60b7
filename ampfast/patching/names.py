"""`patch()` and `unpatch()`: every name that a loaded module has for torch's gradient scaler."""

from __future__ import annotations

import copyreg
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from ampfast.grad_scaler import GradScaler
from ampfast.patching import amp, cpu_amp, cuda_amp

# Each of these takes the names of the torch class that it stands for.
# FSDP's joins them in the first patch().
_STAND_INS: tuple[Any, ...] = (amp.GradScaler, cuda_amp.GradScaler, cpu_amp.GradScaler)

_OURS: dict[type, type] = {ours._stands_for: ours for ours in _STAND_INS}
_TORCHS: dict[type, type] = {ours: torchs for torchs, ours in _OURS.items()}

# Re-entrant, because a finalizer that calls unpatch() may run while the names are walked.
_lock = threading.RLock()
_current: _Swap | None = None


@dataclass(eq=False)
class _Swap:
    """What one patch() changed and found, until the unpatch() that undoes it."""

    derived_before: list[type]
    replaced: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    # Held here, since a module may leave sys.modules before its names are given back.
    namespaces: list[dict[str, Any]] = field(default_factory=list)
    open_blocks: int = 0
    ends_with_block: bool = False


class Patch:
    """What `patch()` did; as a context manager, undoes it at the end of the block.

    A block in a program that was patched before leaves it patched. Where several blocks overlap,
    the last to end gives the names back.
    """

    def __init__(self, swap: _Swap, began: bool) -> None:
        self._swap = swap
        self._began = began

    @property
    def replaced(self) -> list[str]:
        """The names that now mean ampfast's class, as "module.name"."""
        return list(self._swap.replaced)

    @property
    def kept(self) -> list[str]:
        """The names that still mean torch's: methods of a class derived before use them."""
        return list(self._swap.kept)

    @property
    def derived_before(self) -> list[type]:
        """The subclasses made before: they cannot be changed and run torch's code."""
        return list(self._swap.derived_before)

    def __enter__(self) -> Patch:
        with _lock:
            if self._swap is not _current:
                again = patch()
                self._swap, self._began = again._swap, again._began
            self._swap.open_blocks += 1
            self._swap.ends_with_block |= self._began
        return self

    def __exit__(self, *exc_info: object) -> None:
        with _lock:
            self._swap.open_blocks -= 1
            over = self._swap.ends_with_block and self._swap.open_blocks == 0
            if over and self._swap is _current:
                unpatch()

    def __repr__(self) -> str:
        derived = [f"{cls.__module__}.{cls.__qualname__}" for cls in self.derived_before]
        return (
            f"<ampfast.patch(): replaced={self.replaced}, kept={self.kept}, "
            f"derived_before={derived}>"
        )


def patch() -> Patch:
    """Makes every name for torch's gradient scaler mean ampfast's, until `unpatch()`.

    These are `torch.GradScaler`, `torch.amp.GradScaler`, `torch.cuda.amp.GradScaler`,
    `torch.cpu.amp.GradScaler`, FSDP's `ShardedGradScaler`, and whatever a loaded module calls them,
    as after `from torch.cuda.amp import GradScaler as Scaler`. A class kept elsewhere, such as in a
    dict or a default argument, stays torch's. Existing scalers stay what they are and still pass
    `isinstance(x, torch.amp.GradScaler)`. Existing subclasses stay too; to have one derive from
    ampfast's class, import its module after `patch()`. One that calls its base class as
    `torch.amp.GradScaler.step(self, ...)`, neither through `super()` nor by a name of its own
    module, has to.

    What the patched names make is an `ampfast.GradScaler`: an instance of a subclass that changes
    nothing in it. Those of `torch.cuda.amp` and `torch.cpu.amp` keep their signature and their
    FutureWarning. All take ampfast's keyword arguments.

    Patching twice is patching once; threads may do it at the same time.

    Returns:
        A record of what was replaced and what was not. `with ampfast.patch(): ...` gives the names
        back at the end, unless they were patched before.
    """
    global _current
    # Outside the lock: the importer of a module that calls patch() holds that module's lock.
    _import_sharded()
    with _lock:
        if _current is not None:
            return Patch(_current, began=False)
        # Set first: should the walk be interrupted, unpatch() undoes what it did.
        _current = swap = _Swap(list(_derived_before()))
        needed = set().union(*map(_globals_of_methods, swap.derived_before))
        for module, namespace in _namespaces():
            held = _names_of(_OURS, namespace)
            for name, torchs in held:
                if (id(namespace), name) in needed:
                    swap.kept.append(f"{module}.{name}")
                else:
                    namespace[name] = _OURS[torchs]
                    swap.replaced.append(f"{module}.{name}")
            if held:
                swap.namespaces.append(namespace)
        for torchs in _OURS:
            copyreg.dispatch_table.setdefault(torchs, _reduce)
        return Patch(swap, began=True)


def unpatch() -> None:
    """Gives torch its names back, the very same classes, also in modules imported while patched.

    A name that has come to mean something else is left alone, and scalers made while patched stay
    what they are. Does nothing where nothing is patched.
    """
    global _current
    with _lock:
        if _current is None:
            return
        for namespace in [*dict(_namespaces()).values(), *_current.namespaces]:
            for name, ours in _names_of(_TORCHS, namespace):
                namespace[name] = _TORCHS[ours]
        for torchs in _OURS:
            if copyreg.dispatch_table.get(torchs) is _reduce:
                del copyreg.dispatch_table[torchs]
        _current = None


def _import_sharded() -> None:
    # Not sooner, since it takes a while; nor later: imported while patched, torch's would derive
    # from our class for good.
    if torch.distributed.is_available():
        ours = importlib.import_module("ampfast.patching.sharded").ShardedGradScaler
        _OURS[ours._stands_for] = ours
        _TORCHS[ours] = ours._stands_for


def _is_ampfast(module: str) -> bool:
    return module.partition(".")[0] == "ampfast"


def _namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """The loaded modules' names, read so that no code of a lazy or disguised module runs."""
    for name, module in sys.modules.copy().items():
        if issubclass(type(module), ModuleType) and not _is_ampfast(name):
            yield name, vars(ModuleType)["__dict__"].__get__(module)


def _names_of(classes: Iterable[type], namespace: dict[str, Any]) -> list[tuple[str, type]]:
    # By identity, since a module may hold values that refuse to be compared or hashed.
    wanted = set(map(id, classes))
    return [(name, value) for name, value in namespace.copy().items() if id(value) in wanted]


def _derived_before() -> Iterator[type]:
    """Subclasses of torch's classes, each once, that are neither torch's aliases nor ours."""
    bases: list[type] = list(_OURS)
    seen = set(bases)
    for base in bases:
        subclasses: list[type] = type.__subclasses__(base)
        for cls in subclasses:
            if not (cls in seen or issubclass(cls, GradScaler) or _is_ampfast(cls.__module__)):
                seen.add(cls)
                bases.append(cls)
                yield cls


def _globals_of_methods(cls: type) -> set[tuple[int, str]]:
    """The global names that a class's methods use, with the id of the namespace they are in.

    `GradScaler.step(self, optimizer)` in a class that derives from torch's must go on meaning
    torch's method: ours cannot run on an instance that is not ours.
    """
    used: set[tuple[int, str]] = set()
    for method in vars(cls).values():
        while isinstance(method, FunctionType):
            codes = [method.__code__]
            for code in codes:
                used.update((id(method.__globals__), name) for name in code.co_names)
                codes.extend(const for const in code.co_consts if isinstance(const, CodeType))
            method = vars(method).get("__wrapped__")
    return used


def _reduce(scaler: Any) -> tuple[Any, ...]:
    # Pickle looks a class up by its name, which for torch's finds ours while patched.
    return _new_torch_scaler, (_OURS[type(scaler)],), scaler.__getstate__()


def _new_torch_scaler(ours: type) -> Any:
    return object.__new__(_TORCHS[ours])
