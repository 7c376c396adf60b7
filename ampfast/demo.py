"""Demo: one training with torch's scaler and with ampfast's, compared bit for bit."""

import copy
import importlib
import math
import os
import statistics
import struct
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
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
    (
        {"color": "#9ecae1", "linewidth": 6},
        {"color": "#3182bd", "marker": "o", "markersize": 11, "fillstyle": "none"},
    ),
    (
        {"color": "#e6740b", "linewidth": 2.4},
        {"color": "#b30000", "marker": "x", "markersize": 7, "markeredgewidth": 1.8},
    ),
    (
        {"color": "black", "linewidth": 0.9, "linestyle": (0, (3, 2))},
        {"color": "black", "marker": ".", "markersize": 4},
    ),
)

_PACKAGES = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm"}


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
        self,
        label: str,
        model: nn.Module,
        scaler: torch.amp.GradScaler,
        device: torch.device,
        *,
        fused_update: bool = False,
    ) -> None:
        self.label = label
        self.model = copy.deepcopy(model).to(device)
        self.scaler: Any = scaler
        self.losses: list[float] = []
        # The scale of each step, and last that of the next one.
        self.scales: list[float] = [scaler.get_scale()]
        self.skipped: list[bool] = []
        self.scaler_ns: list[int] = []
        self._device = device
        self._fused_update = fused_update
        self.optimizer = TimedAdamW(self.model.parameters(), self._now, lr=2e-3)

    def train_step(self, inputs: Tensor, targets: Tensor) -> None:
        """Trains on one batch; records loss, scale, skipping and the scaler's time."""
        with torch.autocast(self._device.type, torch.float16):
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.losses.append(loss.item())
        self.optimizer.zero_grad()
        self.optimizer.steps_ns.clear()

        start = self._now()
        scaled = self.scaler.scale(loss)
        spent = self._now() - start

        scaled.backward()
        # Else the rest of the graph could be freed in a timed call.
        del loss, scaled

        start = self._now()
        if self._fused_update:
            self.scaler.step_and_update(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        spent += self._now() - start

        # A skipped step never calls the optimizer.
        self.skipped.append(not self.optimizer.steps_ns)
        self.scaler_ns.append(spent - sum(self.optimizer.steps_ns))
        self.scales.append(self.scaler.get_scale())

    def accuracy(self, inputs: Tensor, targets: Tensor) -> float:
        """Share of inputs that are classified correctly."""
        self.model.eval()
        with torch.no_grad(), torch.autocast(self._device.type, torch.float16):
            correct: Tensor = self.model(inputs).argmax(1) == targets
            return correct.double().mean().item()

    def growths(self) -> int:
        """Number of steps after which the scale grew."""
        return sum(after > before for before, after in pairwise(self.scales))

    def scaler_us(self) -> float:
        """Median scaler time of a step, in microseconds."""
        return statistics.median(self.scaler_ns) / 1000

    def _now(self) -> int:
        """Time in nanoseconds, read when the device is idle."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter_ns()


@dataclass(frozen=True)
class Outcome:
    """Finished runs of one demo, torch's first, with their accuracies and the setting."""

    runs: list[Run]
    accuracies: list[float]
    setting: str

    @property
    def equal(self) -> bool:
        """Whether every run equals torch's, bit for bit."""
        return all(set(compare(run, self.runs[0]).values()) == {"yes"} for run in self.runs)

    def verdict(self) -> str:
        """Sentence on the equality of the runs, with their differences if any."""
        if self.equal:
            return "All runs are equal bit for bit: every loss, every scale, the final parameters."
        sentences = []
        for run in self.runs:
            answers = compare(run, self.runs[0]).items()
            found = [f"{what} ({no[4:]})" for what, no in answers if no != "yes"]
            if found:
                sentences.append(f"{run.label} has other {', '.join(found)}.")
        return " ".join(["The runs DIFFER:", *sentences])

    def caption(self) -> str:
        """Caption of the picture: verdict, accuracies, skipped steps, setting."""
        accuracies = " / ".join(f"{accuracy:.1%}" for accuracy in self.accuracies)
        skips = " / ".join(str(sum(run.skipped)) for run in self.runs)
        return (
            f"{self.verdict()} Test accuracy {accuracies}, skipped steps {skips}, in the order of "
            f"the legend. A step whose gradients overflow is skipped and halves the scale; "
            f"{GROWTH_INTERVAL} finite steps in a row double it. Setting: {self.setting}."
        )

    def table(self) -> str:
        """Comparison as aligned text, with the setting, the timing and the verdict."""
        reference, *others = self.runs
        steps = len(reference.losses)
        rows = [
            ["", *(run.label for run in self.runs)],
            ["test accuracy", *(f"{accuracy:.2%}" for accuracy in self.accuracies)],
            ["skipped steps", *(f"{sum(run.skipped)} of {steps}" for run in self.runs)],
            ["times the scale grew", *(str(run.growths()) for run in self.runs)],
        ]
        answers = [compare(run, reference) for run in others]
        for what in answers[0]:
            rows.append([f"{what} equal bit for bit", "-", *(answer[what] for answer in answers)])
        rows.append(
            ["scaler microseconds per step", *(f"{run.scaler_us():.1f}" for run in self.runs)]
        )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(
            [_wrap(self.setting), "", *lines, "", _wrap(TIMING), "", _wrap(self.verdict())]
        )


def compare(run: Run, reference: Run) -> dict[str, str]:
    """Compares two runs bit for bit.

    Returns:
        By quantity, "yes" if it is equal, else "no, " and the first step that differs.
    """
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
    """Runs the demo: trains, prints the table, draws the picture.

    Args:
        steps: Training steps of each run, at least 1.
        device: torch device such as "cpu" or "cuda:0"; None for CUDA if available, else the CPU.
        seed: Seed of initial parameters, data split and batches.
        output: Path of the PNG.

    Returns:
        The exit code: 0 if the runs are equal, 1 if they differ, 2 if the demo could not be run.
    """
    try:
        _require_packages()
        _require_writable(output)
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


def _require_writable(path: Path) -> None:
    is_new = not os.path.lexists(path)
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _DemoError(f"cannot write {path}: {error.strerror}") from error


def _choose_device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()
    # The type for a missing device depends on the device and the build of torch.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise _DemoError(f"device {name!r} cannot be used: {reason}") from error
    if not torch.amp.is_autocast_available(device.type):
        raise _DemoError(f"device {name!r} cannot be used: torch has no autocast for it")
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
    test, train = slice(TEST_SAMPLES), slice(TEST_SAMPLES, None)
    batches = _batches(steps, len(labels[train]), generator)

    with _deterministic(seed):
        model = network()
        scaler: dict[str, Any] = {"init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL}
        theirs = torch.amp.GradScaler(device.type, **scaler)
        ours, fused = (ampfast.GradScaler(device.type, **scaler) for _ in range(2))
        runs = [
            Run("torch.amp.GradScaler", model, theirs, device),
            Run("ampfast.GradScaler", model, ours, device),
            Run("ampfast step_and_update", model, fused, device, fused_update=True),
        ]
        for step, batch in enumerate(tqdm(batches, desc=f"training {len(runs)} runs", unit="step")):
            inputs, targets = images[train][batch.to(device)], labels[train][batch.to(device)]
            # In turns, in another order each step, so that other load meets all runs alike.
            first = step % len(runs)
            for one in runs[first:] + runs[:first]:
                one.train_step(inputs, targets)
        accuracies = [one.accuracy(images[test], labels[test]) for one in runs]
    setting = (
        f"{steps} steps of {BATCH} handwritten digits on {device}, conv net of "
        f"{len(list(model.parameters()))} parameter tensors, float16 autocast, AdamW, seed "
        f"{seed}; start scale {INIT_SCALE / 2**22:.0f} x 2^22, growth interval {GROWTH_INTERVAL}; "
        f"torch {torch.__version__}, ampfast {ampfast.__version__} with backend "
        f"{backends.default_for(device)}"
    )
    return Outcome(runs, accuracies, setting)


def _batches(steps: int, samples: int, generator: torch.Generator) -> list[Tensor]:
    """Indices of each step's batch: epoch after epoch, each in a new order."""
    epochs = math.ceil(steps * BATCH / samples)
    order = torch.cat([torch.randperm(samples, generator=generator) for _ in range(epochs)])
    return list(order.split(BATCH)[:steps])


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Deterministic torch on one thread within the block; restores the settings."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # A module property, which type checkers do not see.
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    threads = torch.get_num_threads()
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
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
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
        skipped = [step for step, was in zip(steps, run.skipped, strict=True) if was]
        scales = [run.scales[step - 1] for step in skipped]
        label = f"step skipped by {run.label}"
        scale_axes.plot(skipped, scales, label=label, linestyle="", zorder=3, **mark)
    loss_axes.set_yscale("log")
    loss_axes.set_ylabel("training loss (cross-entropy, nats)")
    scale_axes.set_yscale("log", base=2)
    scale_axes.set_ylabel("loss scale (factor, no unit)")
    scale_axes.set_xlabel("training step")
    scale_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss_axes, scale_axes):
        axes.grid(color="0.9")
        axes.legend()
    same = "equal bit for bit" if outcome.equal else "the runs DIFFER"
    figure.suptitle(f"The same training under torch's and ampfast's GradScaler: {same}")
    figure.supxlabel(_wrap(outcome.caption()), x=0.02, ha="left", fontsize=9)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise _DemoError(f"cannot write {path}: {error.strerror}") from error


def _wrap(text: str) -> str:
    return textwrap.fill(text, width=118)
