"""Tests run over mutated functions, each in a process forked from one that has imported all."""

from __future__ import annotations

import gc
import importlib
import math
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import coverage
import pytest
from mutants import Mutant

# Exit codes; mutants that cannot be tried count as survivors.
_ALL_PASSED, _ONE_FAILED, _NOT_TRIED = 0, 1, 3


@dataclass(frozen=True)
class Outcome:
    """Result of one mutant.

    Attributes:
        mutant: The mutant.
        survived: Whether every test passed.
        tests: Number of tests that run the changed lines.
    """

    mutant: Mutant
    survived: bool
    tests: int


def outcomes(
    mutants: Sequence[Mutant], items: list[pytest.Item], jobs: int, budget: float
) -> Iterator[Outcome]:
    """Tries each mutant with the tests that run its lines.

    Args:
        mutants: Changes inside of functions.
        items: All tests; `with_collected` has them.
        jobs: Number of concurrent processes.
        budget: Seconds of tests for each mutant, the fastest first.
    """
    paths = {str(mutant.path) for mutant in mutants}
    seconds, runs = _baseline(items, paths)
    passing = [each for each in seconds if math.isfinite(each)]
    print(f"{len(passing)} tests take {sum(passing):.0f} s", flush=True)
    functions = [
        thing
        for thing in gc.get_objects()
        if type(thing) is FunctionType and thing.__code__.co_filename in paths
    ]
    waiting = list(mutants)[::-1]
    running: dict[int, tuple[Mutant, int, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            numbers = _chosen(mutant, seconds, runs, budget)
            # An infinite loop counts as noticed.
            limit = 120 + 50 * sum(seconds[number] for number in numbers)
            process = _forked(_trial(mutant, functions, [items[number] for number in numbers]))
            running[process] = mutant, len(numbers), time.monotonic() + limit
        for process, (mutant, count, deadline) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                if time.monotonic() < deadline:
                    continue
                os.killpg(process, signal.SIGKILL)
                _, status = os.waitpid(process, 0)
            del running[process]
            code = os.waitstatus_to_exitcode(status)
            yield Outcome(mutant, code in (_ALL_PASSED, _NOT_TRIED), count)
        time.sleep(0.01)


def with_collected(tests: Sequence[str], work: Callable[[list[pytest.Item]], int]) -> int:
    """Collects `tests` and returns the result of `work`, called in pytest's open session."""

    class Instead:
        code = _ONE_FAILED

        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            self.code = work(list(session.items))
            return True

    # Loaded by torch at the first step of an optimizer, here once for all trials.
    importlib.import_module("torch._dynamo")
    instead = Instead()
    pytest.main(["-s", "-qq", "--tb=no", "-p", "no:cacheprovider", *tests], plugins=[instead])
    return instead.code


def _baseline(
    items: list[pytest.Item], paths: set[str]
) -> tuple[list[float], dict[str, dict[int, set[int]]]]:
    """Seconds of each test, infinite if it fails, and the tests that run each line of a file."""
    with tempfile.NamedTemporaryFile() as results:

        def measure() -> int:
            tracer = coverage.Coverage(data_file=None, config_file=False, include=list(paths))
            tracer.start()
            seconds = []
            for number, item in enumerate(items):
                tracer.switch_context(str(number))
                start = time.process_time()
                if _fails(item):
                    reporter = item.config.pluginmanager.get_plugin("terminalreporter")
                    why = reporter.stats["failed"][-1].longreprtext
                    print(f"{item.nodeid} is left out, since it fails as it is:\n{why}", flush=True)
                    start = -math.inf
                seconds.append(time.process_time() - start)
            tracer.stop()
            data = tracer.get_data()
            runs = {
                path: {
                    line: {int(context) for context in contexts if context}
                    for line, contexts in data.contexts_by_lineno(path).items()
                }
                for path in data.measured_files()
            }
            Path(results.name).write_bytes(pickle.dumps((seconds, runs)))
            return _ALL_PASSED

        _, status = os.waitpid(_forked(measure, is_quiet=False), 0)
        if status:
            raise SystemExit(1)
        seconds, runs = pickle.loads(Path(results.name).read_bytes())
        return seconds, runs


def _chosen(
    mutant: Mutant, seconds: list[float], runs: dict[str, dict[int, set[int]]], budget: float
) -> list[int]:
    by_line = runs.get(str(mutant.path), {})
    numbers = {number for line in mutant.lines for number in by_line.get(line, ())}
    passing = (number for number in numbers if math.isfinite(seconds[number]))
    chosen, spent = [], 0.0
    for number in sorted(passing, key=seconds.__getitem__):
        spent += seconds[number]
        if chosen and spent > budget:
            break
        chosen.append(number)
    return chosen


def _trial(
    mutant: Mutant, functions: list[FunctionType], items: list[pytest.Item]
) -> Callable[[], int]:
    def run() -> int:
        codes = {(code.co_name, code.co_firstlineno): code for code in _codes(mutant.compiled())}
        for function in functions:
            code = function.__code__
            if code.co_filename == str(mutant.path):
                function.__code__ = codes[code.co_name, code.co_firstlineno]
        return _ONE_FAILED if any(map(_fails, items)) else _ALL_PASSED

    return run


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _fails(item: pytest.Item) -> bool:
    """Runs one test, with setup and teardown of its fixtures."""
    failed = item.session.testsfailed
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return item.session.testsfailed > failed


def _forked(work: Callable[[], int], *, is_quiet: bool = True) -> int:
    """Starts a process in a group of its own that exits with the result of `work`."""
    process = os.fork()
    if process:
        return process
    code = _NOT_TRIED
    try:
        os.setpgid(0, 0)
        if is_quiet:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        code = work()
    finally:
        os._exit(code)
