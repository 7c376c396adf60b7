"""The demo: equal runs, different runs, and every reason not to start."""

import importlib.util
import math
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
import torch

import ampfast

pytest.importorskip("sklearn", reason="the demo needs scikit-learn")
image = pytest.importorskip("matplotlib.image", reason="the demo needs matplotlib")
colors = pytest.importorskip("matplotlib.colors", reason="the demo needs matplotlib")

_spec = importlib.util.spec_from_file_location(
    "demo", Path(__file__).parents[2] / "examples" / "demo.py"
)
demo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(demo)

STEPS = 16
LABELS = ["torch.amp.GradScaler", "ampfast.GradScaler", "ampfast step_and_update"]
COMPARED = ["losses", "scale traces", "skipped steps", "final parameters"]


@pytest.fixture(autouse=True, scope="module")
def _short_interval() -> Iterator[None]:
    """Lets the scale grow within a few steps; shortens the other two trainings."""
    short = {"GROWTH_INTERVAL": 4, "SEEDS": 1, "SGD_STEPS": 3, "BAD_STEPS": 4}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in short.items():
            monkeypatch.setattr(demo, name, value)
        yield


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if the demo starts training."""

    def train(*_: object) -> None:
        pytest.fail("the demo began to train")

    monkeypatch.setattr(demo, "_train", train)


def table_of(text: str) -> dict[str, list[str]]:
    """Cells of the demo's table by row name."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4} | {
        "header": next(row for row in rows if row == LABELS)
    }


def run(path: Path, steps: int = STEPS, seed: int = 0) -> int:
    """Runs the demo on the CPU."""
    return demo.run(steps, "cpu", seed, path)


@dataclass(frozen=True)
class Finished:
    """A completed run of the demo."""

    code: int
    output: str
    errors: str
    picture: Path


@pytest.fixture(scope="module")
def finished(_short_interval: None, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Output of a short demo."""
    path = tmp_path_factory.mktemp("demo") / "picture.png"
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        code = run(path)
    return Finished(code, output.getvalue(), errors.getvalue(), path)


def test_equal_runs(finished: Finished) -> None:
    assert finished.code == 0
    table = table_of(finished.output)
    assert len(set(table["test accuracy"])) == 1
    assert len(set(table["skipped steps"])) == 1
    skipped, steps = re.fullmatch(r"(\d+) of (\d+)", table["skipped steps"][0]).groups()
    assert int(steps) == STEPS
    # Otherwise the comparison would not exercise the scaler.
    assert int(skipped) > 2
    assert int(table["times the scale grew"][0]) > 1
    for what in COMPARED:
        assert table[f"{what} equal bit for bit"] == ["-", "yes", "yes"]
    own, whole = (table[name] for name in ("scaler microseconds per step", "of a whole step of"))
    assert all(0 < float(part) < float(all_) for part, all_ in zip(own, whole, strict=True))
    assert "ampfast's 0." in finished.output
    assert "All runs are equal bit for bit" in finished.output
    assert "less the optimizer's own step" in finished.output
    assert str(finished.picture) in finished.output
    assert f"{STEPS}/{STEPS}" in finished.errors


def test_the_picture_shows_both_trainings(finished: Finished) -> None:
    pixels = image.imread(finished.picture)[..., :3]
    _, width, _ = pixels.shape
    assert width >= 1200
    left, right = torch.tensor(pixels).split([width // 2, width - width // 2], dim=1)
    for panel, opacity, names in ((left, 0.7, ["#3182bd"]), (right, 1.0, ["#c8ccd1", "#3182bd"])):
        for name in names:
            color = opacity * torch.tensor(colors.to_rgb(name)) + 1 - opacity
            assert ((panel - color).abs().amax(-1) < 0.02).sum() > 20, name


def test_fused_sgd_is_ruined_with_torchs_scaler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SEEDS", 4)
    monkeypatch.setattr(demo, "SGD_STEPS", 4)
    losses = demo._fused_sgd(torch.device("cpu"), 0)
    ours, theirs = losses["ampfast.GradScaler"], losses["torch.amp.GradScaler"]
    assert all(math.isfinite(curve[-1]) for curve in ours)
    if all(math.isfinite(curve[-1]) for curve in theirs):
        print(f"torch {torch.__version__} survives it, too")
    assert [curve[:2] for curve in ours] == [curve[:2] for curve in theirs]


@pytest.mark.sweep
@pytest.mark.slow
def test_bad_batches_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BAD_STEPS": 100, "INFINITE": 98}.items():
        monkeypatch.setattr(demo, name, value)
    curves, skipped = demo._bad_batches(torch.device("cpu"), 0)
    clean, clipped, guarded = curves.values()
    assert skipped == [80, 81, 82, 83, 84, 98]
    assert clean[:20] == clipped[:20]
    assert math.isnan(clipped[-1])
    assert guarded[-1] < 1.5 * clean[-1]


class InverseOneBitOff(ampfast.GradScaler):
    """Unscales with the inverse scale, off by one bit."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        inv_scale = torch.nextafter(inv_scale, torch.zeros_like(inv_scale))
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


class LastBitWrong(ampfast.GradScaler):
    """Changes the last bit of one parameter in the last step, too late for any loss."""

    calls = 0

    def update(self, new_scale=None) -> None:
        super().update(new_scale)
        self.calls += 1

    def step(self, optimizer, *args, **kwargs):
        result = super().step(optimizer, *args, **kwargs)
        if self.calls == STEPS - 1:
            bits = optimizer.param_groups[0]["params"][0].detach().view(torch.int32)
            bits.view(-1)[0] ^= 1
        return result


class WrongFusedUpdate(ampfast.GradScaler):
    """step_and_update forgets to update."""

    def step_and_update(self, *optimizers):
        results = [self.step(optimizer) for optimizer in optimizers]
        self.update(self.get_scale())
        return results


@pytest.mark.parametrize(
    ("scaler", "column", "wrong", "right"),
    [
        (InverseOneBitOff, 1, ["losses", "final parameters"], ["scale traces", "skipped steps"]),
        (LastBitWrong, 1, ["final parameters"], ["losses", "scale traces", "skipped steps"]),
        (WrongFusedUpdate, 2, COMPARED, []),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_runs_that_differ(
    scaler: type,
    column: int,
    wrong: list[str],
    right: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ampfast, "GradScaler", scaler)
    path = tmp_path / "picture.png"
    assert run(path) == 1
    output = capsys.readouterr().out
    table = table_of(output)
    for what in wrong:
        assert table[f"{what} equal bit for bit"][column].startswith("no")
    for what in right:
        assert table[f"{what} equal bit for bit"][column] == "yes"
    if scaler is WrongFusedUpdate:
        assert all(table[f"{what} equal bit for bit"][1] == "yes" for what in COMPARED)
    verdict = " ".join(output[output.index("The runs DIFFER: ") :].split())
    assert f"{LABELS[column]} has other {wrong[0]}" in verdict
    assert image.imread(path).size > 0


class Clock:
    """Clock that only the test advances."""

    def __init__(self) -> None:
        self.milliseconds = 0

    def perf_counter_ns(self) -> int:
        return self.milliseconds * 1_000_000


class Slow(torch.amp.GradScaler):
    """Takes 20 ms in each of its calls."""

    clock: Clock

    def scale(self, outputs):
        self.clock.milliseconds += 20
        return super().scale(outputs)

    def step(self, optimizer, *args, **kwargs):
        self.clock.milliseconds += 20
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None) -> None:
        self.clock.milliseconds += 20
        super().update(new_scale)


def test_scaler_time_has_all_of_the_scaler_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()

    def slow_step(self: object, closure: None = None) -> None:
        clock.milliseconds += 100

    monkeypatch.setattr(demo, "time", clock)
    monkeypatch.setattr(Slow, "clock", clock, raising=False)
    monkeypatch.setattr(torch.optim.AdamW, "step", slow_step)
    model = torch.nn.Linear(4, 2)
    inputs, targets = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    device = torch.device("cpu")
    quick = demo.Run("quick", model, torch.amp.GradScaler("cpu"), device)
    slow = demo.Run("slow", model, Slow("cpu"), device)
    for _ in range(3):
        quick.train_step(inputs, targets)
        slow.train_step(inputs, targets)
    assert slow.scaler_us() == 60_000
    assert quick.scaler_us() == 0
    assert slow.skipped == quick.skipped == [False] * 3


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(
    ("module", "package"),
    [("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")],
)
def test_missing_package(
    module: str,
    package: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert run(tmp_path / "picture.png") == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == f"ampfast demo: cannot import {package}; run: pip install {package}\n"


@pytest.mark.usefixtures("no_training")
def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "missing" / "picture.png"):
        assert run(path) == 2
        errors = capsys.readouterr().err
        assert errors.startswith(f"ampfast demo: cannot write {path}: ")
        assert errors.count("\n") == 1


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta"])
def test_device_that_cannot_be_used(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "picture.png"
    assert demo.run(STEPS, device, 0, path) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"ampfast demo: device '{device}' cannot be used: ")
    assert errors.count("\n") == 1
    assert not path.exists()
