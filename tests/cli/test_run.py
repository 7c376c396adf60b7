"""`python -m ampfast run`: a program runs as without it, and a line about its scaler follows."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support.processes import python_in

from ampfast.__main__ import main
from ampfast.cli import scaler_clock

TRAIN = """
import torch
from torch.amp import GradScaler

torch.set_num_threads(1)
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler = GradScaler("cpu", init_scale=2.0**127)
for step in range(6):
    optimizer.zero_grad()
    scaler.scale((weight * 4 - step).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""
# A shell makes what it runs in the background ignore the signal.
INTERRUPTIBLE = "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
LINE = r"ampfast: 6 steps, [1-5] skipped, final scale \S+; "
LINE += r"the scaler's own time \d+\.\d us a step, \d+\.\d\d% of a whole step\n"

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(tmp_path: Path) -> Call:
    return partial(python_in, tmp_path)


SURROUNDINGS = '''"""Its docstring."""
import atexit, sys
print(sys.argv, sys.path[0], __name__, __file__, __spec__ and __spec__.name, __doc__)
print(sys.modules["__main__"].__dict__ is globals(), sorted(globals()))
atexit.register(lambda: print("at exit", sys.modules["__main__"].__dict__ is globals()))

def fail():
    raise ValueError("the program's own")
'''


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("fail()", 1),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('a text')", 1),
        (f"{INTERRUPTIBLE}; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("this is no Python", 1),
        ("import sys; sys.excepthook = lambda *error: print('my hook', error[1]); 1 / 0", 1),
        ("import os; pid = os.fork(); (pid or os._exit(0)); os.wait()", 0),
        ("import os, sys; pid = os.fork(); (pid or sys.exit(3)); print(os.wait()[1])", 0),
    ],
)
def test_every_end_is_as_without(python: Call, end: str, code: int) -> None:
    program = SURROUNDINGS + TRAIN + end
    plain, ours = (
        python(program, *start, "train.py", "--lr", "1", "-h")
        for start in ((), ("-m", "ampfast", "run"))
    )
    assert plain.returncode == ours.returncode == code
    # Python's loader and its empty annotations are not there.
    for name in ("'__annotations__', ", "'__loader__', ", "'__package__', "):
        plain.stdout, ours.stdout = (out.stdout.replace(name, "") for out in (plain, ours))
    assert ours.stdout == plain.stdout
    # A traceback begins with the frames of ampfast.
    own = plain.stderr.removeprefix("Traceback (most recent call last):\n")
    _, _, rest = ours.stderr.rpartition(own) if own else ("", "", ours.stderr)
    assert own in ours.stderr
    if "no Python" not in end:
        assert re.fullmatch(LINE, rest)


def test_a_module(python: Call) -> None:
    start = ("-m", "train", "some", "words")
    plain = python(SURROUNDINGS + TRAIN, *start)
    ours = python(SURROUNDINGS + TRAIN, "-m", "ampfast", "run", "--clip", *start)
    assert ours.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    assert ours.returncode == 0
    assert re.fullmatch(LINE, ours.stderr)


MISSING = {
    "print('nothing')": ["no gradient scaler in this process. bfloat16 and float32 need none: wi"],
    TRAIN.replace('"cpu"', '"cpu", enabled=False'): ["the gradient scaler is disabled, "],
    "import torch\nfor _ in range(9):\n    scaler = torch.amp.GradScaler('cpu')\n"
    "    scaler.scale(torch.ones(()))\n": [
        *["the gradient scaler was never updated"] * 4,
    ],
}


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("program", MISSING, ids=lambda program: MISSING[program][-1])
def test_what_is_missing_is_said(python: Call, program: str) -> None:
    done = python(program, "-m", "ampfast", "run", "train.py")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(MISSING[program])
    for line, told in zip(lines, MISSING[program], strict=True):
        assert told in line


def test_what_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "nowhere.py"):
        assert main(["run", str(path), "--help"]) == 2
        assert capsys.readouterr().err == f"ampfast: there is no script '{path}'\n"


@pytest.mark.sweep
@pytest.mark.slow
def test_scalers_get_arguments(python: Call) -> None:
    program = TRAIN.replace("* 4 - step", "/ 0") + "# it was to end before\nprint('reached')"
    options = ("--max-skips", "4", "--track", "overflow", "--skip-above", "9")
    done = python(program, "-m", "ampfast", "run", *options, "train.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert "FloatingPointError: 4 steps in a row were skipped, and max_skips is 4." in done.stderr
    assert "ampfast: 4 steps, 4 skipped, " in done.stderr
    # In the error, and behind the line at the end.
    assert done.stderr.count("\ngroup 0, parameter 0 ") == 2
    in_main = "def main():" + program.replace("\n", "\n    ") + "\nmain()\n"
    done = python(in_main, "-m", "ampfast", "run", "--track", "overflow", "train.py")
    assert "\ngroup 0, parameter 0 " in done.stderr, "the report on a deleted optimizer"
    program = TRAIN + "print(scaler.skip_above, torch.nn.utils.clip_grad_norm_.__module__)"
    done = python(program, "-m", "ampfast", "run", "--skip-above", "0.5", "--clip", "train.py")
    assert done.stdout.startswith("0.5 ampfast.")


GUARDED = """
import copy, math, sys, torch
torch.manual_seed(0)
plain, fused = models = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, fused=each is fused) for each in models]
models, optimizers = copy.deepcopy((models, optimizers))
schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
closing = [
    each(torch.nn.Linear(2, 2).parameters()) for each in (torch.optim.LBFGS, torch.optim.SGD)
]
BAD = {6: 1e4, 9: math.nan} if "bad" in sys.argv else {}
for step in range(12):
    for model, optimizer, schedule in zip(models, optimizers, schedules):
        optimizer.zero_grad()
        for _ in range(2):
            (model(torch.randn(8, 4)).square().mean() * BAD.get(step, 1)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = model.weight.detach().clone()
        optimizer.step(closure=None)
        schedule.step()
        print(step, torch.equal(before, model.weight), model.weight.sum().item().hex())
    [each.step(lambda: torch.ones(())) for each in closing]
"""


def test_steps_are_guarded_without_a_scaler(python: Call) -> None:
    guarded = ("-m", "ampfast", "run", "--guard", "--skip-above", "sigmas:6:4", "train.py")
    assert python(GUARDED, *guarded).stdout == python(GUARDED, "train.py").stdout
    done = python(GUARDED, *guarded[:-2], "sigmas:6:12", "train.py")
    assert ", 0 of them for their norm; spikes are compared once 12 steps were t" in done.stderr
    done = python(GUARDED, *guarded, "bad", "--skip-above", "1")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [int(row[0]) for row in rows if row[1] == "True"] == [6, 6, 9, 9]
    skips = [line for line in done.stderr.splitlines() if " was skipped: " in line]
    assert [line.split()[1] for line in skips] == ["6", "6", "9", "9"]
    lbfgs, sgd, *lines = (line for line in done.stderr.splitlines() if line.startswith("ampfast: "))
    assert lbfgs.startswith("ampfast: steps of LBFGS with a closure are not guarded (for Lightning")
    assert sgd.startswith("ampfast: steps of SGD with a closure")
    counts = "12 steps, 2 skipped, 1 of them for their norm; the guard's own"
    for number, line in zip((1, 2), lines, strict=True):
        assert line.startswith(f"ampfast: scaler {number}: {counts}")


def test_a_scaler_of_the_programs_decides(python: Call) -> None:
    guarded = ("-m", "ampfast", "run", "--guard", "--skip-above", "1e-9", "train.py")
    own = TRAIN.replace("GradScaler(", "GradScaler(skip_above=1e9, device=")
    own = own.replace("from torch.amp", "from ampfast").replace(", init_scale=2.0**127", "")
    guard = own.replace("GradScaler", "StepGuard").replace("scaler.scale", "")
    done = python(f"{own}\nkept = scaler\n{guard}", *guarded)
    *lines, said = done.stderr.splitlines()
    for number, line in zip((1, 2), lines, strict=True):
        assert line.startswith(f"ampfast: scaler {number}: 6 steps, 0 skipped"), done.stderr
    assert said.startswith("ampfast: --guard had no effect")
    assert "no step of a torch optimizer was guarded" in python("print()", *guarded).stderr


THREADS = """
import threading, torch
def train(step):
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = type("Own", (), {"param_groups": [{"params": [param]}], "step": step})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
def meanwhile():
    thread = threading.Thread(target=train, args=(int,))
    thread.start()
    thread.join()
train(meanwhile)
"""


def test_scalers_of_threads_do_not_hide_each_other(python: Call) -> None:
    done = python(THREADS, "-m", "ampfast", "run", "train.py")
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == 2, done.stderr
    assert all(": 1 steps, 0 skipped" in line for line in lines)


ENDED = """
import atexit, tempfile
log = open("log", "w")
atexit.register(print, "at exit")
with tempfile.TemporaryDirectory(dir=".", prefix="made"):
    try:
"""


def test_a_run_that_is_ended_cleans_up(python: Call, tmp_path: Path) -> None:
    body = TRAIN.replace("scaler.update()", "scaler.update(); log.write(f'{step} ')")
    body = "".join(f"        {line}\n" for line in body.splitlines())
    program = f"{ENDED}{body}    except Exception:\n        print('no')\n"
    program += "    finally:\n        print('finally')\n"
    stop = ("--stop", "3", "--record", "record.json", "train.py")
    done = python(program, "-m", "ampfast", "run", *stop)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finally\nat exit\n", "")
    assert (tmp_path / "log").read_text() == "0 1 "
    assert not list(tmp_path.glob("made*"))
    [record] = json.loads((tmp_path / "record.json").read_text())
    assert record["steps"] == 3


def test_checksums() -> None:
    value = torch.randn(3_000, generator=torch.Generator().manual_seed(0))
    expected = scaler_clock.checksum(value)
    for place in (0, 2_999):
        other = value.clone()
        other[place] = torch.nextafter(other[place], torch.tensor(9.0))
        assert scaler_clock.checksum(other) != expected
    few = [torch.tensor(row) for row in ([0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [0.0, 1.0, 0.0])]
    few += [row.to(kind) for row in few for kind in (torch.float16, torch.float64)]
    turned = torch.ones(2, dtype=torch.complex64) * 1j
    few += [turned / 1j, turned, turned.conj()]
    assert len({scaler_clock.checksum(row) for row in few}) == len(few)
    nans = torch.tensor([0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    assert scaler_clock.checksum(nans[:1]) == scaler_clock.checksum(nans[1:])
    assert scaler_clock.checksum(torch.eye(2).to_sparse()) == scaler_clock.checksum(torch.eye(2))
