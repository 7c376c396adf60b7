"""Figures of statistics and history."""

from __future__ import annotations

import pytest

from ampfast import GradScaler, report


def test_figures_of_a_scale_of_zero() -> None:
    with pytest.warns(UserWarning, match="The scale is 0"):
        assert "log2_scale" not in report.figures(GradScaler("cpu", init_scale=0.0))
