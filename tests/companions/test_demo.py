"""The demo: equal runs, different runs, and every reason not to start."""

import importlib.util
import re
import sys
from collections.abc import Iterator
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


def table_of(text: str) -> dict[str, list[str]]:
    """Cells of the demo's table by row name."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4} | {
        "header": next(row for row in rows if row == LABELS)
    }


def run(path: Path, steps: int = STEPS, seed: int = 0) -> int:
    """Runs the demo on the CPU."""
    return demo.run(steps, "cpu", seed, path)


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    assert run(picture) == 0
    output, errors = capsys.readouterr()
    table = table_of(output)
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
    for text in ("ampfast's 0.", "All runs are equal bit for bit", str(picture)):
        assert text in output
    assert f"{STEPS}/{STEPS}" in errors
    assert image.imread(picture).shape[1] >= 1200


class InverseOneBitOff(ampfast.GradScaler):
    """Unscales with the inverse scale, off by one bit."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        inv_scale = torch.nextafter(inv_scale, torch.zeros_like(inv_scale))
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


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


@pytest.mark.parametrize(
    ("missing", "device", "name", "told"),
    [
        ("sklearn", "cpu", "p.png", "cannot import scikit-learn; run: pip install scikit-learn\n"),
        ("matplotlib", "cpu", "p.png", "cannot import matplotlib; run: pip install matplotlib\n"),
        (None, "cpu", "missing/p.png", "cannot write {}: "),
        (None, "cpu", ".", "cannot write {}: "),
        (None, "cuda:99", "p.png", "device 'cuda:99' cannot be used: "),
        (None, "nonsense", "p.png", "device 'nonsense' cannot be used: "),
        (None, "meta", "p.png", "device 'meta' cannot be used: "),
    ],
)
def test_reasons_not_to_start(
    missing: str | None,
    device: str,
    name: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "_train", lambda *_: pytest.fail("the demo began to train"))
    if missing is not None:
        monkeypatch.setitem(sys.modules, missing, None)
    assert demo.run(STEPS, device, 0, tmp_path / name) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith(f"ampfast demo: {told.format(tmp_path / name)}")
    assert errors.count("\n") == 1
