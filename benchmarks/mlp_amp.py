"""Classic benchmark of mixed precision: a perceptron, with and without autocast and scalers."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ampfast import backends

from . import report, terminal, whole_files
from .cases import GradCase
from .device_time import CudaQueue, Queue
from .goals import WITHOUT
from .harness import Contender, Job, Measured, Samples, assert_same
from .machine import default_device, new_results, require_memory
from .models import autocast_dtype
from .rows import Timed, dtype_name
from .steps import make_scaler
from .training import scaler_state

LAYERS = 3
LEARNING_RATE = 0.1
SCALE = 2.0**16
INTERRUPTED = 130
# Warm-up batches.
WARM_UP = 2

FP32 = "fp32"
AUTOCAST = "autocast"


@dataclass(frozen=True)
class Setting:
    """Width of the layers, rows of a batch, batches per epoch, and epochs."""

    width: int = 4096
    batch: int = 512
    batches: int = 50
    epochs: int = 3

    @classmethod
    def usual(cls, device: torch.device) -> Setting:
        """The usual setting on a GPU; on a CPU smaller, with more and shorter epochs."""
        return cls() if device.type == "cuda" else cls(512, 128, 20, 30)

    def __str__(self) -> str:
        return (
            f"{LAYERS} layers of {self.width}, {self.batches} batches of {self.batch}, "
            f"{self.epochs} epochs"
        )

    @property
    def case(self) -> GradCase:
        """Gradients of the perceptron."""
        shapes = LAYERS * ((self.width, self.width), (self.width,))
        return GradCase(f"{LAYERS}x{self.width}, batch {self.batch}", shapes)


class Trainer:
    """Perceptron in one of the four modes; all start from the same parameters.

    Args:
        setting: Sizes.
        device: Device of the training.
        dtype: Autocast's dtype, or None to train in float32.
        provider: "torch" for torch's scaler, one of ampfast's backends, or none.
        data: Batches of inputs and targets, float32 of shape (batch, width) each.
    """

    def __init__(
        self,
        setting: Setting,
        device: torch.device,
        dtype: torch.dtype | None,
        provider: str,
        data: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Linear(setting.width, setting.width) for _ in range(LAYERS)]
        between = [layer for linear in layers for layer in (linear, nn.ReLU())][:-1]
        self.model = nn.Sequential(*between).to(device)
        self.provider = provider
        self.path = FP32 if dtype is None else AUTOCAST
        self.losses: list[Tensor] = []
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.scaler = None if provider == WITHOUT else make_scaler(provider, device, SCALE)
        self._dtype = dtype
        self._data = data

    @property
    def key(self) -> tuple[str, str]:
        return self.path, self.provider

    def train(self, batches: int) -> None:
        """Trains on the first batches; appends the last loss to `losses`."""
        for inputs, targets in self._data[:batches]:
            self._optimizer.zero_grad()
            with torch.autocast(
                inputs.device.type, dtype=self._dtype, enabled=self._dtype is not None
            ):
                loss = nn.functional.mse_loss(self.model(inputs), targets)
            if self.scaler is None:
                loss.backward()
                self._optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self._optimizer)
                self.scaler.update()
        self.losses.append(loss.detach())

    def state(self) -> list[Tensor]:
        """State that must be equal with every scaler."""
        scale = [] if self.scaler is None else scaler_state(self.scaler)
        return [*self.losses, *scale, *self.model.parameters()]


def jobs(quick: bool, device: torch.device, queue: Queue | None) -> list[Job]:
    """Jobs of the usual setting, with fewer epochs if `quick`; `queue` is that of a GPU."""
    setting = Setting.usual(device)
    if quick:
        setting = replace(setting, epochs=3)
    return [Job(str(setting), functools.partial(measure, setting, device, queue))]


def measure(setting: Setting, device: torch.device, queue: Queue | None = None) -> Measured:
    """Trains in all modes, epoch by epoch in turn.

    Rows have the time of an epoch, and in `over_none` that over an epoch of autocast alone.

    Raises:
        AssertionError: If losses, scale, tracker or parameters with ampfast are not those with
            torch's scaler.
        MemoryError: If data and perceptrons would not fit.
    """
    elements = setting.case.elements
    # Four perceptrons with gradients in float32 and casts; inputs and targets.
    bytes_of_data = 2 * 4 * setting.batches * setting.batch * setting.width
    require_memory(4 * 12 * elements + bytes_of_data + (256 << 20), device)
    dtype, reasons = autocast_dtype(device)
    generator = torch.Generator().manual_seed(0)

    def batch() -> Tensor:
        return torch.randn(setting.batch, setting.width, generator=generator).to(device)

    data = [(batch(), batch()) for _ in range(setting.batches)]
    ours = backends.default_for(device)
    trainers = [
        Trainer(setting, device, taken, provider, data)
        for taken, provider in ((None, WITHOUT), (dtype, WITHOUT), (dtype, "torch"), (dtype, ours))
    ]
    of_torch, of_ours = trainers[-2:]
    for trainer in trainers:
        trainer.train(WARM_UP)
    _assert_alike(of_torch, of_ours, "before it was timed")
    seconds = _epochs(trainers, setting, (lambda: None) if queue is None else queue.synchronize)
    _assert_alike(of_torch, of_ours, "after it was timed")

    timed = Timed(
        *("mlp", setting.case, torch.float32, 1),
        [Contender(*trainer.key, trainer.train) for trainer in trainers],
        *(Samples(seconds), "wall"),
    )
    measured = Measured(notes=[f"mlp: {reason}" for reason in reasons])
    alone = (AUTOCAST, WITHOUT)
    for row in timed.rows():
        key = (row.path, row.provider)
        measured.rows.append(
            replace(
                row,
                dtype="float32" if row.path == FP32 else dtype_name(dtype),
                over_none=None if key == alone else timed.samples.ratio(key, alone).p50,
                tensors=len(setting.case.shapes),
                elements=elements,
            )
        )
    totals = ", ".join(
        f"{path}{'' if provider == WITHOUT else f' with {provider}'} {sum(times):.2f} s"
        for (path, provider), times in seconds.items()
    )
    measured.notes.append(f"mlp: {setting} took {totals}")
    scale = of_ours.scaler.get_scale() if of_ours.scaler is not None else SCALE
    if scale != SCALE:
        # Both scalers skip alike, but a skipped step lacks the optimizer's work.
        measured.notes.append(f"mlp: steps were skipped, the scale fell to {scale:g}")
    return measured


def _epochs(
    trainers: Sequence[Trainer], setting: Setting, wait: Callable[[], None]
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each trainer's epochs, every other round backwards."""
    seconds: dict[tuple[str, str], list[float]] = {trainer.key: [] for trainer in trainers}
    for epoch in range(setting.epochs):
        for trainer in reversed(trainers) if epoch % 2 else trainers:
            wait()
            start = time.perf_counter()
            trainer.train(setting.batches)
            wait()
            seconds[trainer.key].append(time.perf_counter() - start)
    return seconds


def _assert_alike(theirs: Trainer, ours: Trainer, when: str) -> None:
    assert_same(ours.state(), theirs.state(), f"losses, scale and parameters {when}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this benchmark alone and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mlp_amp",
        description="Trains a perceptron in float32, with autocast, and with torch's and ampfast's "
        "scaler on top. On a CPU the sizes are smaller, unless they are given.",
    )
    for field in fields(Setting):
        parser.add_argument(f"--{field.name}", type=int, metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if any")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows there")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    device = torch.device("cpu") if options.device == "cpu" else default_device()
    given = {field.name: getattr(options, field.name) for field in fields(Setting)}
    setting = replace(
        Setting.usual(device),
        **{name: number for name, number in given.items() if number is not None},
    )
    # Spreads need two epochs.
    for name, least in (("width", 1), ("batch", 1), ("batches", WARM_UP), ("epochs", 2)):
        if getattr(setting, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(setting, name)}")
    try:
        backends.default_for(device)
        whole_files.require_writable([] if options.json is None else [options.json])
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))

    shown = terminal.make()
    shown.line(f"{setting}, SGD with a learning rate of {LEARNING_RATE}, on {device}")
    results = new_results(device)
    queue = CudaQueue(device) if device.type == "cuda" else None
    try:
        measured = measure(setting, device, queue)
    except KeyboardInterrupt:
        print("stopped before all epochs were over, so nothing is reported", file=sys.stderr)
        return INTERRUPTED
    except (AssertionError, MemoryError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    results.rows, results.notes = measured.rows, measured.notes
    report.show(results, shown.table)
    for note in results.notes:
        shown.line(note)
    if options.json is not None:
        results.write_json(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
