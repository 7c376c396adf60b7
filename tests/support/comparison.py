"""Comparison of values and of outcomes of calls bit for bit, and the scaler to compare with."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ampfast import GradScaler
from ampfast.gradients import Turn
from ampfast.scaler.late_backward import WARNING

BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
FLOATS = tuple(BITS)


def _same_strided(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.dtype.is_complex:
        return _same_strided(torch.view_as_real(ours), torch.view_as_real(theirs))
    if ours.dtype not in BITS:
        return torch.equal(ours, theirs)
    ours, theirs = ours.detach().resolve_neg(), theirs.detach().resolve_neg()
    our_bits, their_bits = ours.view(BITS[ours.dtype]), theirs.view(BITS[ours.dtype])
    # torch's CPU op writes two kinds of NaN, so all count as equal.
    return torch.equal(our_bits, their_bits) or bool(
        ((our_bits == their_bits) | (ours.isnan() & theirs.isnan())).all()
    )


def _tensor_difference(ours: torch.Tensor, theirs: torch.Tensor, where: str) -> str | None:
    for name in ("dtype", "shape", "device", "layout", "requires_grad"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return f"{where}.{name}: ours {a}, torch {b}"
    if ours.is_sparse:
        if ours.is_coalesced() != theirs.is_coalesced():
            return f"{where}.is_coalesced(): ours {ours.is_coalesced()}"
        return difference(ours._indices(), theirs._indices(), f"{where}._indices()") or difference(
            ours._values(), theirs._values(), f"{where}._values()"
        )
    if ours.layout is torch.strided and ours.stride() != theirs.stride():
        return f"{where}.stride(): ours {ours.stride()}, torch {theirs.stride()}"
    if not _same_strided(ours, theirs):
        return f"{where}: ours {ours.detach()}, torch {theirs.detach()}"
    return None


def difference(ours: Any, theirs: Any, where: str = "value") -> str | None:
    """Describes the first difference between two values, or returns None.

    Tensors are compared by dtype, shape, strides, layout and bits, floats by bits. All NaNs are
    alike and the sign of zero counts. Containers are walked and must be of the same type; other
    objects are compared by ``==``.
    """
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return _tensor_difference(ours, theirs, where)
    # A turn is torch's dict with attributes.
    if (dict if type(ours) is Turn else type(ours)) is not type(theirs):
        return f"{where}: ours {ours!r}, torch {theirs!r}"
    if isinstance(ours, float):
        if ours != ours and theirs != theirs:
            return None
        same = struct.pack("d", ours) == struct.pack("d", theirs)
        return None if same else f"{where}: ours {ours!r}, torch {theirs!r}"
    if isinstance(ours, Mapping):
        if list(ours) != list(theirs):
            return f"{where} keys: ours {list(ours)}, torch {list(theirs)}"
        pairs = [(f"{where}[{key!r}]", ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return f"len({where}): ours {len(ours)}, torch {len(theirs)}"
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return None if ours == theirs else f"{where}: ours {ours!r}, torch {theirs!r}"
    return next((d for path, a, b in pairs if (d := difference(a, b, path))), None)


def assert_same(ours: Any, theirs: Any, where: str = "value") -> None:
    """Fails with the first difference."""
    found = difference(ours, theirs, where)
    assert found is None, found


TorchScaler = torch.amp.GradScaler
Scaler = type[TorchScaler]


def started(scaler_type: Scaler = GradScaler, scale: float = 8.0, **arguments: Any) -> Any:
    """Scaler that has been used, so its tensors exist."""
    scaler = scaler_type("cpu", init_scale=scale, **arguments)
    scaler.scale(torch.ones(()))
    return scaler


class Hooked(GradScaler):
    """Overrides a hook, so torch's own methods run."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(*args)


class HookedUnscale(GradScaler):
    """The same by one of the methods."""

    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)


# The warning of a backward after unscale_, a deliberate difference.
_LATE = WARNING.split("{")[0]


@dataclass
class Outcome:
    """Value or exception of a call, and its warnings with the lines they point at."""

    value: Any = None
    error: BaseException | None = None
    warned: list[tuple[type[Warning], str, str, int]] = field(default_factory=list)

    def comparable(self) -> tuple[Any, ...]:
        """Type and text of the error, value and warnings; without what only ours say."""
        return (
            None if self.error is None else (type(self.error).__name__, str(self.error)),
            self.value,
            [each for each in self.warned if not each[1].startswith(_LATE)],
        )


def outcome(call: Callable[[], Any]) -> Outcome:
    """Runs `call` and records its value, exception and warnings."""
    result = Outcome()
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Else only one side would get torch's once-per-process warnings.
        torch.set_warn_always(True)
        try:
            result.value = call()
        except Exception as error:
            result.error = error
        finally:
            torch.set_warn_always(always)
    result.warned = [(w.category, str(w.message), w.filename, w.lineno) for w in caught]
    return result


def agree(scenario: Callable[[type[TorchScaler]], Any]) -> Outcome:
    """Runs a scenario with each class, asserts equal values, errors and warnings; returns ours."""
    ours, theirs = outcome(lambda: scenario(GradScaler)), outcome(lambda: scenario(TorchScaler))
    assert_same(ours.comparable(), theirs.comparable(), "outcome")
    return ours


def replaced(given: Any, **fields: Any) -> Any:
    """A copy of a pass, a clip or an update with other fields."""
    names = (name for name in dir(given) if not name.startswith("_"))
    return type(given)(**{**{name: getattr(given, name) for name in names}, **fields})
