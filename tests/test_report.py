"""Logs and plots of statistics and history."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from ampfast import GradScaler, report
from ampfast.report import History, ScalerStats

STATS = ScalerStats(10, 2, 1, 2, 0, 4.0, 3, 1)


def history(norms: bool = True) -> History:
    count = 40
    skipped = torch.zeros(count, dtype=torch.bool)
    skipped[[7, 8, 12, 30]] = True
    spiked = torch.arange(count) == 12
    has_norm = torch.arange(count) % 2 == 0 if norms else torch.zeros(count, dtype=torch.bool)
    norm = torch.rand(count, generator=torch.Generator().manual_seed(1))
    norm[8] = math.inf
    return History(
        step=torch.arange(100, 100 + count),
        scale=2.0 ** (16 - (skipped & ~spiked).cumsum(0)),
        skipped=skipped,
        grad_norm=norm.masked_fill(~has_norm, math.nan),
        has_norm=has_norm,
        spiked=spiked,
    )


def test_figures_of_a_scale_of_zero() -> None:
    with pytest.warns(UserWarning, match="The scale is 0"):
        assert "log2_scale" not in report.figures(GradScaler("cpu", init_scale=0.0))


@pytest.mark.parametrize("norms", [False, True])
def test_plot(tmp_path, norms: bool) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "scale.png"
    figure = report.plot(history(norms), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    scale, *others = figure.axes
    assert len(others) == norms
    line, nonfinite, spikes = scale.get_lines()
    assert line.get_xdata()[0] == 100 and line.get_ydata()[-1] == 2.0**13
    assert nonfinite.get_xdata().tolist() == [107, 108, 130]
    assert spikes.get_xdata().tolist() == [112]
    labels = [text.get_text() for text in scale.get_legend().get_texts()]
    assert labels == ["scale", "inf or NaN: 3 of 40", "spikes: 1 of 40"]
    if norms:
        line, lost, spikes = others[0].get_lines()
        assert len(line.get_xdata()) == 20
        assert math.isnan(line.get_ydata()[4])  # a gap where it is not finite
        assert lost.get_xdata().tolist() == [108]
        assert spikes.get_xdata().tolist() == [112]


def test_plot_of_nothing_and_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no step was taken"):
        report.plot(GradScaler("cpu").history())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="matplotlib"):
        report.plot(history())
