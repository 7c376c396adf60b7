"""Helpers of the test modules: bitwise comparison, gradient layouts and training twins."""

from __future__ import annotations

import contextlib
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ampfast import GradScaler

TorchScaler = torch.amp.GradScaler
Scaler = type[TorchScaler]

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
    if type(ours) is not type(theirs):
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


def _filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


Layout = Callable[[torch.dtype, int], torch.Tensor]

# Equal seeds give equal tensors, with equal strides, offset and overlap, unlike a clone.
LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda dtype, seed: _filled((6, 11), dtype, seed),
    "transposed": lambda dtype, seed: _filled((11, 6), dtype, seed).t(),
    "channels_last": lambda dtype, seed: _filled((2, 3, 5, 4), dtype, seed).contiguous(
        memory_format=torch.channels_last
    ),
    "permuted": lambda dtype, seed: _filled((3, 4, 5), dtype, seed).permute(2, 0, 1),
    "odd_offset": lambda dtype, seed: _filled((64,), dtype, seed)[3:40],
    # More than one chunk of any backend, and not a whole number of vectors.
    "long": lambda dtype, seed: _filled((70_003,), dtype, seed)[1:],
    "every_other": lambda dtype, seed: _filled((6, 22), dtype, seed)[:, 1::2],
    "short": lambda dtype, seed: _filled((5,), dtype, seed),
    "empty": lambda dtype, seed: _filled((3, 0), dtype, seed),
    "scalar": lambda dtype, seed: _filled((), dtype, seed),
    "overlapping": lambda dtype, seed: _filled((8,), dtype, seed).as_strided((4, 3), (1, 2)),
    "expanded": lambda dtype, seed: _filled((6, 1), dtype, seed).expand(6, 11),
}
# Layouts that torch writes; it refuses "expanded", whose elements certainly overlap.
WRITABLE_LAYOUTS = tuple(name for name in LAYOUTS if name != "expanded")


def make_gradient(layout: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal gradient in one of `LAYOUTS`; equal seeds give equal bits."""
    return LAYOUTS[layout](dtype, seed)


def plant(gradient: torch.Tensor, where: str, value: float) -> torch.Tensor:
    """Writes `value` to the ``"first"``, ``"middle"`` or ``"last"`` element; returns the tensor.

    Overflowing values become infinite; empty tensors are unchanged.
    """
    count = gradient.numel()
    if count:
        index = {"first": 0, "middle": count // 2, "last": count - 1}[where]
        place = []
        for size in reversed(gradient.shape):
            place.append(index % size)
            index //= size
        gradient[tuple(reversed(place))] = torch.tensor(value, dtype=torch.float64).to(
            gradient.dtype
        )
    return gradient


def parameter_with(gradient: torch.Tensor, fill: float = 1.0) -> torch.nn.Parameter:
    """Parameter with this very gradient, of its shape, dtype and device."""
    dense = torch.full(gradient.shape, fill, dtype=gradient.dtype, device=gradient.device)
    parameter = torch.nn.Parameter(dense)
    parameter.grad = gradient
    return parameter


def six(*shape: int) -> torch.nn.Parameter:
    """Parameter whose gradient is 6 everywhere, 2 at a scale of 3."""
    return parameter_with(torch.full(shape, 6.0))


def sgd_with(*gradients: torch.Tensor) -> torch.optim.SGD:
    """SGD over parameters with these gradients."""
    return torch.optim.SGD([parameter_with(g) for g in gradients], lr=0.5)


def started(scaler_type: Scaler, scale: float = 8.0, **arguments: Any) -> TorchScaler:
    """Scaler that has been used, so its tensors exist."""
    scaler = scaler_type("cpu", init_scale=scale, **arguments)
    scaler.scale(torch.ones(()))
    return scaler


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "fused_sgd": lambda params: torch.optim.SGD(params, lr=0.5, fused=True),
    "fused_adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "fused_adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "fused_adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
}
FUSED = tuple(name for name in OPTIMIZERS if name.startswith("fused"))


@dataclass
class Side:
    """Scaler, small model and optimizer; one of two twins."""

    scaler: TorchScaler
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[torch.Tensor] = field(default_factory=list)

    def loss(self, seed: int) -> torch.Tensor:
        """Mean square of the model's output for inputs drawn from `seed`."""
        return self.model(_filled((5, 8), torch.float32, seed)).square().mean()

    def train(self, seed: int, bad: float | None = None) -> Any:
        """One ordinary step, with `bad` planted in a gradient if given; returns step's value."""
        self.optimizer.zero_grad()
        loss = self.loss(seed)
        self.losses.append(loss.detach())
        self.scaler.scale(loss).backward()
        if bad is not None:
            plant(next(self.model.parameters()).grad, "middle", bad)
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        return result

    def observe(self) -> dict[str, Any]:
        """State that must be equal on both sides."""
        scaler = self.scaler
        return {
            "losses": self.losses,
            "parameters": [p.detach() for p in self.model.parameters()],
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scale": scaler._scale if scaler.is_enabled() else None,
            "tracker": scaler._growth_tracker if scaler.is_enabled() else None,
            "state_dict": scaler.state_dict(),
            "records": [
                {"stage": record["stage"], "flags": list(record["found_inf_per_device"].values())}
                for record in (scaler._per_optimizer_states if scaler.is_enabled() else {}).values()
            ],
        }


def small_model(seed: int = 0) -> torch.nn.Module:
    """Two-layer network with weights drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def side(
    scaler_type: type[TorchScaler],
    optimizer: str | Callable[..., Any] = "sgd",
    seed: int = 0,
    **scaler_arguments: Any,
) -> Side:
    """Returns one twin; `optimizer` is a name in `OPTIMIZERS` or makes one from the parameters."""
    scaler_arguments.setdefault("device", "cpu")
    model = small_model(seed)
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return Side(scaler_type(**scaler_arguments), model, make(list(model.parameters())))


def paired(
    optimizer: str | Callable[..., Any] = "sgd", seed: int = 0, **scaler_arguments: Any
) -> tuple[Side, Side]:
    """Returns ``(ours, torch's)`` twins that differ in the scaler's class alone."""
    return (
        side(GradScaler, optimizer, seed, **scaler_arguments),
        side(TorchScaler, optimizer, seed, **scaler_arguments),
    )


def assert_sides_same(ours: Side, theirs: Side) -> None:
    """Compares the observable state of two sides."""
    assert_same(ours.observe(), theirs.observe(), "side")


@dataclass
class Outcome:
    """Value or exception of a call, and its warnings with the lines they point at."""

    value: Any = None
    error: BaseException | None = None
    warned: list[tuple[type[Warning], str, str, int]] = field(default_factory=list)

    def comparable(self) -> tuple[Any, ...]:
        """Type and text of the error, value and warnings; without notes, which only ours have."""
        return (
            None if self.error is None else (type(self.error).__name__, str(self.error)),
            self.value,
            self.warned,
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


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs a block with this many torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_alive(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
