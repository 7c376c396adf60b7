"""`python -m ampfast compare`: three runs of a program, and what is said about them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.processes import ROOT

from ampfast.__main__ import main
from ampfast.cli import compare

SETUP = """
import sys, torch
torch.manual_seed(int(sys.argv[1]))
torch.set_num_threads(1)
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)
"""
# Two scalers, one of them with two optimizers, and two backward passes for each step.
GAN = (
    SETUP
    + """
left, right, judge = (torch.nn.Linear(4, 4) for _ in range(3))
optimizers = [optimizer(model) for model in (left, right, judge)]
generating, judging = (torch.amp.GradScaler("cpu", init_scale=2.0**b) for b in (126, 16))
for step in range(9):
    made = right(left(torch.randn(3, 4)))
    generating.scale(64 * judge(made).square().mean()).backward()
    for part in optimizers[:2]:
        generating.unscale_(part)
        generating.step(part)
    generating.update()
    optimizers[2].zero_grad()
    losses = [judge(torch.randn(3, 4)).abs().mean() / 2 for _ in range(2)]
    for loss in judging.scale(losses):
        loss.backward()
    judging.step(optimizers[2])
    judging.update()
    for part in optimizers:
        part.zero_grad()
print("sentinel" * 3)
"""
)
ONE = (
    SETUP
    + """
model = torch.nn.Linear(4, 4)
one = optimizer(model)
scaler = torch.amp.GradScaler("cpu")
for step in range(30):
    one.zero_grad()
    scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
    scaler.step(one)
    scaler.update()
"""
)
# By program, what is said of it.
WRONG = {
    "print('nothing')": "used no gradient scaler: there is nothing to compare",
    ONE.replace('"cpu"', '"cpu", enabled=False'): "has nothing to compare: the gradient scaler is",
    ONE + "import os\nos._exit(0)": "ended without Python's exit, as by os._exit()",
    # Said at its first update, not at its end.
    ONE.replace("torch.amp.", "__import__('ampfast').") + "exit(3)": "uses ampfast's scaler",
    ONE + "print('its output'); 1 / 0": "failed with torch's scaler, with exit code 1; ",
    ONE + "if hasattr(scaler, 'stats'): 1 / 0": "failed with ampfast's scaler, ",
}


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: Any, capfd: Any) -> Callable[..., Any]:
    """Compares a program, as train.py; returns the exit code, and what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(program: str, *arguments: str) -> Any:
        Path("train.py").write_text(program)
        code = main(["compare", *arguments])
        return SimpleNamespace(returncode=code, **capfd.readouterr()._asdict())

    return run


def test_several_scalers_and_optimizers_with_accumulation(
    compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, kept = compare._records, []
    keep = lambda *given: kept.append(records(*given)) or kept[-1]  # noqa: E731
    monkeypatch.setattr(compare, "_records", keep)
    done = compared(GAN, "--steps", "7", "train.py", "3")
    assert done.returncode == 0, done.err
    assert "equals the first.\nThe training is equal bit for bit." in done.out
    assert "scaler 2\n" in done.out
    for generating, judging in kept:
        # The program goes no further than asked.
        assert [one["steps"] for one in (generating, judging)] == [7, 6]
        assert 0 < generating["skipped"] < 7
        assert judging["skipped"] == 0
        assert generating["final_scale"] < 2.0**126
        assert judging["medians"]["share"] > 0
    assert "sentinel" not in done.out + done.err


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("program", WRONG, ids=WRONG.get)
def test_what_cannot_be_compared(compared: Any, program: str) -> None:
    done = compared(program, "train.py", "0")
    assert done.returncode == 2
    assert done.out == ""
    last = next(line for line in done.err.splitlines() if "train.py " in line)
    assert last.startswith(f"ampfast compare: train.py {WRONG[program]}")
    if "1 / 0" in program:
        assert done.err.endswith("ZeroDivisionError: division by zero\n")
        assert ("its output\n" in done.err) is ("its output" in program)


@pytest.mark.sweep
@pytest.mark.slow
def test_difference_with_its_step(compared: Any) -> None:
    change = "\n    if step == 25 and hasattr(scaler, 'stats'): model.bias.data += 1"
    done = compared(ONE + change, "train.py", "0")
    assert done.returncode == 1, done.err
    assert "losses: differ from step 27 on: torch " in done.out
    assert "scales: equal bit for bit\nskips: equal bit for bit" in done.out
    assert "scaler equals the first.\nThe training DIFFERS" in done.out


def test_ranks_are_refused(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["compare", "train.py"]) == 2
    assert "train.py is started by torchrun: compare runs one process" in capsys.readouterr().err


# What is said, from records as `run` writes them.


def record(losses: list[float], /, own: float = 50.0, **changed: Any) -> dict[str, Any]:
    """Of a run with these losses; `changed` are kinds of values, or other entries."""
    steps = len(losses)
    values = {
        "losses": [[step, loss] for step, loss in enumerate(losses)],
        "scales": [[step, 65536.0] for step in range(steps)],
        "skips": [[step, 0.0] for step in range(steps)],
        "weights": [[steps - 1, 42]],
    }
    values |= {name: changed.pop(name) for name in values.keys() & changed.keys()}
    return {
        "is_ampfast": False,
        "final_scale": 65536.0,
        "steps": steps,
        "skipped": 0,
        "medians": {"own": own, "step": 1000.0, "share": own / 1000},
        "values": values,
        **changed,
    }


NAN, NINE, FORTY, ONES = float("nan"), [1.0] * 9, [1.0] * 40, [1.0] * 3
QUICK, SLOW, EQUAL = record(NINE, own=15.0), record(NINE, own=60.0), "is equal bit for bit."
SAYS, NO_MORE = "So a difference from ampfast says nothing.", [[0, 1.0], [1, 1.0]]
LATER, BROKEN = record([*([1.0] * 30), *([2.0] * 10)]), record([*FORTY[:24], *([3.0] * 16)])
TWO, OF_NAN, OF_FIVE = (record([1.0, each]) for each in (2.0, NAN, 5.0))


class Said(NamedTuple):
    """Records of torch's run and ours, exit code, texts, and torch's run again."""

    theirs: dict[str, Any]
    ours: dict[str, Any]
    code: int
    texts: list[str]
    again: dict[str, Any] | None = None


SAID = {
    "nan": Said(OF_NAN, OF_NAN, 0, [EQUAL, "losses: equal bit"]),
    "zeros": Said(record([0.0]), record([-0.0]), 1, ["1 on: torch 0.0, ampfast -0.0"]),
    "nan of torch, which repeats": Said(OF_NAN, TWO, 1, ["2 on: torch nan, ampfast 2.0 scales"]),
    "nan of torch, which does not": Said(OF_NAN, TWO, 0, [SAYS], OF_FIVE),
    "torch that breaks later": Said(record(FORTY), BROKEN, 1, ["from the first at step 31"], LATER),
    "torch that breaks before": Said(
        record(FORTY), record([*FORTY[:35], *([3.0] * 5)]), 0, ["first at step 31", SAYS], LATER
    ),
    "equal, but not repeatable": Said(TWO, TWO, 0, [EQUAL, "from the first at step 2"], OF_FIVE),
    "ends earlier": Said(record(NINE), record(NINE[1:]), 1, []),
    "no losses": Said(*([record(ONES, losses=[])] * 2), 0, ["losses: none seen"]),
    "slower": Said(QUICK, SLOW, 0, ["4.00x slower", "(torch's again: 1000)"]),
    "faster": Said(SLOW, QUICK, 0, ["4.00x faster"]),
    "last weights": Said(
        record(FORTY),
        record(FORTY, weights=[[39, 7]]),
        1,
        ["weights: differ from step 40 on: torch 42"],
    ),
    "more": Said(
        *(record(ONES), record(ONES, losses=[*NO_MORE, [1, 1.0], [2, 1.0]]), 1),
        ["losses: differ from step 2 on: torch none, ampfast 1.0"],
    ),
    "fewer": Said(
        *(record(ONES), record(ONES, losses=NO_MORE), 1),
        ["losses: differ from step 3 on: torch 1.0, ampfast none"],
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said(name: str, monkeypatch: Any, capsys: Any) -> None:
    theirs, ours, code, texts, again = SAID[name]
    runs = [[theirs], [ours], [again or theirs]]
    monkeypatch.setattr(compare, "_records", lambda called, number, stop: runs[number - 1])
    assert main(["compare", "train.py"]) == code
    text = capsys.readouterr().out
    words = " ".join(text.split())
    for each in texts:
        assert each in words
    assert ("The training DIFFERS" in text) is (code == 1)


def test_options_behind_the_script_are_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(compare, "run", lambda **options: given.update(options) or 0)
    for before, behind, rest in (
        ([], ["--lr", "1", "--steps", "9"], ["--lr", "1", "--steps", "9"]),
        (["--"], ["--lr", "--", "y"], ["--lr", "--", "y"]),
    ):
        assert main(["compare", "--steps", "5", "-m", *before, "train", *behind]) == 0
        assert given == {"program": "train", "arguments": rest, "is_module": True, "steps": 5}


UNKNOWN = "unrecognized arguments: --no-such-option\n"


def test_options_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["run", "--no-such-option", "train.py"], UNKNOWN),
        (["info", "--no-such-option"], UNKNOWN),
        (["compare", "--no-such-option", "train.py"], UNKNOWN),
        (["compare", "--steps", "0", "train.py"], "must be 1 or more, got 0"),
        *(
            (["run", "--skip-above", wrong, "train.py"], r"must be a norm such as 20, or sigmas:6")
            for wrong in ("much", "-1", "nan", "sigmas", "sigmas:x", "sigmas:6:1", "sigmas:6:8:2")
        ),
    ):
        try:
            code = main(arguments)
        except SystemExit as refused:
            code = refused.code
        assert code == 2
        assert re.search(told, capsys.readouterr().err, re.DOTALL)
