"""`python -m ampfast compare`: three runs of a program, and what is said about them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.processes import python_in

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
    "import ampfast, torch\n" + ONE.replace("torch.amp.", "ampfast."): "uses ampfast's scaler",
    ONE + "print('its output'); 1 / 0": "failed with torch's scaler, with exit code 1; ",
    ONE + "if hasattr(scaler, 'stats'): 1 / 0": "failed with ampfast's scaler, ",
}


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Compares a program, as train.py, from the shell."""
    return lambda program, *arguments: python_in(
        tmp_path, program, "-m", "ampfast", "compare", *arguments
    )


def test_several_scalers_and_optimizers_with_accumulation(compared: Any) -> None:
    done = compared(GAN, "train.py", "3", "--steps", "7", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["schema"] == compare.SCHEMA
    assert facts["program"] == ["train.py", "3"]
    assert facts["verdict"] == "equal"
    # The program goes no further than asked.
    assert facts["torch_again"] == {"steps": 7, "first_difference": None}
    generating, judging = facts["scalers"]
    assert generating["first_differences"] == judging["first_differences"] == {}
    for side in ("torch", "ampfast"):
        assert [one[side]["steps"] for one in (generating, judging)] == [7, 6]
        assert 0 < generating[side]["skipped"] < 7
        assert judging[side]["skipped"] == 0
        assert generating[side]["final_scale"] < 2.0**126
        assert 0 < judging[side]["medians"]["share"] < 1
    assert "sentinel" not in done.stdout + done.stderr


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("program", WRONG, ids=WRONG.get)
def test_what_cannot_be_compared(compared: Any, program: str) -> None:
    done = compared(program, "train.py", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    last = next(line for line in done.stderr.splitlines() if "train.py " in line)
    assert last.startswith(f"ampfast compare: train.py {WRONG[program]}")
    if "1 / 0" in program:
        assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
        assert ("its output\n" in done.stderr) is ("its output" in program)


@pytest.mark.sweep
@pytest.mark.slow
def test_difference_with_its_step_and_picture(compared: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    change = "\n    if step == 25 and hasattr(scaler, 'stats'): model.bias.data += 1"
    done = compared(ONE + change, "--plot", "picture.png", "train.py", "0")
    assert done.returncode == 1, done.stderr
    assert "losses: differ from step 27 on: torch " in done.stdout
    assert "scales: equal bit for bit\nskips: equal bit for bit" in done.stdout
    assert "of 27 steps, equals the first.\nThe training DIFFERS" in done.stdout
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.sweep
@pytest.mark.slow
def test_ranks_of_torchrun_meet_in_each_run(tmp_path: Path) -> None:
    group = "\ntorch.distributed.init_process_group('gloo')\nmodel = torch.nn.parallel."
    program = ONE.replace("\none =", f"{group}DistributedDataParallel(model)\none =")
    program += "torch.distributed.destroy_process_group()\n"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = python_in(tmp_path, program, *torchrun, "-m", "ampfast", "compare", "train.py", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The training is equal bit for bit.") == 1


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
        "waits": None,
        "medians": {"own": own, "step": 1000.0, "share": own / 1000},
        "times": {"own": [own] * steps, "step": [], "gpu": []},
        "values": values,
        **changed,
    }


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[int | None]]]:
    """Exit code and text for the records of three runs, with the steps that were asked for."""

    def run(*records: list[dict[str, Any]], arguments: tuple[str, ...] = ()) -> Any:
        asked = []

        def recorded(called: list[str], number: int, stop: int | None) -> Any:
            asked.append(stop)
            return [*records, records[1]][number - 1]  # unless given, ours repeats itself

        monkeypatch.setattr(compare, "_records", recorded)
        code = main(["compare", "train.py", *arguments])
        return code, capsys.readouterr().out, asked

    return run


def of_gpu(gpu: float, waits: int) -> dict[str, Any]:
    medians = {"own": 50.0, "gpu": gpu, "step": 1000.0, "share": 0.05}
    return record([1.0] * 9, medians=medians, waits=waits)


NAN, NINE, FORTY, ONES = float("nan"), [1.0] * 9, [1.0] * 40, [1.0] * 3
BUSY = {"own": 9.0, "step": 4500.0, "share": 0.01}
QUICK, SLOW, EQUAL = record(NINE, own=15.0), record(NINE, own=60.0), "is equal bit for bit."
TELL = "The times tell nothing: without the scaler, the steps of the runs differ 4.6 times"
SAYS, NO_MORE = "So a difference from ampfast says nothing.", [[0, 1.0], [1, 1.0]]
LATER, BROKEN = record([*([1.0] * 30), *([2.0] * 10)]), record([*FORTY[:24], *([3.0] * 16)])
TWO, THREE, OF_NAN, OF_FIVE = (record([1.0, each]) for each in (2.0, 3.0, NAN, 5.0))


class Said(NamedTuple):
    """Records of torch's run and ours, exit code, texts, later runs, and the steps asked for."""

    theirs: dict[str, Any]
    ours: dict[str, Any]
    code: int
    texts: list[str]
    later: tuple[dict[str, Any], ...] = ()
    asked: tuple[int | None, ...] = (None, None)


WORSE = "torch's became NaN, ampfast's did not"
SAID = {
    "nan": Said(OF_NAN, OF_NAN, 0, [EQUAL, "losses: equal bit"], (), (None,) * 3),
    "zeros": Said(record([0.0]), record([-0.0]), 1, ["1 on: torch 0.0, ampfast -0.0, apart by 0"]),
    "nan of torch, which repeats": Said(
        OF_NAN, TWO, 1, [f"torch nan, ampfast 2.0: {WORSE}", f"They differ because {WORSE}."]
    ),
    "nan of torch, which does not": Said(
        OF_NAN, TWO, 0, ["says nothing. Only the NaN does: fused SGD reads unini"], (OF_FIVE,)
    ),
    "torch that breaks later": Said(record(FORTY), BROKEN, 1, [], (LATER,), (None, None, 25, 25)),
    "torch that breaks before": Said(
        record(FORTY),
        record([*FORTY[:35], *([3.0] * 5)]),
        *(0, ["differs from the first at step 31"], (LATER,)),
    ),
    # Of a program whose runs alternate, torch's have both odd places.
    "ampfast, which does not repeat": Said(
        TWO, THREE, 0, ["One with ampfast's differs from its first at step 2.", SAYS], (TWO, TWO)
    ),
    "noise": Said(
        *(record(NINE), record(NINE), 0, ["(torch's again: 1234)"]),
        (record([1.0], medians={**BUSY, "step": 1234.4}),),
    ),
    "busy": Said(QUICK, QUICK, 0, [TELL], (record([1.0], medians=BUSY),)),
    "ours busy": Said(QUICK, record(NINE, medians=BUSY), 0, [TELL]),
    "ends earlier": Said(record(NINE), record(NINE[1:]), 1, []),
    "no losses": Said(
        *([record(ONES, losses=[])] * 2), 0, ["no losses seen: scale() was given none"]
    ),
    "slower": Said(QUICK, SLOW, 0, ["4.00x slower", "it does not matter"]),
    "faster": Said(SLOW, QUICK, 0, ["4.00x faster"]),
    "gpu": Said(
        *(of_gpu(20.0, 1), of_gpu(10.0, 0), 0),
        ["the same on the GPU, us 20.0 10.0 2.00x faster", "waits of the host a step 1 0"],
    ),
    "weights of a shorter run": Said(
        *(record(FORTY), record(FORTY), 0, ["of 20 steps, equals the first."]),
        *((record(FORTY[:20], weights=[[19, 7]]),), (None, None, 20)),
    ),
    "last weights": Said(
        *(record(FORTY), record(FORTY, weights=[[39, 7]]), 1),
        *(["weights: differ at the end, step 40"], (), (None,) * 4),
    ),
    "more": Said(
        *(record(ONES), record(ONES, losses=[*NO_MORE, [1, 1.0], [2, 1.0]]), 1),
        ["losses: differ in number at step 2: torch none, ampfast 1.0"],
    ),
    "fewer": Said(
        *(record(ONES), record(ONES, losses=NO_MORE), 1),
        ["losses: differ in number at step 3: torch 1.0, ampfast none"],
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said(say: Any, name: str) -> None:
    theirs, ours, code, texts, later, asked = SAID[name]
    found, text, steps = say(*([each] for each in (theirs, ours, *(later or (theirs,)))))
    words = " ".join(text.split())
    assert found == code
    for each in texts:
        assert each in words
    assert tuple(steps[: len(asked)]) == asked
    assert ("The training DIFFERS" in text) is (code == 1)
    if TELL in texts or name == "faster":
        assert not any(word in text for word in ("does not matter", "slower"))


def test_options_behind_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(compare, "run", lambda **options: given.update(options) or 0)
    for arguments, rest, steps in (
        (["--lr", "1", "--steps", "5"], ["--lr", "1"], 5),
        (["--steps=5", "--ste", "4", "x"], ["--ste", "4", "x"], 5),
        (["--lr", "--", "--steps", "5", "--", "y"], ["--lr", "--steps", "5", "--", "y"], None),
        (["--", "--steps", "5"], ["--steps", "5"], None),
    ):
        assert main(["compare", "--json", "-m", "train", *arguments]) == 0
        more = {"steps": steps, "as_json": True, "plot": None}
        assert given == {"program": "train", "arguments": rest, "is_module": True, **more}


UNKNOWN = "usage: python -m ampfast {} .*unrecognized arguments: --no-such-option\n"


def test_options_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["run", "--no-such-option", "train.py"], UNKNOWN.format("run")),
        (["info", "--no-such-option"], UNKNOWN.format("info")),
        (["compare", "--no-such-option", "train.py"], UNKNOWN.format("compare")),
        (["compare", "--steps", "0", "train.py"], "must be 1 or more, got 0"),
        (["compare", "no-such-file.py", "--steps", "3"], "its own options behind SCRIPT, too"),
        (["compare", "train.py", "--plot", "missing/p.png"], "cannot write"),
        (["compare", "--plot", "train.py", "config.py"], "cannot draw a .py file"),
        (["run", "--log", "missing/log.jsonl", "train.py"], "cannot write"),
        (["run", "--log", ".", "train.py"], "cannot write"),
        (["run", "--skip-above", "nan", "train.py"], "NORM must be at least 0, got nan"),
        (["run", "--skip-above", "-1", "train.py"], "NORM must be at least 0, got -1"),
    ):
        try:
            code = main(arguments)
        except SystemExit as refused:
            code = refused.code
        assert code == 2
        assert re.search(told, capsys.readouterr().err, re.DOTALL)
