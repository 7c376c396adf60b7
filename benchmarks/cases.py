"""Measured gradient lists: synthetic extremes and shapes of real models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class GradCase:
    """Named list of gradient shapes, in an optimizer's order."""

    name: str
    shapes: tuple[Shape, ...]

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


def _gpt2(layers: int, width: int, vocabulary: int = 50257, positions: int = 1024) -> list[Shape]:
    """Radford et al. 2019: pre-norm layers; the output shares the embedding's weight."""
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    layer = 2 * [(width,)] + attention + 2 * [(width,)] + mlp
    return [(vocabulary, width), (positions, width), *(layers * layer), (width,), (width,)]


def _resnet50() -> list[Shape]:
    """He et al. 2015: a stem, four stages of bottleneck blocks, one classifier of 1,000 classes."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        outputs = 4 * width
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(outputs, width, 1, 1), (outputs,), (outputs,)]
            if block == 0:
                shapes += [(outputs, inputs, 1, 1), (outputs,), (outputs,)]
            inputs = outputs
    return shapes + _linear(1000, inputs)


def _llama(layers: int, width: int, inner: int, vocabulary: int = 32000) -> list[Shape]:
    """Touvron et al. 2023: no biases, gated MLP, the output has a weight of its own."""
    layer = [*(4 * [(width, width)]), *(2 * [(inner, width)]), (width, inner), (width,), (width,)]
    return [(vocabulary, width), *(layers * layer), (width,), (vocabulary, width)]


_SHAPES: dict[str, Any] = {
    "10x1k": 10 * [(1024,)],
    "1000x1k": 1000 * [(1024,)],
    "10000x256": 10000 * [(256,)],
    "resnet50": _resnet50(),
    "bert_base": _bert(layers=12, width=768),
    "bert_large": _bert(layers=24, width=1024),
    "gpt2_124m": _gpt2(layers=12, width=768),
    "gpt2_xl": _gpt2(layers=48, width=1600),
    "llama_7b": _llama(layers=32, width=4096, inner=11008),
    **{f"one_{mebi}m": [(mebi << 20,)] for mebi in (16, 64, 256, 512)},
    "one_1g": [(1 << 30,)],
}
CASES = {name: GradCase(name, tuple(shapes)) for name, shapes in _SHAPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_gradients(case: GradCase, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Separately allocated tensors of these shapes, as autograd creates them."""
    return [
        torch.empty(shape, dtype=dtype, device=device).uniform_(0.5, 2.0) for shape in case.shapes
    ]
