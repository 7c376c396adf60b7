"""Measured gradient lists: synthetic extremes and shapes of real models."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .nets import Net, nets

Shape = tuple[int, ...]


@dataclass(frozen=True)
class GradCase:
    """Named list of gradient shapes, in an optimizer's order."""

    name: str
    shapes: tuple[Shape, ...]

    @classmethod
    def of(cls, net: Net) -> GradCase:
        """Gradients of a net."""
        return cls(net.name, net.shapes())

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def list_bytes(self, dtype: torch.dtype) -> int:
        return self.elements * dtype.itemsize


def _linear(outputs: int, inputs: int) -> list[Shape]:
    return [(outputs, inputs), (outputs,)]


def _bert(layers: int, width: int, vocabulary: int = 30522, positions: int = 512) -> list[Shape]:
    """Encoder of Devlin et al. 2018: embeddings, post-norm layers, pooler; no heads."""
    attention = 4 * _linear(width, width) + 2 * [(width,)]
    mlp = _linear(4 * width, width) + _linear(width, 4 * width) + 2 * [(width,)]
    embeddings: list[Shape] = [(vocabulary, width), (positions, width), (2, width)]
    return embeddings + 2 * [(width,)] + layers * (attention + mlp) + _linear(width, width)


def _llama(layers: int, width: int, inner: int, vocabulary: int = 32000) -> list[Shape]:
    """Touvron et al. 2023: no biases, gated MLP, the output has a weight of its own."""
    layer = [*(4 * [(width, width)]), *(2 * [(inner, width)]), (width, inner), (width,), (width,)]
    return [(vocabulary, width), *(layers * layer), (width,), (vocabulary, width)]


_SHAPES: dict[str, Any] = {
    "10x1k": 10 * [(1024,)],
    "1000x1k": 1000 * [(1024,)],
    "10000x256": 10000 * [(256,)],
    "bert_base": _bert(layers=12, width=768),
    "bert_large": _bert(layers=24, width=1024),
    "llama_7b": _llama(layers=32, width=4096, inner=11008),
    **{f"one_{mebi}m": [(mebi << 20,)] for mebi in (16, 64, 512)},
    "one_1g": [(1 << 30,)],
}


@functools.cache
def case_of(name: str) -> GradCase:
    """List of a name; of a net in its size for a GPU, whose modules take seconds to import."""
    found = {net.name: net for net in nets(torch.device("cuda"))}
    return GradCase.of(found[name]) if name in found else GradCase(name, tuple(_SHAPES[name]))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_gradients(case: GradCase, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Separately allocated tensors of these shapes, as autograd creates them."""
    return [
        torch.empty(shape, dtype=dtype, device=device).uniform_(0.5, 2.0) for shape in case.shapes
    ]
