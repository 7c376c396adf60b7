"""What torch's scaler and ampfast's do alike, and what only ampfast's survives.

Prints a table of one training, equal bit for bit, and draws two: fused SGD whose first step
overflows, and bad batches. Needs scikit-learn and matplotlib:

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
from itertools import takewhile
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
# Of the fused SGD: trainings of each scaler, and their steps.
SEEDS, SGD_STEPS = 10, 30
# Of the bad batches: steps; from the first on, in every so many steps so many have wrong labels; a
# gradient that is infinite.
BAD_STEPS, BAD_FIRST, BAD_EVERY, BAD_IN_A_ROW, INFINITE = 240, 80, 40, 5, 210

TIMING = (
    "Scaler time: scale(), step() and update() less the optimizer's own step, median over all "
    "steps; on a GPU the clock is read when the GPU is idle. The runs take turns at each step, so "
    "that all meet the same state of the machine. Its share of a whole step depends on the net: "
    "here it is small, and beside forward and backward the scaler hardly counts."
)

_PACKAGES = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}

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
        self.whole_ns: list[int] = []
        self._scaler, self._device, self._fused = scaler, device, fused

    def train_step(self, inputs: Tensor, targets: Tensor) -> None:
        """Trains on one batch; records loss, scale, skipping and the time of scaler and step."""
        begun = self._now()
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

        self.whole_ns.append(self._now() - begun)
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

    def whole_us(self) -> float:
        """Median time of a whole step, in microseconds."""
        return statistics.median(self.whole_ns) / 1000

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
        columns = [[*titles, "scaler microseconds per step", "of a whole step of"]]
        for run, accuracy, answers in zip(self.runs, self.accuracies, self._answers, strict=True):
            columns.append(
                [
                    run.label,
                    f"{accuracy:.2%}",
                    f"{sum(run.skipped)} of {len(run.skipped)}",
                    str(sum(map(operator.lt, run.scales, run.scales[1:]))),
                    *("-" if run is self.runs[0] else answer for answer in answers.values()),
                    f"{run.scaler_us():.1f}",
                    f"{run.whole_us():.0f}",
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
        place = _choose_device(device)
        outcome = _train(steps, place, seed)
        sgd, (curves, skipped) = _fused_sgd(place, seed), _bad_batches(place, seed)
        ruined = {
            name: sum(not math.isfinite(curve[-1]) for curve in runs) for name, runs in sgd.items()
        }
        ends = ", ".join(f"{curve[-1]:.3f} ({way})" for way, curve in curves.items() if curve)
        said = [
            f"Fused SGD whose first step overflows, in memory that held NaN: in {SEEDS} seeds "
            f"torch's scaler ruined {ruined['torch.amp.GradScaler']} models, ampfast's "
            f"{ruined['ampfast.GradScaler']}.",
            f"Test loss after {BAD_STEPS} steps in bfloat16: {ends}; {len(skipped)} steps skipped.",
        ]
        print(outcome.table(), *map(_wrap, said), sep="\n")
        _draw(sgd, curves, skipped, output)
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


def _digits(steps: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Images, labels, and the indices of each step's batch; the first samples are for tests."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    generator = torch.Generator().manual_seed(seed)
    shuffle = torch.randperm(len(digits.target), generator=generator)
    images = torch.tensor(digits.images, dtype=torch.float32)[shuffle].unsqueeze(1).to(device) / 16
    labels = torch.tensor(digits.target)[shuffle].to(device)
    # Epoch after epoch, each in a new order.
    samples = len(labels) - TEST_SAMPLES
    epochs = range(math.ceil(steps * BATCH / samples))
    order = torch.cat([torch.randperm(samples, generator=generator) for _ in epochs])
    return images, labels, (TEST_SAMPLES + order).to(device).split(BATCH)[:steps]


def _counted(items: Sequence[Any], what: str) -> Iterator[Any]:
    """The items, with a line that counts them."""
    for number, item in enumerate(items, start=1):
        text, is_last = f"\rtraining {what}: {number}/{len(items)}", number == len(items)
        if is_last or sys.stderr.isatty():
            print(text, end="\n" * is_last, file=sys.stderr, flush=True)
        yield item


def _train(steps: int, device: torch.device, seed: int) -> Outcome:
    images, labels, batches = _digits(steps, device, seed)
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
        for step, batch in enumerate(_counted(batches, f"{len(runs)} runs")):
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


def _fused_sgd(device: torch.device, seed: int) -> dict[str, list[list[float]]]:
    """Losses by scaler and seed of a fused SGD with momentum whose first step overflows.

    torch allocates the momentum in that step, which writes nothing: the next one reads what was in
    the memory before. Here that is NaN, on purpose; in a long program it is anything.
    """
    images, labels, batches = _digits(SGD_STEPS, device, seed)
    losses: dict[str, list[list[float]]] = {"torch.amp.GradScaler": [], "ampfast.GradScaler": []}
    seeds = [(name, number) for number in range(SEEDS) for name in losses]
    for name, number in _counted(seeds, "fused SGD"):
        kind = ampfast.GradScaler if name.startswith("ampfast") else torch.amp.GradScaler
        with _deterministic(seed + number):
            model = network().to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
            scaler = kind(device.type, init_scale=2.0**20)
            curve = []
            for batch in batches:
                optimizer.zero_grad()
                with torch.autocast(device.type, torch.float16):
                    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                scaler.scale(loss).backward()
                if not curve:
                    dirt = [torch.full_like(p, math.nan) for p in [*model.parameters()] * 4]
                    del dirt
                scaler.step(optimizer)
                scaler.update()
                curve.append(loss.item())
                if not math.isfinite(curve[-1]):
                    break  # and stays so
        losses[name].append(curve)
    return losses


def _bad_batches(device: torch.device, seed: int) -> tuple[dict[str, list[float]], list[int]]:
    """Test losses after each fourth step in bfloat16, by way, and the steps that were skipped.

    Bad batches have the labels of others; one gradient is infinite.
    """
    images, labels, batches = _digits(BAD_STEPS, device, seed)
    curves: dict[str, list[float]] = {}
    skipped: list[int] = []
    for way in _counted(("no bad batches", "torch's clipping", "StepGuard, Sigmas"), "bad batches"):
        with _deterministic(seed):
            model = network().to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
            guard = ampfast.StepGuard()
            curves[way] = []
            for step, batch in enumerate(batches):
                is_bad = step >= BAD_FIRST and step % BAD_EVERY < BAD_IN_A_ROW
                targets = labels[batch].roll(int(is_bad and way != "no bad batches"))
                optimizer.zero_grad()
                with torch.autocast(device.type, torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(images[batch]), targets)
                if step == INFINITE and way != "no bad batches":
                    loss = loss * math.inf
                guard.scale(loss).backward()
                if way == "StepGuard, Sigmas":
                    limit = ampfast.Sigmas(6, window=32)
                    guard.clip_grad_norm_(optimizer, 1.0, skip_above=limit)
                    guard.step_and_update(optimizer)
                    skipped += [step] * guard.step_skipped(optimizer)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                if step % 4 == 3:
                    model.eval()
                    with torch.no_grad():
                        test = slice(TEST_SAMPLES)
                        outputs = model(images[test])
                        curves[way].append(
                            nn.functional.cross_entropy(outputs, labels[test]).item()
                        )
                    model.train()
    return curves, skipped


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


def _draw(
    sgd: dict[str, list[list[float]]],
    curves: dict[str, list[float]],
    bad_skipped: list[int],
    path: Path,
) -> None:
    """Writes a PNG: fused SGD on the left, bad batches on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=140, layout="constrained")
    sgd_axes, bad_axes = figure.subplots(1, 2)
    for (name, runs), color in zip(sgd.items(), ("#b30000", "#3182bd"), strict=True):
        for number, curve in enumerate(runs):
            style = {"color": color, "lw": 1, "alpha": 0.7}
            _plot_finite(sgd_axes, 1, curve, "_" if number else name, style)
    sgd_axes.set(title=f"float16, fused SGD: the first step overflows, {SEEDS} seeds")
    sgd_axes.set(xlabel="training step", ylabel="training loss")
    for (way, curve), color in zip(curves.items(), ("#c8ccd1", "#b30000", "#3182bd"), strict=True):
        width = 5 if way == "no bad batches" else 1.5
        _plot_finite(bad_axes, 4, curve, way, {"color": color, "lw": width})
    ticks = {"marker": "^", "ls": "", "color": "tab:orange", "clip_on": False}
    bottom = {"transform": bad_axes.get_xaxis_transform(), "label": "skipped step"}
    bad_axes.plot([step + 1 for step in bad_skipped], [0.0] * len(bad_skipped), **ticks, **bottom)
    bad_axes.set(title="bfloat16: bad batches", xlabel="training step", ylabel="test loss")
    bad_axes.set_yscale("log")
    for axes in (sgd_axes, bad_axes):
        axes.grid(color="0.9")
        axes.legend()
    with _writing(path):
        figure.savefig(path, format="png")


def _plot_finite(
    axes: Any, every: int, curve: Sequence[float], label: str, style: dict[str, Any]
) -> None:
    """Plots a curve, with a point for `every` steps, up to its first NaN, which gets a cross."""
    finite = list(takewhile(math.isfinite, curve))
    steps = [every * (place + 1) for place in range(len(finite))]
    axes.plot(steps, finite, label=label, **style)
    if len(finite) < len(curve):
        told = label if label == "_" else "NaN from here on"
        cross = {**style, "label": told, "marker": "x", "ms": 9, "ls": ""}
        axes.plot(steps[-1:], finite[-1:], **cross)


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
        "with ampfast's, compares the runs bit for bit, and draws them beside two failures that "
        "only ampfast survives. Needs scikit-learn and matplotlib. Exit code: 0 if the runs are "
        "equal, 1 if they differ, 2 if the demo cannot be run.",
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
