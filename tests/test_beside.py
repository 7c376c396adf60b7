"""The runner of test processes beside the others."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from beside import TESTS, Process, Queue, Run
from support import is_alive

SLEEPS = "import time\ndef test_it(): time.sleep(600)\n"
WAITS = """
import os, time
def test_it():
    while not os.path.exists({sign!r}):
        time.sleep(0.01)
"""
# Ignored signals, such as SIGHUP under nohup, are inherited by child processes.
STARTS = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path.insert(0, {tests!r})
from pathlib import Path
from beside import Process
print(Process(Path({log!r}), {test!r})._process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def under_nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("under_nohup")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs Linux's setpriv")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_it_ends_with_its_parent(tmp_path: Path, number: int) -> None:
    test, sign = tmp_path / "test_sleeps.py", tmp_path / "sign"
    test.write_text(f"open({str(sign)!r}, 'w').close()\n{SLEEPS}")
    code = STARTS.format(tests=str(TESTS), log=str(tmp_path / "log"), test=str(test))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            # Only a running process is notified of its parent's end.
            wait_until(lambda: sign.exists())
            assert is_alive(child)
            parent.send_signal(number)
            wait_until(lambda: parent.poll() is not None)
        finally:
            parent.kill()
    wait_until(lambda: not is_alive(child))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failure_is_not_lost(tmp_path: Path) -> None:
    process = Process(tmp_path / "log", str(tmp_path / "no_such_test.py"))
    with pytest.raises(AssertionError, match="no_such_test"):
        process.check()


def test_runs_follow_each_other_and_the_last_is_ended(tmp_path: Path) -> None:
    test = tmp_path / "test_sleeps.py"
    test.write_text(SLEEPS)
    waits, sign = tmp_path / "test_waits.py", tmp_path / "sign"
    waits.write_text(WAITS.format(sign=str(sign)))
    first, second = Run("first", (str(waits),)), Run("second", ("no_such_test.py",))
    queue = Queue([first, second, Run("third", (str(test),)), Run("fourth", (str(test),))])
    for _ in range(3):
        queue.go_on()
    assert list(queue._started) == ["first"]
    sign.touch()
    queue.check(first)
    with pytest.raises(AssertionError, match="no_such_test"):
        queue.check(second)
    assert list(queue._started) == ["first", "second"]
    queue.go_on()
    third = queue._started["third"]
    assert not third.has_ended
    queue.end()
    assert third.has_ended
    assert "fourth" not in queue._started
