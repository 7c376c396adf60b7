"""One training with torch's scaler and with ampfast's, compared bit for bit.

Needs scikit-learn, matplotlib and tqdm. Prints a table and draws a picture:

    python examples/demo.py --steps 100
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
import operator
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn

import ampfast
from ampfast import backends

BATCH = 64
TEST_SAMPLES = 360
# In float16 the gradients of this network overflow above a scale of about 2^18: the first steps are
# skipped, and the scale, doubled after every 20 steps, meets that limit again. The factor 3 makes
# every unscaling round, so that a wrong last bit of the inverse scale shows in the losses.
INIT_SCALE = 3 * 2.0**22
GROWTH_INTERVAL = 20

TIMING = (
    "Scaler time: scale(), step() and update() less the optimizer's own step, median over all "
    "steps; on a GPU the clock is read when the GPU is idle. The runs take turns at each step, so "
    "that all meet the same state of the machine."
)

# Line and mark of each run, narrower and darker than those before, so that curves that coincide
# stay visible, in grey as well.
STYLES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"color": "#9ecae1", "lw": 6}, {"color": "#3182bd", "marker": "o", "ms": 11, "mfc": "none"}),
    ({"color": "#e6740b", "lw": 2.4}, {"color": "#b30000", "marker": "x", "ms": 7, "mew": 1.8}),
    ({"color": "black", "lw": 0.9, "ls": (0, (3, 2))}, {"color": "black", "marker": ".", "ms": 4}),
)

_PACKAGES = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm"}

_wrap = partial(fill, width=118)


class _DemoError(Exception):
    """Failure of the demo, with one line for the user."""


class TimedAdamW(torch.optim.AdamW):
    """AdamW that records the time of each step by `now`, in nanoseconds."""

    def __init__(
        self, params: Any, now: Callable[[], int] = time.perf_counter_ns, **options: Any
    ) -> None:
        super().__init__(params, **options)
        self.steps_ns: list[int] = []
        self._now = now

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        start = self._now()
        result = super().step(closure)
        self.steps_ns.append(self._now() - start)
        return result

    # Keeps out torch's wrapper for its profiler, whose time would count as the scaler's.
    step.hooked = True  # type: ignore[attr-defined]


class Run:
    """One training run: a copy of the network, optimizer and scaler, and a record of each step."""

    def __init__(
        self, label: str, model: nn.Module, scaler: Any, device: torch.device, fused: bool = False
    ) -> None:
        self.label = label
        self.model = copy.deepcopy(model).to(device)
        self.optimizer = TimedAdamW(self.model.parameters(), self._now, lr=2e-3)
        self.losses: list[float] = []
        # The scale of each step, and last that of the next one.
        self.scales: list[float] = [scaler.get_scale()]
        self.skipped: list[bool] = []
        self.scaler_ns: list[int] = []
        self._scaler, self._device, self._fused = scaler, device, fused

    def train_step(self, inputs: Tensor, targets: Tensor) -> None:
        """Trains on one batch; records loss, scale, skipping and the scaler's time."""
        with torch.autocast(self._device.type, torch.float16):
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.losses.append(loss.item())
        self.optimizer.zero_grad()
        self.optimizer.steps_ns.clear()

        start = self._now()
        scaled = self._scaler.scale(loss)
        spent = self._now() - start

        scaled.backward()
        # Else the rest of the graph could be freed in a timed call.
        del loss, scaled

        start = self._now()
        if self._fused:
            self._scaler.step_and_update(self.optimizer)
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        spent += self._now() - start

        # A skipped step never calls the optimizer.
        self.skipped.append(not self.optimizer.steps_ns)
        self.scaler_ns.append(spent - sum(self.optimizer.steps_ns))
        self.scales.append(self._scaler.get_scale())

    def accuracy(self, inputs: Tensor, targets: Tensor) -> float:
        """Share of inputs that are classified correctly."""
        self.model.eval()
        with torch.no_grad(), torch.autocast(self._device.type, torch.float16):
            correct: Tensor = self.model(inputs).argmax(1) == targets
            return correct.double().mean().item()

    def scaler_us(self) -> float:
        """Median scaler time of a step, in microseconds."""
        return statistics.median(self.scaler_ns) / 1000

    def _now(self) -> int:
        """Time in nanoseconds, read when the device is idle."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter_ns()


class Outcome:
    """Finished runs of one demo, torch's first, with their accuracies and the setting."""

    def __init__(self, runs: list[Run], accuracies: list[float], setting: str) -> None:
        self.runs, self.accuracies, self.setting = runs, accuracies, setting
        # By quantity: "yes" if it equals torch's bit for bit, else "no, " and where it differs.
        self._answers = [_compare(run, runs[0]) for run in runs]
        differing = []
        for run, answers in zip(runs, self._answers, strict=True):
            found = [f"{what} ({no[4:]})" for what, no in answers.items() if no != "yes"]
            if found:
                differing.append(f"{run.label} has other {', '.join(found)}.")
        self.equal = not differing
        self.verdict = " ".join(["The runs DIFFER:", *differing])
        if self.equal:
            self.verdict = (
                "All runs are equal bit for bit: every loss, every scale, the final parameters."
            )

    def table(self) -> str:
        """Comparison as aligned text, with the setting, the timing and the verdict."""
        titles = ["", "test accuracy", "skipped steps", "times the scale grew"]
        titles += [f"{what} equal bit for bit" for what in self._answers[0]]
        columns = [[*titles, "scaler microseconds per step"]]
        for run, accuracy, answers in zip(self.runs, self.accuracies, self._answers, strict=True):
            columns.append(
                [
                    run.label,
                    f"{accuracy:.2%}",
                    f"{sum(run.skipped)} of {len(run.skipped)}",
                    str(sum(map(operator.lt, run.scales, run.scales[1:]))),
                    *("-" if run is self.runs[0] else answer for answer in answers.values()),
                    f"{run.scaler_us():.1f}",
                ]
            )
        for column in columns:
            width = max(map(len, column))
            align = str.ljust if column is columns[0] else str.rjust
            column.insert(1, "-" * width)
            column[:] = [align(cell, width) for cell in column]
        rows = map("  ".join, zip(*columns, strict=True))
        return "\n".join(
            [_wrap(self.setting), "", *rows, "", _wrap(TIMING), "", _wrap(self.verdict)]
        )


def _compare(run: Run, reference: Run) -> dict[str, str]:
    parameters_equal = all(
        torch.equal(ours.detach().view(torch.int32), theirs.detach().view(torch.int32))
        for ours, theirs in zip(run.model.parameters(), reference.model.parameters(), strict=True)
    )
    return {
        "losses": _first_difference(run.losses, reference.losses),
        "scale traces": _first_difference(run.scales, reference.scales),
        "skipped steps": _first_difference(run.skipped, reference.skipped),
        "final parameters": "yes" if parameters_equal else "no, at the end",
    }


def _first_difference(values: Sequence[float], reference: Sequence[float]) -> str:
    for step, (value, expected) in enumerate(zip(values, reference, strict=True), start=1):
        # By bytes, since -0.0 == 0.0 and NaN != NaN.
        if struct.pack("d", value) != struct.pack("d", expected):
            return f"no, from step {step}"
    return "yes"


def run(steps: int, device: str | None, seed: int, output: Path) -> int:
    """Trains for `steps` of each run, prints the table and draws the picture, a PNG.

    Returns:
        The exit code: 0 if the runs are equal, 1 if they differ, 2 if the demo could not be run.
    """
    try:
        _require_packages()
        # Now rather than after the training.
        with _writing(output):
            is_new = not os.path.lexists(output)
            output.open("ab").close()
            if is_new:
                output.unlink()
        outcome = _train(steps, _choose_device(device), seed)
        print(outcome.table())
        _draw(outcome, output)
    except _DemoError as error:
        print(f"ampfast demo: {error}", file=sys.stderr)
        return 2
    print(f"picture: {output}")
    return 0 if outcome.equal else 1


def _require_packages() -> None:
    missing = []
    for module, package in _PACKAGES.items():
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    if missing:
        names = ", ".join(missing)
        raise _DemoError(f"cannot import {names}; run: pip install {' '.join(missing)}")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _DemoError(f"cannot write {path}: {error.strerror}") from error


def _choose_device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()
        if not torch.amp.is_autocast_available(device.type):
            raise RuntimeError("torch has no autocast for it")
    # The type for a missing device depends on the device and the build of torch.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise _DemoError(f"device {name!r} cannot be used: {reason}") from error
    try:
        backends.default_for(device)
    except (ValueError, RuntimeError) as error:
        raise _DemoError(str(error)) from error
    return device


def network() -> nn.Module:
    """Convolutional network with ten parameters, for 8 x 8 images of ten classes."""
    # Strides in place of pooling, whose backward pass has no fixed order of sums on some devices.
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _train(steps: int, device: torch.device, seed: int) -> Outcome:
    from sklearn.datasets import load_digits
    from tqdm import tqdm

    digits = load_digits()
    generator = torch.Generator().manual_seed(seed)
    shuffle = torch.randperm(len(digits.target), generator=generator)
    images = torch.tensor(digits.images, dtype=torch.float32)[shuffle].unsqueeze(1).to(device) / 16
    labels = torch.tensor(digits.target)[shuffle].to(device)
    # Epoch after epoch, each in a new order; the test samples are the first ones.
    samples = len(labels) - TEST_SAMPLES
    epochs = range(math.ceil(steps * BATCH / samples))
    order = torch.cat([torch.randperm(samples, generator=generator) for _ in epochs])
    batches = (TEST_SAMPLES + order).to(device).split(BATCH)[:steps]

    with _deterministic(seed):
        model = network()
        scaler: dict[str, Any] = {"init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL}
        theirs = torch.amp.GradScaler(device.type, **scaler)
        ours, fused = (ampfast.GradScaler(device.type, **scaler) for _ in range(2))
        runs = [
            Run("torch.amp.GradScaler", model, theirs, device),
            Run("ampfast.GradScaler", model, ours, device),
            Run("ampfast step_and_update", model, fused, device, fused=True),
        ]
        for step, batch in enumerate(tqdm(batches, desc=f"training {len(runs)} runs", unit="step")):
            # In turns, in another order each step, so that other load meets all runs alike.
            first = step % len(runs)
            for one in runs[first:] + runs[:first]:
                one.train_step(images[batch], labels[batch])
        test = slice(TEST_SAMPLES)
        accuracies = [one.accuracy(images[test], labels[test]) for one in runs]
    setting = (
        f"{steps} steps of {BATCH} handwritten digits on {device}, conv net of "
        f"{len(list(model.parameters()))} parameter tensors, float16 autocast, AdamW, seed "
        f"{seed}; start scale {INIT_SCALE / 2**22:.0f} x 2^22, growth interval {GROWTH_INTERVAL}; "
        f"torch {torch.__version__}, ampfast {ampfast.__version__} with backend "
        f"{backends.default_for(device)}"
    )
    return Outcome(runs, accuracies, setting)


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Deterministic torch on one thread within the block; restores the settings."""
    # A module property, which type checkers do not see.
    memory: Any = torch.utils.deterministic
    mode, threads = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    filled = memory.fill_uninitialized_memory
    # cuBLAS reads it on first use, and torch requires it for determinism.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor would count as scaler time.
    memory.fill_uninitialized_memory = False
    # The network is too small for more, and on a busy machine threads wait for each other.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = filled
        torch.set_num_threads(threads)


def _draw(outcome: Outcome, path: Path) -> None:
    """Writes a PNG with the losses, the scales and the caption."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(outcome.runs[0].losses) + 1)
    figure = Figure(figsize=(9, 8), dpi=150, layout="constrained")
    loss_axes, scale_axes = figure.subplots(2, 1, sharex=True)
    for run, (line, mark) in zip(outcome.runs, STYLES, strict=True):
        loss_axes.plot(steps, run.losses, label=run.label, **line)
        scale_axes.step(steps, run.scales[:-1], where="mid", **line)
        skipped = [list(compress(values, run.skipped)) for values in (steps, run.scales)]
        scale_axes.plot(*skipped, label=f"step skipped by {run.label}", ls="", zorder=3, **mark)
    loss_axes.set(yscale="log", ylabel="training loss (cross-entropy, nats)")
    scale_axes.set_yscale("log", base=2)
    scale_axes.set(xlabel="training step", ylabel="loss scale (factor, no unit)")
    scale_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss_axes, scale_axes):
        axes.grid(color="0.9")
        axes.legend()
    same = "equal bit for bit" if outcome.equal else "the runs DIFFER"
    figure.suptitle(f"The same training under torch's and ampfast's GradScaler: {same}")
    accuracies = " / ".join(f"{accuracy:.1%}" for accuracy in outcome.accuracies)
    skips = " / ".join(str(sum(run.skipped)) for run in outcome.runs)
    caption = (
        f"{outcome.verdict} Test accuracy {accuracies}, skipped steps {skips}, in the order of "
        f"the legend. A step whose gradients overflow is skipped and halves the scale; "
        f"{GROWTH_INTERVAL} finite steps in a row double it. Setting: {outcome.setting}."
    )
    figure.supxlabel(_wrap(caption), x=0.02, ha="left", fontsize=9)
    with _writing(path):
        figure.savefig(path, format="png")


def _integer_from(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        # torch takes seeds of 64 bits.
        if not minimum <= value < 2**63:
            raise argparse.ArgumentTypeError(f"must be from {minimum} to 2**63 - 1, not {value}")
        return value

    return integer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Trains the same small network on handwritten digits with torch's scaler and "
        "with ampfast's, compares the runs bit for bit, and draws them. Needs scikit-learn, "
        "matplotlib and tqdm. Exit code: 0 if the runs are equal, 1 if they differ, 2 if the demo "
        "cannot be run.",
    )
    default = "(default: %(default)s)"
    parser.add_argument(
        "--steps", type=_integer_from(1), default=300, help=f"training steps of each run {default}"
    )
    parser.add_argument(
        "--device", help="torch device (default: cuda where there is one, else cpu)"
    )
    seeded = f"seed of initial parameters, data split and batches {default}"
    parser.add_argument("--seed", type=_integer_from(0), default=0, help=seeded)
    path = Path("ampfast-demo.png")
    parser.add_argument(
        "--output", type=Path, default=path, metavar="PATH", help=f"path of the picture {default}"
    )
    options = parser.parse_args(arguments)
    return run(options.steps, options.device, options.seed, options.output)


if __name__ == "__main__":
    sys.exit(main())
