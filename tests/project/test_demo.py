"""The demo: equal runs and different runs."""

import re
from pathlib import Path

import pytest
import torch
from support.processes import ROOT, module_at

import ampfast

pytest.importorskip("sklearn", reason="the demo needs scikit-learn")
image = pytest.importorskip("matplotlib.image", reason="the demo needs matplotlib")
colors = pytest.importorskip("matplotlib.colors", reason="the demo needs matplotlib")

demo = module_at(ROOT / "examples" / "demo.py")

STEPS = 16
LABELS = ["torch.amp.GradScaler", "ampfast.GradScaler", "ampfast step_and_update"]
COMPARED = ["losses", "scale traces", "skipped steps", "final parameters"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the scale grow within a few steps; shortens the other two trainings."""
    for name, value in {"GROWTH_INTERVAL": 4, "SEEDS": 1, "SGD_STEPS": 3, "BAD_STEPS": 4}.items():
        monkeypatch.setattr(demo, name, value)


def table_of(text: str) -> dict[str, list[str]]:
    """Cells of the demo's table by row name."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert LABELS in rows
    return {row[0]: row[1:] for row in rows if len(row) == 4}


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    assert demo.run(STEPS, "cpu", 0, picture) == 0
    output, errors = capsys.readouterr()
    table = table_of(output)
    assert len(set(table["test accuracy"])) == len(set(table["skipped steps"])) == 1
    skipped, _, steps = table["skipped steps"][0].partition(" of ")
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


def test_runs_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ampfast, "GradScaler", InverseOneBitOff)
    path = tmp_path / "picture.png"
    assert demo.run(STEPS, "cpu", 0, path) == 1
    output = capsys.readouterr().out
    for what in COMPARED:
        expected = "no" if what in ("losses", "final parameters") else "yes"
        assert table_of(output)[f"{what} equal bit for bit"][1].startswith(expected)
    verdict = " ".join(output[output.index("The runs DIFFER: ") :].split())
    assert f"{LABELS[1]} has other losses" in verdict
    assert image.imread(path).size > 0
