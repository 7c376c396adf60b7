"""`python -m ampfast run`: a program runs as without it, and a line about its scaler follows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ampfast import watch
from ampfast.watch import Record, Watch

ROOT = Path(__file__).resolve().parents[2]
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
    """Runs this Python in a folder that has the given program as train.py."""

    def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(program)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


SURROUNDINGS = """
import atexit, sys
print(sys.argv, sys.path[0], __name__, __file__, __spec__ and __spec__.name, __doc__)
print(sys.modules["__main__"].__dict__ is globals(), sorted(globals()))
atexit.register(lambda: print("at exit", sys.modules["__main__"].__dict__ is globals()))

def fail():
    raise ValueError("the program's own")
"""


@pytest.mark.sweep
@pytest.mark.slow
def test_program_that_fails_is_as_without(python: Call) -> None:
    program = f'"""Its docstring."""\n{SURROUNDINGS}{TRAIN}\nfail()\n'
    plain = python(program, "train.py", "--lr", "1", "-h")
    ours = python(program, "-m", "ampfast", "run", "train.py", "--lr", "1", "-h")
    assert plain.returncode == ours.returncode == 1
    assert "ValueError" in plain.stderr
    assert ours.stderr.startswith(plain.stderr)
    assert re.fullmatch(LINE, ours.stderr.removeprefix(plain.stderr))
    # Python's loader and its empty annotations are not there.
    for name in ("'__annotations__', ", "'__loader__', ", "'__package__', "):
        plain.stdout, ours.stdout = (out.stdout.replace(name, "") for out in (plain, ours))
    assert ours.stdout == plain.stdout


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
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
    plain = python(TRAIN + end, "train.py")
    ours = python(TRAIN + end, "-m", "ampfast", "run", "train.py")
    assert plain.returncode == ours.returncode == code
    assert ours.stdout == plain.stdout
    assert ours.stderr.startswith(plain.stderr)
    if "no Python" not in end:
        assert re.fullmatch(LINE, ours.stderr.removeprefix(plain.stderr))


@pytest.mark.sweep
@pytest.mark.slow
def test_clipping_is_replaced_where_asked_for(python: Call) -> None:
    program = TRAIN.replace(
        "    scaler.step(", "    torch.nn.utils.clip_grad_norm_([weight], 1.0)\n    scaler.step("
    )
    program += "print(torch.nn.utils.clip_grad_norm_.__module__)"
    plain = python(program, "-m", "ampfast", "run", "train.py")
    ours = python(program, "-m", "ampfast", "run", "--clip", "train.py")
    assert plain.stdout == "torch.nn.utils.clip_grad\n"
    assert ours.stdout.startswith("ampfast.")
    assert re.fullmatch(LINE, ours.stderr)


def test_module(python: Call) -> None:
    plain = python(SURROUNDINGS + TRAIN, "-m", "train", "some", "words")
    ours = python(SURROUNDINGS + TRAIN, "-m", "ampfast", "run", "-m", "train", "some", "words")
    assert ours.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    assert ours.returncode == 0
    assert re.fullmatch(LINE, ours.stderr)


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
    program = TRAIN + "print(scaler.stats().spikes > 0, scaler.skip_above)"
    done = python(program, "-m", "ampfast", "run", "--skip-above", "0.5", "train.py")
    assert done.stdout == "True 0.5\n"


WRONG = {
    "print('nothing')": "the program used no gradient scaler",
    TRAIN.replace('"cpu"', '"cpu", enabled=False'): "the gradient scaler is disabled, ",
    TRAIN.replace("scaler.update()", "").replace("6", "1"): "the gradient scaler was never updated",
}


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("program", WRONG, ids=WRONG.get)
def test_what_is_missing_is_said(python: Call, program: str) -> None:
    done = python(program, "-m", "ampfast", "run", "train.py")
    assert done.returncode == 0, done.stderr
    assert f"ampfast: {WRONG[program]}" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.sweep
@pytest.mark.slow
def test_a_scaler_for_every_step(python: Call) -> None:
    program = "import torch\nfor _ in range(9):\n    scaler = torch.amp.GradScaler('cpu')\n"
    program += "    scaler.scale(torch.ones(()))\n"
    done = python(program, "-m", "ampfast", "run", "train.py")
    assert done.stderr.count("was never updated") == 4
    assert done.stderr.endswith("ampfast: 5 more scalers: is one made in every step?\n")


@pytest.mark.sweep
@pytest.mark.slow
def test_ranks(python: Call) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ampfast", "run")
    rank = "import torch; torch.distributed.init_process_group('gloo')\n"
    end = "\nprint('rank', torch.distributed.get_rank(), hasattr(scaler, 'stats'))\n"
    end += "torch.distributed.destroy_process_group()\n"
    done = python(rank + TRAIN + end, *launcher, "train.py", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    lines = re.findall("^rank .*", done.stdout, re.MULTILINE)  # between torch 2.10's about Gloo
    assert sorted(lines) == ["rank 0 True", "rank 1 True"]
    assert len(re.findall(LINE, done.stderr)) == 1


def test_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    from ampfast.__main__ import main

    assert main(["run", "nowhere.py", "--help"]) == 2
    assert capsys.readouterr().err == "ampfast: there is no script 'nowhere.py'\n"


SPAWN = """
import torch, torch.multiprocessing
from torch.amp import GradScaler
def child(rank, depth):
    limit = getattr(GradScaler("cpu"), "max_skips", None)
    print(depth, limit, torch.nn.utils.clip_grad_norm_.__module__)
    if depth:
        torch.multiprocessing.spawn(child, (depth - 1,))
if __name__ == "__main__":
    torch.multiprocessing.spawn(child, (1,))
"""


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("start", [("train.py",), ("-m", "train")])
def test_spawned_processes_are_patched(python: Call, start: tuple[str, ...]) -> None:
    options = ("--max-skips", "7", "--skip-above", "inf")
    done = python(SPAWN, "-m", "ampfast", "run", *options, *start)
    assert done.stdout == "1 7 torch.nn.utils.clip_grad\n0 7 torch.nn.utils.clip_grad\n"
    assert "no gradient scaler in this process (one that it started by multiproc" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", ["folder", "program.zip"])
def test_folders_and_archives(python: Call, tmp_path: Path, name: str) -> None:
    source = "import sys, other\nprint(sys.argv, __name__, __file__, sys.path[0], sys.path[1:2])"
    files = {"__main__.py": f"{source}\n{TRAIN}", "other.py": ""}
    (tmp_path / "folder").mkdir()
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
            (tmp_path / "folder" / file).write_text(text)
    plain = python("", name, "--lr", "1")
    ours = python("", "-m", "ampfast", "run", name, "--lr", "1")
    assert ours.returncode == plain.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout
    assert re.fullmatch(LINE, ours.stderr)


COMMAND = """#!/usr/bin/python
import sys
from train import entry
if __name__ == '__main__':
    sys.exit(entry())
"""
ENTRY = """
import sys, torch
from torch.cuda.amp import GradScaler
def entry():
    print(sys.argv, GradScaler(enabled=False).skip_reason.__name__)
    exec(TRAIN)
"""


@pytest.mark.sweep
@pytest.mark.slow
def test_an_installed_command_by_its_path(python: Call, tmp_path: Path) -> None:
    """As pip writes it, which is how ultralytics and nnU-Net are started."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "trains").write_text(COMMAND)
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    command = ("-m", "ampfast", "run", "bin/trains", "mode=train", "--epochs", "1")
    done = python(f"TRAIN = {TRAIN!r}\n{ENTRY}", *command, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['bin/trains', 'mode=train', '--epochs', '1'] skip_reason\n"
    assert re.search(LINE, done.stderr)


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


@pytest.mark.sweep
@pytest.mark.slow
def test_a_program_that_catches_everything_ends_after_a_while(python: Call) -> None:
    update = "try:\n        scaler.update()\n    except BaseException as error:\n        "
    program = TRAIN.replace("scaler.update()", f"{update}print('caught')")
    program += "import time\nwhile True: time.sleep(1)"
    call = "import ampfast.run as r, sys; r._PATIENCE = 0.5; "
    call += "r.run('train.py', [], False, 'record.json', 5, False, False, None)"
    done = python(program, "-u", "-c", call)
    assert (done.returncode, done.stdout) == (0, "caught\ncaught\n")


def test_notebooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ampfast.__main__ import main

    (tmp_path / "train.ipynb").write_text('{"cells": [null]}')
    assert main(["run", str(tmp_path / "train.ipynb")]) == 2
    told = "is a notebook, which Python does not run: call ampfast.patch() in its first cell"
    assert told in capsys.readouterr().err


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("program", [("folder",), ("-m", "no_such_module")])
def test_what_python_does_not_find(python: Call, tmp_path: Path, program: tuple[str, ...]) -> None:
    (tmp_path / "folder").mkdir()
    plain = python("", *program)
    ours = python("", "-m", "ampfast", "run", *program)
    assert ours.returncode == plain.returncode == 1
    # Python names itself, or the program, before its words; without a scaler, too, no line.
    told = plain.stderr.partition(": ")[2]
    assert ours.stderr.endswith(told)


class Clock:
    """Host and GPU of one clock, in milliseconds."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now * 1_000_000

    def Event(self, enable_timing: bool) -> SimpleNamespace:  # noqa: N802
        event = SimpleNamespace(at=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event


class Slow:
    """Scaler whose methods take 10 ms each, on something like a GPU."""

    _enabled = True
    _scale = SimpleNamespace(is_cuda=True, device="cuda:0")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def scale(self, loss: object) -> None:
        self.clock.now += 10

    def unscale_(self, optimizer: object) -> None:
        self.clock.now += 10

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.unscale_(optimizer)
        optimizer.step()
        self.clock.now += 10

    def update(self) -> None:
        self.clock.now += 10


def test_own_time_is_without_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class Optimizer(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            clock.now += 1000

    profiled = torch.optim.Optimizer.profile_hook_step
    monkeypatch.setattr(torch.optim.Optimizer, "profile_hook_step", staticmethod(profiled))
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(torch.cuda, "Event", clock.Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ended: list[Record] = []
    watching = Watch(Slow, keeps_values=False, ended=ended.append)
    optimizer = Optimizer([torch.zeros(1, requires_grad=True)])
    scaler = Slow(clock)
    for _ in range(7):
        clock.now += 100
        scaler.scale(None)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    optimizer.step()
    [record] = watching.records.values()
    record.flush()
    assert ended == [record] * 7
    assert record.times["own"] == record.times["gpu"] == [50_000] * 7
    assert record.times["step"] == [1_150_000] * 6
    assert record.medians()["share"] == 50 / 1150
    assert record.waits == 0


class Scaler:
    """Scaler whose threads meet in each of its methods."""

    _enabled, _scale = True, None

    def __init__(self, meeting: threading.Barrier) -> None:
        self.meeting = meeting

    def scale(self, outputs: object) -> object:
        self.meeting.wait(60)
        return outputs

    def update(self) -> None:
        self.meeting.wait(60)


def test_each_thread_is_watched() -> None:
    watching = Watch(Scaler, keeps_values=True, ended=lambda record: None)
    meeting = threading.Barrier(2)

    def train(value: float) -> None:
        scaler = Scaler(meeting)
        for _ in range(5):
            scaler.scale(torch.tensor(value))
            scaler.update()

    threads = [threading.Thread(target=train, args=[value]) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for record in watching.records.values():
        record.flush()
    values = sorted([value for _, value in r.values["losses"]] for r in watching.records.values())
    assert values == [[1.0] * 5, [2.0] * 5]


def test_every_loss_and_element_is_seen() -> None:
    record = Record(None)
    one, many = torch.tensor(3.0), torch.tensor([1.0, 2.0])
    assert record.see([one, (one,)]) == [one, (one,)]
    assert list(record.see(each for each in [one, many])) == [one, many]
    record.see(many.flip(0))
    record.flush()
    assert [value for _, value in record.values["losses"]] == [3.0] * 5
    first, second = (value for _, value in record.values["elements"])
    assert first != second


def test_checksums() -> None:
    value = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    expected = int(watch.checksum(value))
    for place in (0, 2**20 - 1, 2**20, 2_999_999):
        other = value.clone()
        other[place] = torch.nextafter(other[place], torch.tensor(9.0))
        assert int(watch.checksum(other)) != expected
    few = [torch.tensor(row) for row in ([0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [0.0, 1.0, 0.0])]
    few += [row.to(kind) for row in few for kind in (torch.float16, torch.float64)]
    assert len({int(watch.checksum(row)) for row in few}) == len(few)
    nans = torch.tensor([0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    assert watch.checksum(nans[:1]) == watch.checksum(nans[1:])
    sparse, wide = torch.eye(2).to_sparse(), torch.ones(2, 2, dtype=torch.complex64)
    assert watch.checksum(sparse) == watch.checksum(torch.eye(2))
    assert watch.checksum(wide) != watch.checksum(wide * 1j)


def test_flags_are_those_before_the_update() -> None:
    """torch's update sums them into the first."""
    scaler = torch.amp.GradScaler("cpu")
    optimizers = [torch.optim.SGD([torch.zeros(1, requires_grad=True)]) for _ in range(2)]
    for optimizer, value in zip(optimizers, (1.0, float("inf")), strict=True):
        optimizer.param_groups[0]["params"][0].grad = scaler.scale(torch.tensor([value]))
        scaler.step(optimizer)
    record = Record(scaler)
    record.see_state()
    scaler.update()
    record.flush()
    assert record.values["skips"] == [(0, 0.0), (0, 1.0)]


def test_reads_of_the_host_are_counted() -> None:
    record = Record(None)
    inside = SimpleNamespace(record=record)
    with FakeTensorMode():
        flag = torch.zeros((), device="cuda")
        with watch._Reads(inside):
            for current in (record, None):
                inside.record = current
                with pytest.raises(DataDependentOutputException):
                    flag.item()
            torch.add(flag, flag)
    assert record.reads == 1
