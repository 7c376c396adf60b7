"""Calls of the compiled core with wrong arguments: errors, and no crash of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gradients import parameter_with
from support.reference_launcher import ReferenceLauncher
from torch import Tensor

from ampfast import _C
from ampfast.backends.core import Clip, Factor, Pass, Update, clip_to, state_layout

CPU, META = torch.device("cpu"), torch.device("meta")
Arguments = tuple[Any, ...]


def grad_list(*numbers: int) -> Any:
    return _C.GradList.of([torch.ones(4) for _ in numbers], CPU, list(numbers))


def on_meta() -> Any:
    return _C.GradList.of([torch.ones(4, device=META)], META)


def pairs() -> Any:
    return _C.GradList.of([torch.ones(4).half()], CPU, None, [torch.zeros(4)])


def optimizer() -> Any:
    params = [parameter_with(torch.ones(4)) for _ in range(2)]
    return SimpleNamespace(param_groups=[{"params": params}])


def work(**fields: Any) -> Pass:
    marks = torch.zeros(2, _C.MARK_WORDS, dtype=torch.int64)
    now, sums = torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    usual = Pass(True, Factor.TIMES, torch.ones(()), torch.zeros(()), True, None, sums, marks, now)
    return usual._replace(**fields)


def clip() -> Clip:
    coefficient, sums = torch.zeros((), dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    scalars = [torch.ones(()) for _ in range(3)]
    return Clip(sums, 1.0, False, torch.zeros(()), coefficient, *scalars, 5.0)


def update() -> Update:
    words, tracker = torch.zeros(state_layout.STATE_WORDS).long(), torch.zeros(()).int()
    flags = [torch.zeros(())]
    return Update(torch.ones(()), tracker, flags, 2.0, 0.5, 1, words, torch.ones(()))


def with_master_weights() -> tuple[Any, tuple[torch.nn.Parameter, ...]]:
    params = [torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)) for _ in range(2)]
    for param in params:
        param.grad_dtype = None
        param.grad = torch.ones(4)
    return [{"params": params}], tuple(torch.nn.Parameter(torch.zeros(4)) for _ in params)


def stepped() -> Arguments:
    groups, weights = with_master_weights()
    known = _C.fingerprint_of(groups, None)
    return groups, weights, _C.lend_grads(groups, weights, None), known


def referenced() -> Arguments:
    groups = optimizer().param_groups
    return groups, (tuple(groups[0]["params"]),)


def run_list(*given: Any) -> None:
    grads = _C.GradList.of(*given)
    if grads is not None:
        _C.run(grads, work(marks=torch.zeros(1, _C.MARK_WORDS, dtype=torch.int64)))


def walk(groups: Any, *given: Any) -> None:
    for grads in _C.walk(groups, *given, None, None)[0]:
        _C.run(grads, Pass(False, Factor.NONE))


def set_chunks(*given: Any) -> None:
    try:
        _C.set_chunks(*given)
        _C.DeviceTable.of(_C.GradList.of([torch.ones(99)], CPU), False)
    finally:
        _C.set_chunks()


SCALE = torch.ones(())
READS = {"write": False, "sums": None}


def by_a_clip() -> Arguments:
    return grad_list(0), work(clip=clip(), sums=None, marks=None, now=None)


def for_pass(*first: Any) -> Arguments:
    return *first, optimizer(), {}, "unscaled", work(), True, SCALE


def for_clip(*first: Any) -> Arguments:
    return *first, optimizer(), {}, 1, work(**READS), True, SCALE, clip_to(1.0, False, 5.0)


# Functions, and what they take.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "run": (_C.run, lambda: (grad_list(0, 1), work())),
    "run by a clip": (_C.run, by_a_clip),
    "require_pass": (_C.require_pass, lambda: (grad_list(0, 1), work())),
    "narrow": (_C.narrow, lambda: (pairs(), torch.zeros(()))),
    "clip": (_C.clip, lambda: (clip(),)),
    "pass_over": (_C.pass_over, for_pass),
    "clip_over": (_C.clip_over, for_clip),
    "run_on": (_C.run_on, lambda: (ReferenceLauncher(), grad_list(0, 1), work())),
    "clip_on": (_C.clip_on, lambda: (ReferenceLauncher(), clip())),
    "update_on": (_C.update_on, lambda: (ReferenceLauncher(), update())),
    "pass_over_on": (_C.pass_over_on, lambda: for_pass(ReferenceLauncher())),
    "clip_over_on": (_C.clip_over_on, lambda: for_clip(ReferenceLauncher())),
    "share_memory": (_C.share_memory, lambda: ([optimizer().param_groups[0]["params"]],)),
    "is_found": (_C.is_found, lambda: ({CPU: torch.zeros(())},)),
    "can_update": (_C.can_update, lambda: (update(),)),
    "update": (_C.update, lambda: (update(),)),
    "overrides": (_C.overrides, lambda: (optimizer(), {"step": None})),
    "has_parameters": (_C.has_parameters, referenced),
    "fingerprint_of": (_C.fingerprint_of, lambda: (with_master_weights()[0], None)),
    "lend_grads": (_C.lend_grads, lambda: (*with_master_weights(), None)),
    "take_grads": (_C.take_grads, lambda: (with_master_weights()[1],)),
    "stepped_pairs": (_C.stepped_pairs, stepped),
    "have_same_entries": (_C.have_same_entries, lambda: ({1: 2}, (1,), {1: 2}, (1,))),
    "walk": (walk, lambda: (optimizer().param_groups, True, True, 3, True)),
    "set_chunks": (set_chunks, lambda: (_C.WINDOW_BYTES, 64)),
    "GradList.of": (run_list, lambda: ([torch.ones(4).half()], CPU, [0], [torch.zeros(4)])),
    "GradList.split": (_C.GradList.split, lambda: (grad_list(0, 1), {0})),
    "DeviceTable.of": (_C.DeviceTable.of, lambda: (grad_list(0, 1), False)),
}


def shrunk(*shape: int, dtype: torch.dtype) -> Tensor:
    tensor = torch.ones(shape, dtype=dtype)
    tensor.untyped_storage().resize_(1)
    return tensor


class Changing:
    """Other flags whenever it is read again."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        return iter([torch.zeros(()) if self.times == 1 else None])


def wrong_arguments() -> dict[str, Callable[[], Any]]:
    plain = (None, -1, 3, 2**62, 2**70, "x", (), ((),), (3,), ((3,),), len)
    made: dict[str, Callable[[], Any]] = {
        **{repr(value): lambda value=value: value for value in plain},  # type: ignore[misc]
        "(Tensor,)": lambda: (torch.zeros(4),),
        "[]": list,
        "[None]": lambda: [None],
        "{}": dict,
        "groups": lambda: [{"params": [torch.zeros(4).to_sparse(), None]}],
        "changing": Changing,
        "GradList": lambda: grad_list(0),
        "far": lambda: grad_list(2**40),
        "meta": on_meta,
        "pairs": pairs,
        "negative steps": lambda: torch.full((state_layout.STATE_WORDS,), -5),
        "no steps": lambda: torch.zeros(0, dtype=torch.int64),
        "no rows": lambda: torch.zeros(0, _C.MARK_WORDS, dtype=torch.int64),
        "sparse": lambda: torch.ones(2).to_sparse(),
        "zeros": lambda: torch._efficientzerotensor((), dtype=torch.float32),
    }
    for dtype, shape in (
        *((torch.float32, ()), (torch.float32, (4,)), (torch.float64, ()), (torch.float64, (2,))),
        *((torch.int64, (4,)), (torch.int64, (2, 4)), (torch.int64, (state_layout.STATE_WORDS,))),
    ):
        name = f"{dtype} of {shape}"
        made[name] = lambda d=dtype, s=shape: torch.ones(s, dtype=d)  # type: ignore[misc]
        made[f"shrunk {name}"] = lambda d=dtype, s=shape: shrunk(*s, dtype=d)  # type: ignore[misc]
        made[f"meta {name}"] = lambda d=dtype, s=shape: torch.ones(s, dtype=d, device=META)  # type: ignore[misc]
    return made


def places(value: Any, place: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Places of an argument and of its fields."""
    yield place
    for index, field in enumerate(value) if isinstance(value, (Pass, Clip, Update)) else ():
        yield from places(field, (*place, index))


def replaced(value: Any, place: tuple[int, ...], wrong: Any) -> Any:
    if not place:
        return wrong
    fields = list(value)
    fields[place[0]] = replaced(fields[place[0]], place[1:], wrong)
    return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)


def crash(name: str) -> list[str]:
    """Calls that end a forked child, or return a value beside an exception."""
    function, arguments = CALLS[name]
    function(*arguments())
    at = [place for i, each in enumerate(arguments()) for place in places(each, (i,))]
    trials = [(place, *wrong) for place in at for wrong in wrong_arguments().items()]
    failed, start = [], 0
    while start < len(trials):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            for number in range(start, len(trials)):
                os.write(write, f"{number} ".encode())
                place, _, make = trials[number]
                try:
                    function(*replaced(arguments(), place, make()))
                except SystemError:
                    os.write(write, b"SystemError ")
                    os._exit(1)
                except Exception:
                    pass
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            said = lines.read().split()
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        last = max(int(word) for word in said if word.isdigit())
        failed.append(f"{name} {trials[last][0]} {trials[last][1]} {said[-1]} {status}")
        start = last + 1
    return failed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="crashes are seen in forked children")
def test_no_call_crashes() -> None:
    root = Path(__file__).parents[1]
    path = f"{root}{os.pathsep}{root / 'tests'}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == []


WRITES_NOTHING = [
    ({"how": 9}, "no factor of kind 9"),
    ({"now": None}, "needs the number of steps"),
    ({"marks": torch.zeros(2)}, "marks must be a contiguous tensor"),
    ({"sums": shrunk(2, dtype=torch.float64)}, "the memory of sums was freed or resized"),
    (("x", 5.0), ""),
    ((1.0, "x"), ""),
]


@pytest.mark.parametrize(("wrong", "message"), WRITES_NOTHING)
def test_a_pass_or_clip_that_is_wrong_writes_nothing(wrong: Any, message: str) -> None:
    given = optimizer()
    entry: dict[str, Any] = {}
    if isinstance(wrong, tuple):
        limit, highest = wrong
        with pytest.raises(TypeError):
            limits = clip_to(limit, False, highest)
            _C.clip_over(given, entry, 1, work(**READS), True, SCALE, limits)
    else:
        with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
            made = work(factor=torch.tensor(4.0))._replace(**wrong)
            _C.pass_over(given, entry, "unscaled", made, True, SCALE)
    assert entry == {}
    assert all(param.grad.eq(1).all() for param in given.param_groups[0]["params"])


def test_gradients_of_another_device_are_refused() -> None:
    for call in (_C.run, lambda grads, _: _C.narrow(grads, None)):
        with pytest.raises(RuntimeError, match="the gradients are on meta, not on cpu"):
            call(on_meta(), Pass(False, Factor.NONE))


def test_lists_are_made_by_their_functions_alone() -> None:
    for kind in (_C.GradList, _C.Segment, _C.DeviceTable):
        with pytest.raises(TypeError):
            kind.__new__(kind)


if __name__ == "__main__":
    print(*(line for name in CALLS for line in crash(name)), sep="\n", end="")
