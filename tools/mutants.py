"""Changes ampfast line by line, and prints the changes that no test notices.

Each condition, operator, number, return and statement is replaced or dropped, one at a time, in a
process forked from one that has collected the tests; the tests that run its line are run there. A
comment that begins with "Equivalent:", right before the statement, says why none can notice it.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import math
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import coverage
import pytest

# Exit codes of a trial; a mutant that cannot be tried, by whatever error, counts as a survivor.
_PASSED, _NOTICED, _NOT_TRIED = 0, 1, 2

ROOT = Path(__file__).parents[1]
EXPLANATION = "# Equivalent:"
# Of this process alone; those of ranks and commands start others.
TESTS = ("tests", "--ignore=tests/distributed", "--ignore=tests/backends/test_over_kernels.py")

_PAIRS = (
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE)),
    *((ast.Gt, ast.GtE), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr)),
    (ast.And, ast.Or),
)
_SWAPPED = {old: new for pair in _PAIRS for old, new in (pair, pair[::-1])}
_OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any"}
_DROPPED = ast.AugAssign, ast.Break, ast.Continue, ast.Delete, ast.Expr, ast.Raise
_HELD = ast.Attribute, ast.Subscript
_TEXTS = ast.JoinedStr, ast.Import, ast.ImportFrom


@dataclass(frozen=True)
class Mutant:
    """One change inside of a function.

    Attributes:
        path: The file.
        place: Name of the function.
        lines: Lines of the statement, or of the head of a compound one.
        text: What is replaced, and by what.
        change: Makes the change in `tree`; for a forked process, as it is not taken back.
        tree: The module, which all its mutants share.
    """

    path: Path
    place: str
    lines: range
    text: str
    change: Callable[[], None]
    tree: ast.Module

    @property
    def is_explained(self) -> bool:
        """Whether the lines of comment before the statement begin with `EXPLANATION`."""
        source = self.path.read_text(encoding="utf-8").splitlines()
        above = reversed(source[: self.lines[0] - 1])
        for line in above:
            if not line.lstrip().startswith("#"):
                return False
            if line.lstrip().startswith(EXPLANATION):
                return True
        return False


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yields every change to the functions of a module, in source order."""
    tree = ast.parse(path.read_text(encoding="utf-8"))

    def below(node: ast.AST, place: str, lines: range) -> Iterator[Mutant]:
        for field, value in ast.iter_fields(node):
            # Names of types, and what runs at import.
            if field in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
                continue
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST) or isinstance(child, _TEXTS) or _is_text(child):
                    continue
                inner, here = place, _lines_of(child) or lines
                if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    is_class = isinstance(child, ast.ClassDef)
                    inner = "" if is_class else f"{place}.{child.name}".strip(".")
                for new in _variants(child, node) if inner else ():
                    at = (node, field, index if isinstance(value, list) else None, child, new)
                    text = f"{ast.unparse(child)!r} -> {ast.unparse(new)!r}"
                    yield Mutant(path, inner, here, text, lambda at=at: _put(*at), tree)
                yield from below(child, inner, here)

    return below(tree, "", range(1))


def _put(node: ast.AST, field: str, index: int | None, old: ast.AST, new: ast.AST) -> None:
    if isinstance(old, ast.stmt):
        # As dead code, so that its function closes over the same names.
        new = ast.If(ast.Constant(True), [new], [old])  # type: ignore[list-item]
    if index is None:
        setattr(node, field, new)
    else:
        getattr(node, field)[index] = new


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _lines_of(node: ast.AST) -> range | None:
    if not isinstance(node, ast.stmt):
        return None
    body = getattr(node, "body", None)
    end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
    return range(node.lineno, max(node.lineno + 1, end))


def _variants(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST]:
    """Replacements of a node; a dropped statement becomes `pass`."""
    if isinstance(parent, (ast.If, ast.While)) and node is parent.test:
        yield ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        is_bool = isinstance(node.value, bool)
        yield ast.Constant(not node.value if is_bool else node.value + 1)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [_SWAPPED[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        yield ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(_SWAPPED[type(node.op)](), node.values)
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _OTHER_FUNCTION:
        other = ast.Name(_OTHER_FUNCTION[node.func.id], ast.Load())  # type: ignore[attr-defined]
        yield ast.Call(other, node.args, node.keywords)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield ast.Return(ast.Constant(None))
    elif _can_be_dropped(node):
        yield ast.Pass()


def _can_be_dropped(node: ast.AST) -> bool:
    is_kept = isinstance(node, ast.Assign) and all(isinstance(t, _HELD) for t in node.targets)
    return is_kept or isinstance(node, _DROPPED)


class Trials:
    """Runs tests over mutants, in pytest's open session.

    Args:
        items: The collected tests.
        paths: Files that are changed.
    """

    def __init__(self, items: list[pytest.Item], paths: set[str]) -> None:
        self.items = items
        self.functions = [
            thing
            for thing in gc.get_objects()
            if type(thing) is FunctionType and thing.__code__.co_filename in paths
        ]
        with tempfile.NamedTemporaryFile() as results:
            process = _forked(lambda: self._measure(paths, Path(results.name)))
            if os.waitpid(process, 0)[1]:
                raise SystemExit("the tests cannot be measured")
            # Seconds of each test, infinite if it fails as it is; tests by file and line.
            self.seconds, self.runs = pickle.loads(Path(results.name).read_bytes())
        failing = [items[i].nodeid for i, took in enumerate(self.seconds) if took == math.inf]
        print(f"{len(items)} tests, left out as they fail: {', '.join(failing) or 'none'}")

    def survivors(self, mutants: Sequence[Mutant], jobs: int, most: float) -> Iterator[Mutant]:
        """Yields each mutant with which the tests of its lines pass, `most` seconds of them."""
        waiting = list(mutants)[::-1]
        running: dict[int, tuple[Mutant, float]] = {}
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop()
                tests = list(self._tests_of(mutant, most))
                limit = 60 + 20 * sum(self.seconds[number] for number in tests)
                process = _forked(lambda mutant=mutant, tests=tests: self._try(mutant, tests))
                running[process] = mutant, time.monotonic() + limit
            for process, (mutant, end) in list(running.items()):
                if time.monotonic() > end:  # an endless loop is noticed
                    os.killpg(process, signal.SIGKILL)
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    del running[process]
                    if os.waitstatus_to_exitcode(status) in (_PASSED, _NOT_TRIED):
                        yield mutant
            time.sleep(0.01)

    def _measure(self, paths: set[str], results: Path) -> bool:
        tracer = coverage.Coverage(data_file=None, config_file=False, include=list(paths))
        tracer.start()
        seconds = []
        for number, item in enumerate(self.items):
            tracer.switch_context(str(number))
            start = time.process_time()
            seconds.append(math.inf if _fails(item) else time.process_time() - start)
        tracer.stop()
        data = tracer.get_data()
        runs = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
        results.write_bytes(pickle.dumps((seconds, runs)))
        return True

    def _tests_of(self, mutant: Mutant, most: float) -> Iterator[int]:
        by_line = self.runs.get(str(mutant.path), {})
        numbers = {int(each) for line in mutant.lines for each in by_line.get(line, ()) if each}
        spent = 0.0
        for number in sorted(numbers, key=self.seconds.__getitem__):
            spent += self.seconds[number]
            if spent > most:
                return
            yield number

    def _try(self, mutant: Mutant, tests: list[int]) -> bool:
        mutant.change()
        whole = ast.fix_missing_locations(mutant.tree)
        module = compile(whole, str(mutant.path), "exec", dont_inherit=True)
        codes = {(code.co_name, code.co_firstlineno): code for code in _codes(module)}
        for function in self.functions:
            code = function.__code__
            if code.co_filename == str(mutant.path):
                function.__code__ = codes[code.co_name, code.co_firstlineno]
        return not any(_fails(self.items[number]) for number in tests)


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


def _forked(work: Callable[[], bool]) -> int:
    """Starts a silent process, in a group of its own, whose exit code tells what `work` returns."""
    process = os.fork()
    if process:
        return process
    code = _NOT_TRIED
    try:
        os.setpgid(0, 0)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        code = _PASSED if work() else _NOTICED
    finally:
        os._exit(code)


def _all_mutants(files: Sequence[str]) -> list[Mutant]:
    paths = [Path(name).resolve() for name in files] or sorted((ROOT / "ampfast").rglob("*.py"))
    # Triton's kernels are compiled from their source.
    return [m for path in paths if path.name != "kernels.py" for m in mutants_of(path)]


def main() -> int:
    """Prints each mutant that survives; returns 1 if one is not explained."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("files", nargs="*", help="modules (default: all of ampfast)")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="arguments of pytest")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once")
    parser.add_argument("--sample", type=int, help="number of changes, drawn from --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests for a change")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    mutants = _all_mutants(options.files)
    if options.sample:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))

    class InPlaceOfTests:
        unexplained = 0

        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            trials = Trials(list(session.items), {str(mutant.path) for mutant in mutants})
            survivors = 0
            for mutant in trials.survivors(mutants, options.jobs, options.budget):
                survivors += 1
                self.unexplained += not mutant.is_explained
                note = " (explained)" if mutant.is_explained else ""
                where = f"{os.path.relpath(mutant.path)}:{mutant.lines[0]} {mutant.place}"
                print(f"{where}{note}\n  {mutant.text}", flush=True)
            explained = survivors - self.unexplained
            print(
                f"{len(mutants)} changes: {len(mutants) - survivors} noticed, {explained} "
                f"explained, {self.unexplained} neither"
            )
            return True

    # Loaded by torch at the first step of an optimizer, here once for all trials.
    importlib.import_module("torch._dynamo")
    instead = InPlaceOfTests()
    quiet = ("-s", "-qq", "--tb=no", "-p", "no:cacheprovider", "-m", "not sweep and not slow")
    pytest.main([*quiet, *options.tests], plugins=[instead])
    return 1 if instead.unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
