"""`python -m ampfast check`: what it finds equal, and that it finds what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampfast import GradScaler
from ampfast.__main__ import main
from ampfast.cli import check


def test_nothing_differs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    printed = capsys.readouterr()
    assert printed.err.endswith("ampfast check: in an issue, paste all of the following\n")
    block = printed.out.splitlines()
    assert (block[0], *block[-2:]) == ("```text", "Nothing differs.", "```")
    starts = [line.split()[:4] for line in block]
    for name in ("cpu", "aten"):
        for dtype in ("float32", "float16", "bfloat16", "float64"):
            assert ["cpu", name, dtype, "equal"] in starts
        assert any(start[:2] == ["cpu", name] and start[2].isdecimal() for start in starts)
    [training] = [line for line in block if "a training of 40 steps in float16" in line]
    assert " 0 skipped" not in training


@pytest.mark.parametrize("wrong", ["value", "flag", "norm", "training", "backend"])
def test_what_is_not_equal_is_found(wrong: str, monkeypatch: Any, capsys: Any) -> None:
    found, told = check._by_torch, "DIFFERS"
    if wrong in ("value", "flag"):

        def other(*args: Any) -> Any:
            grads, flag = found(*args)
            grads[-1][0].neg_() if wrong == "value" else None
            return grads, flag is not (wrong == "flag")

        monkeypatch.setattr(check, "_by_torch", other)
    elif wrong == "norm":
        monkeypatch.setitem(check._NORM, torch.float32, 0.0)
    elif wrong == "training":
        monkeypatch.setattr(check, "_trained", lambda device, kind: [[id(kind)]] * 3)
    else:
        told = "FAILS: RuntimeError: no kernels"

        def fails(*_: Any) -> None:
            raise RuntimeError("no kernels\nat all")

        monkeypatch.setattr(GradScaler, "unscale_", fails)
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert told in out and "lines differ: please open an issue" in out
