"""Nets whose training is measured: published sizes on a GPU, the same tensors on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Lesson:
    """Module with its batch and autocast dtype."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    dtype: torch.dtype

    def loss(self) -> Tensor:
        """Loss of a forward pass: 0-dim float32, on the device of the inputs."""
        with torch.autocast(self.inputs[0].device.type, self.dtype):
            return self.module(*self.inputs)


@dataclass(frozen=True)
class Net:
    """Net, whose forward takes a batch and returns the loss; its name has unpublished sizes."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, float]

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the gradients, without allocating any."""
        with torch.device("meta"):
            return tuple(tuple(parameter.shape) for parameter in self.build().parameters())

    def lesson(self, device: torch.device) -> Lesson:
        """Module and batch on a device, the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module, inputs = self.build(), self.inputs()
        # Most CPUs have no float16 arithmetic.
        dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        return Lesson(module.to(device), tuple(tensor.to(device) for tensor in inputs), dtype)


def nets(device: torch.device) -> list[Net]:
    """The three nets in the size for a device."""
    if device.type == "cuda":
        return [
            _gpt2("gpt2_124m", 768, 12, vocabulary=50257, length=1024, batch=8),
            _resnet50("resnet50", 64, classes=1000, pixels=224, batch=64),
            _dlrm("dlrm, 500 tables", 500, rows=1000, batch=2048),
        ]
    return [
        _gpt2("gpt2, width 96 of 768", 96, 4, vocabulary=512, length=64, batch=2),
        _resnet50("resnet50, width 16 of 64", 16, classes=100, pixels=32, batch=16),
        _dlrm("dlrm, 500 tables", 500, rows=100, batch=256),
    ]


def perceptron(layers: int, width: int, batch: int) -> Net:
    """A net of two parameters a layer."""
    return Net(
        f"perceptron {layers}x{width}, batch {batch}",
        functools.partial(_Perceptron, layers, width),
        lambda: (torch.randn(batch, width), torch.randn(batch, width)),
        torch.optim.AdamW,
        {"lr": 1e-4},
    )


def conv_net() -> Net:
    """A net of ten parameters for 8 x 8 images of ten classes."""
    return Net(
        "conv net",
        lambda: _Classifier(
            *(*_convolution(1, 16, 3), nn.ReLU(), *_convolution(16, 32, 3, 2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
        ),
        lambda: (torch.rand(64, 1, 8, 8), torch.randint(10, (64,))),
        torch.optim.AdamW,
        {"lr": 1e-4},
    )


class _Perceptron(nn.Module):
    """Linear layers and squared error; with skips, as gradients would vanish in 500 layers."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.add(inputs, functional.relu(layer(inputs)), alpha=1 / len(self.layers))
        return functional.mse_loss(inputs, targets)


class _Classifier(nn.Sequential):
    """Layers, and the loss of their scores."""

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        return functional.cross_entropy(super().forward(images), classes)


class _Transformer(nn.Module):
    """Radford et al. 2019: the output shares the embedding's weight."""

    def __init__(self, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        options = {"dropout": 0.0, "activation": "gelu", "norm_first": True, "batch_first": True}
        layer = functools.partial(nn.TransformerEncoderLayer, width, heads, 4 * width, **options)
        self.layers = nn.ModuleList(layer() for _ in range(12))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        scores = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _gpt2(name: str, width: int, heads: int, vocabulary: int, length: int, batch: int) -> Net:
    return Net(
        name,
        functools.partial(_Transformer, width, heads, vocabulary, length),
        lambda: (torch.randint(vocabulary, (batch, length)),),
        torch.optim.AdamW,
        {"lr": 1e-4},
    )


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class _Bottleneck(nn.Module):
    """He et al. 2015: three convolutions with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.through = nn.Sequential(
            *(*_convolution(inputs, width, 1), nn.ReLU()),
            *(*_convolution(width, width, 3, stride), nn.ReLU()),
            *_convolution(width, outputs, 1),
        )
        # As wide as the output, the first block of a stage needs no projection either.
        projection = _convolution(inputs, outputs, 1, stride) if inputs != outputs else ()
        self.around = nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.through(x) + self.around(x))


def _resnet50(name: str, width: int, classes: int, pixels: int, batch: int) -> Net:
    def build() -> nn.Module:
        layers, inputs = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], width
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                layers.append(_Bottleneck(inputs, width << stage, stride))
                inputs = 4 * (width << stage)
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
        return _Classifier(*layers, *head)

    return Net(
        name,
        build,
        lambda: (torch.randn(batch, 3, pixels, pixels), torch.randint(classes, (batch,))),
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.9},
    )


class _Recommender(nn.Module):
    """Naumov et al. 2019, with many small tables."""

    WIDTH = 16
    NUMBERS = 13

    def __init__(self, tables: int, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, self.WIDTH) for _ in range(tables))
        for table in self.tables:
            nn.init.normal_(table.weight, std=tables**-0.5)
        below = (nn.Linear(self.NUMBERS, 64), nn.ReLU(), nn.Linear(64, self.WIDTH), nn.ReLU())
        above = (nn.Linear(2 * self.WIDTH, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
        self.below, self.above = nn.Sequential(*below), nn.Sequential(*above)

    def forward(self, numbers: Tensor, kinds: Tensor, clicked: Tensor) -> Tensor:
        below = self.below(numbers)
        looked_up = [table(kind) for table, kind in zip(self.tables, kinds, strict=True)]
        all_of = torch.stack([below, *looked_up])
        pairs = all_of.sum(0).square() - all_of.square().sum(0)
        scores = self.above(torch.cat([below, pairs], dim=1))
        return functional.binary_cross_entropy_with_logits(scores, clicked)


def _dlrm(name: str, tables: int, rows: int, batch: int) -> Net:
    def inputs() -> tuple[Tensor, ...]:
        numbers, kinds = torch.randn(batch, _Recommender.NUMBERS), (tables, batch)
        return numbers, torch.randint(rows, kinds), torch.randint(2, (batch,)).float()

    build = functools.partial(_Recommender, tables, rows)
    return Net(name, build, inputs, torch.optim.SGD, {"lr": 0.01})
