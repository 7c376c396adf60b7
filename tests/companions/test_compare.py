"""`python -m ampfast compare`: three runs of a program, and what is said about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampfast import compare
from ampfast.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
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
    ONE.replace(
        '"cpu"', '"cpu", enabled=False'
    ): "has nothing to compare: the gradient scaler is d",
    ONE.replace("scaler.update()", "").replace(
        "30", "1"
    ): "has nothing to compare: the gradient scaler was never",
    ONE + "import os\nos._exit(0)": "ended without Python's exit, as by os._exit()",
    "import ampfast, torch\n" + ONE.replace("torch.amp.", "ampfast."): "uses ampfast's scaler",
    ONE + "print('its output'); 1 / 0": "failed with torch's scaler, with exit code 1; ",
    ONE + "if hasattr(scaler, 'stats'): 1 / 0": "failed with ampfast's scaler, ",
}


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Compares a program, as train.py, from the shell."""

    def run(program: str, *arguments: str, launcher: tuple[str, ...] = (), text: str = "") -> Any:
        (tmp_path / "train.py").write_text(program)
        return subprocess.run(
            [sys.executable, *launcher, "-m", "ampfast", "compare", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            input=text,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


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
def test_two_ranks(compared: Any) -> None:
    rank = "import torch; torch.distributed.init_process_group('gloo')\n"
    ddp = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))"
    program = rank + ONE.replace("model = torch.nn.Linear(4, 4)", ddp)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = compared(program, "train.py", "1", "--steps", "9", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The training is equal bit for bit.") == 1
    assert "0 of 9" in done.stdout


# What is said, from records as `run` writes them.


def record(losses: list[float], own: float = 50.0, **changed: Any) -> dict[str, Any]:
    steps = len(losses)
    return {
        "is_ampfast": False,
        "final_scale": 65536.0,
        "steps": steps,
        "skipped": 0,
        "waits": None,
        "threads": [1],
        "medians": {"own": own, "step": 1000.0, "share": own / 1000},
        "times": {"own": [own] * steps, "step": [], "gpu": []},
        "values": {
            "losses": [[step, loss] for step, loss in enumerate(losses)],
            "elements": [],
            "scales": [[step, 65536.0] for step in range(steps)],
            "skips": [[step, 0.0] for step in range(steps)],
            "weights": [[steps - 1, 42]],
        },
        **changed,
    }


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[int | None]]]:
    """Exit code and text for the records of three runs, with the steps that were asked for."""

    def run(*records: list[dict[str, Any]], arguments: tuple[str, ...] = ()) -> Any:
        asked = []

        def recorded(called: list[str], number: int, stop: int | None, _: Any) -> Any:
            asked.append(stop)
            return [*records, records[1]][number - 1]  # unless given, ours repeats itself

        monkeypatch.setattr(compare, "_records", recorded)
        code = main(["compare", "train.py", *arguments])
        return code, capsys.readouterr().out, asked

    return run


NAN = float("nan")


def test_equal_with_nan(say: Any) -> None:
    losses = [1.0, NAN, 0.0]
    code, text, asked = say(*[[record(losses)] for _ in range(3)])
    assert code == 0
    assert text.count("equal bit for bit") == 5
    assert asked == [None, None, None]


def test_zeros_of_either_sign_differ(say: Any) -> None:
    ours, theirs = record([1.0, -0.0]), record([1.0, 0.0])
    code, text, _ = say([theirs], [ours], [theirs])
    assert code == 1
    assert "losses: differ from step 2 on: torch 0.0, ampfast -0.0, apart by 0" in text


def test_nan_of_torch_is_said_even_if_it_does_not_repeat_itself(say: Any) -> None:
    ours, theirs, again = record([1.0, 2.0]), record([1.0, NAN]), record([1.0, 5.0])
    code, text, _ = say([theirs], [ours], [again])
    assert code == 0
    assert "says nothing.\nOnly the NaN does: fused SGD reads uninitialised memory" in text
    _, text, _ = say([again], [ours], [theirs])
    assert text.endswith("So a difference from ampfast says nothing.\n")


def test_options_are_refused_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--steps", "0", "train.py"])
    assert "must be 1 or more, got 0" in capsys.readouterr().err
    assert main(["compare", "no-such-file.py", "--steps", "3"]) == 2
    assert "takes its own options behind SCRIPT, too" in capsys.readouterr().err


def test_picture_that_cannot_be_written(say: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    with pytest.raises(SystemExit) as refused:
        say(arguments=("--plot", str(tmp_path / "missing" / "p.png")))
    assert refused.value.code == 2


def test_torch_that_breaks_later_does_not_excuse_a_difference(say: Any) -> None:
    torchs, again = [1.0] * 40, [*([1.0] * 30), *([2.0] * 10)]
    code, _, asked = say([record(torchs)], [record([*torchs[:24], *([3.0] * 16)])], [record(again)])
    assert code == 1
    assert asked[2:] == [25, 25]
    code, text, _ = say([record(torchs)], [record([*torchs[:35], *([3.0] * 5)])], [record(again)])
    assert code == 0
    assert "differs from the first at step 31" in text


def test_noise_of_a_step_is_that_of_a_second_run(say: Any) -> None:
    again = record([1.0], medians={"own": 9.0, "step": 1234.4, "share": 0.01})
    _, text, _ = say([record([1.0] * 9)], [record([1.0] * 9)], [again])
    [row] = [line.split() for line in text.splitlines() if line.startswith("a whole step, us")]
    assert row[4:] == ["1000", "1000", "(torch's", "again:", "1234)"]


def test_times_of_a_busy_machine_tell_nothing(say: Any) -> None:
    busy = record([1.0], medians={"own": 9.0, "step": 4500.0, "share": 0.01})
    quick = record([1.0] * 9, own=15.0)
    _, text, _ = say([quick], [quick], [busy])
    told = "The times tell nothing: without the scaler, the steps of the runs differ 4.6 times"
    assert text.startswith(told)
    assert not any(word in text for word in ("does not matter", "faster", "slower"))
    ours = record([1.0] * 9, medians={"own": 9.0, "step": 4500.0, "share": 0.01})
    _, text, _ = say([quick], [ours], [quick])
    assert told in text


def test_a_difference_by_a_nan_of_torch_says_so(say: Any) -> None:
    theirs = record([1.0, NAN])
    code, text, _ = say([theirs], [record([1.0, 2.0])], [theirs])
    assert code == 1
    assert "torch nan, ampfast 2.0: torch's became NaN, ampfast's did not" in text
    assert "They differ because torch's became NaN, ampfast's did not." in text


def test_one_that_ends_earlier_differs(say: Any) -> None:
    code, text, _ = say([record([1.0] * 4)], [record([1.0] * 3)], [record([1.0] * 4)])
    assert code == 1
    assert "DIFFERS" in text


def changed(name: str, values: list[list[Any]], steps: int = 3) -> dict[str, Any]:
    """Record with losses of 1, in which one kind of value is another."""
    one = record([1.0] * steps)
    one["values"][name] = values
    return one


@pytest.mark.parametrize(
    ("name", "theirs", "ours", "told"),
    [
        ("weights", [[2, 1]], [[2, 2]], "weights: differ at the end, step 3\n"),
        ("elements", [[1, 5]], [[1, 6]], "elements: differ in a loss of several, step 2\n"),
        (
            "losses",
            [[0, 1.0], [1, 1.0], [2, 1.0]],
            [[0, 1.0], [1, 1.0], [1, 1.0], [2, 1.0]],
            "losses: differ in number at step 2: torch none, ampfast 1.0\n",
        ),
        (
            "losses",
            [[0, 1.0], [1, 1.0], [2, 1.0]],
            [[0, 1.0], [1, 1.0]],
            "losses: differ in number at step 3: torch 1.0, ampfast none\n",
        ),
    ],
)
def test_what_only_one_run_has_is_a_difference(
    say: Any, name: str, theirs: list[Any], ours: list[Any], told: str
) -> None:
    torchs = changed(name, theirs)
    code, text, _ = say([torchs], [changed(name, ours)], [torchs])
    assert code == 1
    assert told in text
    assert "The training DIFFERS" in text
    code, text, _ = say([torchs], [torchs], [torchs])
    assert code == 0
    assert "The training is equal bit for bit." in text


def test_weights_of_a_shorter_run_are_not_compared(say: Any) -> None:
    theirs, again = record([1.0] * 40), changed("weights", [[19, 7]], 20)
    code, text, asked = say([theirs], [theirs], [again])
    assert asked == [None, None, 20]
    assert "of 20 steps, equals the first." in text
    ours = changed("weights", [[39, 7]], 40)
    code, _, asked = say([theirs], [ours], [theirs])
    assert (code, asked) == (1, [None] * 4)


def test_no_losses_are_said(say: Any) -> None:
    none = changed("losses", [])
    _, text, _ = say([none], [none], [none])
    assert "losses: no losses seen: scale() was given none\n" in text


def test_ampfasts_that_does_not_repeat_itself_is_not_blamed(say: Any) -> None:
    """Of a program whose runs alternate, torch's have both odd places."""
    theirs, other = record([1.0, 2.0]), record([1.0, 3.0])
    code, text, _ = say([theirs], [other], [theirs], [theirs])
    assert code == 0
    assert "One with ampfast's differs from its first at step 2." in text
    assert text.endswith("So a difference from ampfast says nothing.\n")


def in_threads(*losses: list[float]) -> list[dict[str, Any]]:
    """Records of as many threads, in the order in which they met their scalers."""
    return [record(each, threads=[number]) for number, each in enumerate(losses)]


@pytest.mark.parametrize("steps", [3, 30])
def test_threads_meet_their_scalers_in_any_order(say: Any, steps: int) -> None:
    one, two, three = [1.0] * steps, [1.0] * (steps - 1), [2.0] * steps
    theirs, again = in_threads(one, two, three), in_threads(two, three, one)
    ours = in_threads(three, one, two)
    code, text, _ = say(theirs, ours, again)
    assert code == 0
    assert text.count("equal bit for bit") == 13
    assert "equals the first." in text
    # What differs is beside what it is nearest to.
    changed = in_threads([*three[:-1], 5.0], one, two)
    code, text, _ = say(theirs, changed, again)
    assert code == 1
    [_, table] = text.split("scaler 3")
    assert f"losses: differ from step {steps} on: torch 2.0, ampfast 5.0" in table
    assert text.count("differ from") == 1


def test_threads_that_another_one_ends_are_compared_as_far_as_they_got(say: Any) -> None:
    theirs = in_threads([1.0, 2.0, 3.0, 4.0], [5.0, 6.0])
    ours, again = in_threads([5.0], [1.0, 2.0, 3.0, 4.0]), in_threads([1.0, 2.0, 3.0])
    ours[0]["values"]["weights"] = [[0, 7]]
    code, text, _ = say(theirs, ours, again, arguments=("--steps", "4"))
    assert code == 0
    assert "The training is equal bit for bit." in text
    assert text.count("weights: not compared: one thread's last step is not the others'\n") == 2
    assert "equals the first." in text
    ours[0]["values"]["losses"] = [[0, 7.0]]
    code, text, _ = say(theirs, ours, again, arguments=("--steps", "4"))
    assert code == 1
    assert "not compared" not in say(theirs, ours, again)[1]


# Losses in ways that are seen only as the program takes them, two threads, and what a run leaves.
WHOLE = (
    SETUP
    + """
import os, threading
def train(number):
    model = torch.nn.Linear(4, 4, device="meta").to_empty(device="cpu")
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.zeros_(model.bias)
    one = optimizer(model)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(9):
        one.zero_grad()
        loss = model(torch.full((3, 4), step / 9.0)).square()
        [scaled] = scaler.scale(outputs=(each for each in [loss]))
        scaled.sum().backward()
        scaler.step(one)
        scaler.update()
        log.write("a line\\n")
log = open(f"{os.getpid()}.log", "w")
log.write(sys.stdin.read())
threads = [threading.Thread(target=train, args=[number]) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
)


def test_generators_threads_input_and_files(compared: Any, tmp_path: Path) -> None:
    done = compared(WHOLE, "--json", "train.py", "1", text="typed\n")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["verdict"] == "equal"
    for scaler in facts["scalers"]:
        assert scaler["torch"]["losses"] == scaler["ampfast"]["losses"] == 9
    assert len(facts["scalers"]) == 2
    logs = [log.read_text() for log in tmp_path.glob("*.log")]
    assert len(logs) == 3
    assert all(log == "typed\n" + 18 * "a line\n" for log in logs)


@pytest.mark.sweep
@pytest.mark.slow
def test_the_last_step_is_compared(compared: Any) -> None:
    change = "\nif hasattr(scaler, 'stats'): model.bias.data[0] += 1e-6"
    done = compared(ONE + change, "train.py", "0")
    assert done.returncode == 1, done.stderr
    assert "losses: equal bit for bit" in done.stdout
    assert "weights: differ at the end, step 30" in done.stdout


def test_a_program_may_follow_two_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(compare, "run", lambda **options: given.update(options) or 0)
    assert main(["compare", "--steps", "5", "--", "train.py", "--lr", "1"]) == 0
    assert (given["program"], given["arguments"], given["steps"]) == ("train.py", ["--lr", "1"], 5)


def test_speed_is_said_as_it_is(say: Any) -> None:
    quick, slow = record([1.0] * 9, own=15.0), record([1.0] * 9, own=60.0)
    _, text, _ = say([quick], [slow], [quick])
    assert "4.00x slower" in text
    assert "1.50% of a step are the scaler's: for the speed of this program it does not" in text
    _, text, _ = say([slow], [quick], [slow])
    assert "4.00x faster" in text
    assert "does not matter" not in text


def test_gpu_has_times_and_waits_of_its_own(say: Any) -> None:
    medians = {"own": 50.0, "gpu": 20.0, "step": 1000.0, "share": 0.05}
    theirs = record([1.0] * 9, medians=medians, waits=1)
    ours = record([1.0] * 9, medians={**medians, "gpu": 10.0}, waits=0)
    _, text, _ = say([theirs], [ours], [theirs])
    lines = {line[:24].strip(): line[24:].split() for line in text.splitlines()}
    assert lines["the same on the GPU, us"] == ["20.0", "10.0", "2.00x", "faster"]
    assert lines["waits of the host a step"] == ["1", "0"]


@pytest.mark.parametrize(
    ("arguments", "rest", "steps"),
    [
        (["--lr", "1", "--steps", "5"], ["--lr", "1"], 5),
        (["--steps=5", "--ste", "4", "x"], ["--ste", "4", "x"], 5),
        (["--lr", "--", "--steps", "5", "--", "y"], ["--lr", "--steps", "5", "--", "y"], None),
        (["--", "--steps", "5"], ["--steps", "5"], None),
    ],
)
def test_options_behind_the_script(
    arguments: list[str], rest: list[str], steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(compare, "run", lambda **options: given.update(options) or 0)
    assert main(["compare", "--json", "-m", "train", *arguments]) == 0
    assert given == {
        "program": "train",
        "arguments": rest,
        "is_module": True,
        "steps": steps,
        "as_json": True,
        "plot": None,
    }


@pytest.mark.parametrize("command", ["run", "compare", "info"])
def test_unknown_option_shows_the_usage_of_its_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([command, "--no-such-option", "train.py"][: 2 + (command != "info")])
    assert refused.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"usage: python -m ampfast {command} ")
    assert "unrecognized arguments: --no-such-option\n" in errors
