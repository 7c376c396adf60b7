"""The processes that run tests beside the others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from beside import TESTS, Process, Queue, Run
from support import is_alive

SLEEPS = "import time\ndef test_it(): time.sleep(600)\n"
STARTS = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from beside import Process
print(Process(Path({log!r}), {test!r})._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs Linux's setpriv")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_it_ends_with_what_started_it(tmp_path: Path, number: int) -> None:
    test = tmp_path / "test_sleeps.py"
    test.write_text(SLEEPS)
    code = STARTS.format(tests=str(TESTS), log=str(tmp_path / "log"), test=str(test))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        os.kill(parent.pid, number)
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


def test_a_failure_is_not_lost(tmp_path: Path) -> None:
    process = Process(tmp_path / "log", str(tmp_path / "no_such_test.py"))
    with pytest.raises(AssertionError, match="no_such_test"):
        process.check()


def test_runs_follow_each_other_and_what_still_runs_is_ended(tmp_path: Path) -> None:
    test = tmp_path / "test_sleeps.py"
    test.write_text(SLEEPS)
    first, second = (Run(name, ("no_such_test.py",)) for name in ("first", "second"))
    queue = Queue([first, second, Run("third", (str(test),)), Run("fourth", (str(test),))])
    for _ in range(3):
        queue.go_on()
    assert list(queue._started) == ["first"]
    for run in (first, second):
        with pytest.raises(AssertionError, match="no_such_test"):
            queue.check(run)
    assert list(queue._started) == ["first", "second"]
    queue.go_on()
    third = queue._started["third"]
    assert not third.has_ended
    queue.end()
    assert third.has_ended
    assert "fourth" not in queue._started
