"""`patch()` and `unpatch()`: names that are replaced and restored, and the classes behind them."""

from __future__ import annotations

import abc
import copy
import inspect
import io
import pickle
import pkgutil
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from originals import NAMES, TORCH, is_patched, meaning, snapshot
from support.processes import python
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import sharded_grad_scaler

import ampfast

IMPORTS = """
    from torch.amp import GradScaler as amp
    from torch.cuda.amp import GradScaler as cuda
    from torch.cpu.amp.grad_scaler import GradScaler as cpu
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as sharded
    from ampfast import GradScaler as ours
    from torch import GradScaler as another
    other = int
"""


def test_every_name_of_torch_and_of_users(module: Callable[..., ModuleType]) -> None:
    user = module("user", IMPORTS)
    before, names = dict(vars(user)), snapshot()
    assert {name: meaning(name) for name in NAMES} == {n: TORCH[kind] for n, kind in NAMES.items()}
    patch = ampfast.patch()
    left = {name for name, cls in snapshot().items() if cls in TORCH.values()}
    assert left and all(name.startswith("ampfast.") for name in left), "and those stay"
    assert {n for n, cls in names.items() if cls in TORCH.values()} == left | set(patch.replaced)
    assert {f"user.{name}" for name in (*TORCH, "another")} <= set(patch.replaced)
    for name, kind in NAMES.items():
        assert meaning(name) is getattr(user, kind), name
        assert issubclass(meaning(name), ampfast.GradScaler)
    assert user.another is user.amp
    late = module("late", IMPORTS)
    assert late.sharded is user.sharded
    user.cuda = fake = object()
    ampfast.unpatch()
    assert vars(user) == {**before, "cuda": fake}
    assert {kind: getattr(late, kind) for kind in TORCH} == TORCH
    assert late.ours is ampfast.GradScaler


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("patch patch unpatch unpatch", "1100"),
        ("unpatch enter exit unpatch patch", "01001"),
        ("enter exit enter exit enter exit", "101010"),
        ("enter enter enter exit exit exit", "111110"),
        ("patch enter exit", "111"),
        ("enter patch exit", "110"),
        ("enter unpatch exit", "100"),
        ("enter unpatch patch exit", "1011"),
        ("enter unpatch patch enter exit exit", "101111"),
    ],
)
def test_blocks_and_calls(calls: str, expected: str) -> None:
    before, blocks, seen = snapshot(), [], ""
    for call in calls.split():
        if call == "patch":
            ampfast.patch()
        elif call == "unpatch":
            ampfast.unpatch()
        elif call == "enter":
            blocks.append(ampfast.patch().__enter__())
        else:
            blocks.pop().__exit__(None, None, None)
        seen += str(int(is_patched()))
        assert is_patched() or snapshot() == before
    assert seen == expected


# Stand-in classes behind torch's names while patched: instances, comparisons and pickles


# FSDP's scaler needs one.
pytestmark = pytest.mark.usefixtures("world")

KINDS = list(TORCH)
LEGACY = ["cuda", "cpu"]


def named(kind: str) -> Any:
    """Current class behind torch's name for this kind."""
    if kind == "sharded":
        return sharded_grad_scaler.ShardedGradScaler
    module = torch.amp if kind == "amp" else getattr(torch, kind).amp
    return module.GradScaler


def make(kind: Any, init_scale: float = 8.0, *args: Any, **kwargs: Any) -> Any:
    """Scaler of a class, or from torch's name for this kind, without its deprecation warnings."""
    cls = named(kind) if isinstance(kind, str) else kind
    device = ("cpu",) if "device" in inspect.signature(cls).parameters else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(*device, init_scale, *args, **kwargs)


def step(scaler: Any, gradient: float) -> list[float]:
    """Parameter of ones after one training step."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale((param * gradient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return param.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_instances_and_signatures_of_each_name(kind: str) -> None:
    theirs = list(inspect.signature(TORCH[kind]).parameters.values())
    ampfast.patch()
    scaler = make(kind, backend="aten", allow_fp16=True)
    assert type(scaler) is named(kind)
    assert isinstance(scaler, ampfast.GradScaler) and isinstance(scaler, TORCH[kind])
    for name in ("__qualname__", "__name__", "__module__"):
        assert getattr(type(scaler), name) == getattr(TORCH[kind], name)
    # The scaler looks for overridden hooks in subclasses; a stand-in overrides none.
    base = ampfast.ShardedGradScaler if kind == "sharded" else ampfast.GradScaler
    for name in vars(ampfast.GradScaler).keys() - {"__init__", "__module__", "__doc__"}:
        if name != "__annotations__":
            assert getattr(named(kind), name) is getattr(base, name), name
    for callee in (named(kind), named(kind).__init__):
        ours = [p for p in inspect.signature(callee).parameters.values() if p.name != "self"]
        assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [
            (p.name, p.default, p.kind) for p in theirs
        ]
        extra = {p.kind for p in ours[len(theirs) :]}
        assert extra <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    with pytest.raises(TypeError, match="allow_fp16"):
        make(kind, allow_fp16="yes")
    with pytest.raises(ValueError, match="nonsense"):
        make(kind, backend="nonsense")


def test_isinstance() -> None:
    derived = {kind: type(f"Mine{kind}", (TORCH[kind],), {}) for kind in KINDS}
    old = {kind: make(kind) for kind in KINDS}
    old_derived = {kind: object.__new__(cls) for kind, cls in derived.items()}
    with ampfast.patch():
        new = {kind: make(kind) for kind in KINDS}
        mine = type("Mine", (torch.amp.GradScaler,), {})
        for scalers in (old, old_derived, new):
            for kind, scaler in scalers.items():
                assert isinstance(scaler, torch.amp.GradScaler)
                assert isinstance(scaler, torch.GradScaler | None)
                assert issubclass(type(scaler), torch.amp.GradScaler)
                for other in ("cuda", "cpu", "sharded"):
                    assert isinstance(scaler, named(other)) is (other == kind)
                assert isinstance(scaler, ampfast.GradScaler) is (scalers is new)
                assert not isinstance(scaler, mine)
        assert all(issubclass(derived[kind], named(kind)) for kind in KINDS)
        assert not isinstance(torch.ones(1), torch.amp.GradScaler)
        assert not issubclass(torch.amp.GradScaler, mine)
    assert all(isinstance(scaler, named(kind)) for kind, scaler in new.items())


@pytest.mark.parametrize("kind", LEGACY)
def test_arguments_of_the_deprecated_names(kind: str) -> None:
    theirs = make(kind, 4.0, 3.0, 0.25, 7)
    ampfast.patch()
    ours = make(kind, 4.0, 3.0, 0.25, 7)
    assert (ours._device, ours.state_dict()) == (kind, theirs.state_dict())
    assert not make(kind, 4.0, 3.0, 0.25, 7, False).is_enabled()
    for wrong in ({"nonsense": 1}, {"device": "cpu"}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            make(kind, **wrong)


@pytest.mark.parametrize("kind", LEGACY)
def test_the_deprecation_is_torchs(kind: str) -> None:
    def seen(derived: bool) -> list[tuple[Any, ...]]:
        class Own(named(kind)):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__(enabled=False)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Own() if derived else named(kind)(enabled=False)
        return [(w.category, str(w.message), w.filename, w.lineno) for w in caught]

    for derived in (False, True):
        theirs, text = seen(derived), named(kind).__init__.__deprecated__
        assert [(w[0], w[2]) for w in theirs] == [(FutureWarning, __file__)]
        with ampfast.patch():
            assert seen(derived) == theirs
            assert named(kind).__init__.__deprecated__ == text == theirs[0][1]


@pytest.mark.parametrize("kind", KINDS)
def test_subclassing_a_patched_name(kind: str) -> None:
    before = type("Before", (TORCH[kind],), {"before": True})
    with ampfast.patch():

        class Mine(named(kind), Stateful, abc.ABC):  # type: ignore[misc]
            def step(self, *args: Any, **kwargs: Any) -> Any:
                self.steps = getattr(self, "steps", 0) + 1
                return super().step(*args, **kwargs)

        both = make(Mine), make(type("Mixed", (Mine, before), {}))
        assert both[1].before
        for scaler in both:
            assert isinstance(scaler, ampfast.GradScaler) and isinstance(scaler, Stateful)
            assert isinstance(scaler, named(kind)) and isinstance(scaler, Mine)
    for scaler in both:
        assert isinstance(scaler, named(kind))
        assert step(scaler, 1.0) == [0.0, 0.0]
        assert scaler.steps == 1


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_pickles(kind: str, protocol: int) -> None:
    """Whole scalers, pickled by the name of their class."""
    old = make(kind)
    step(old, torch.inf)
    data = pickle.dumps(old, protocol)
    expected = vars(pickle.loads(data))
    with ampfast.patch():
        # torch's from before load as ours; copies stay torch's.
        new = pickle.loads(data)
        assert type(new) is named(kind)
        assert new.state_dict() == old.state_dict()
        copies = [copy.deepcopy(old), copy.copy(old)]
        own = pickle.dumps(new, protocol)
        assert type(pickle.loads(own)) is type(new)
        assert pickle.loads(pickle.dumps(named(kind), protocol)) is named(kind)
    for scaler in copies:
        assert type(scaler) is TORCH[kind]
        assert vars(scaler) == expected
    assert step(old, 1.0) == [0.0, 0.0]
    again = pickle.loads(pickle.dumps(new, protocol))
    for scaler in (pickle.loads(own), again, copy.deepcopy(new), new):
        assert type(scaler) is type(new)
        assert step(scaler, 1.0) == [0.0, 0.0]
        assert scaler.state_dict() == old.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_torch_load(kind: str) -> None:
    """Whole scalers in a checkpoint, by the globals that torch calls unsafe."""
    old = make(kind)
    step(old, torch.inf)
    # A disabled one, as of CUDA where there is none, has no entries.
    entries = [old._per_optimizer_states.default_factory] if old._enabled else []
    files = [io.BytesIO(), io.BytesIO()]
    torch.save(old, files[0])
    ampfast.patch()
    new = make(kind)
    step(new, torch.inf)
    torch.save(new, files[1])
    for file in files:
        file.seek(0)
        with pytest.raises(pickle.UnpicklingError, match="was not an allowed global"):
            torch.load(file, weights_only=True)
    files[1].seek(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(files[1])
    found = [named(kind), *((pkgutil.resolve_name(name), name) for name in names)]
    for file, safe in zip(files, ([named(kind), defaultdict, *entries], found), strict=True):
        for is_safe in (True, False):
            file.seek(0)
            with torch.serialization.safe_globals(safe):
                loaded = torch.load(file, weights_only=is_safe)
            assert type(loaded) is named(kind)
            assert loaded.state_dict() == old.state_dict() == new.state_dict()
            assert step(loaded, 1.0) == [0.0, 0.0]


def test_pickles_load_in_a_program_that_is_not_patched(tmp_path: Path) -> None:
    with ampfast.patch():
        made = torch.amp.GradScaler("cpu"), make("cpu", enabled=False)
    (tmp_path / "scalers").write_bytes(pickle.dumps(made))
    program = """
        import pickle, sys, torch
        with open(sys.argv[1], "rb") as file:
            new = pickle.load(file)
        import ampfast
        for scaler, torchs in zip(new, (torch.amp.GradScaler, torch.cpu.amp.GradScaler)):
            assert isinstance(scaler, ampfast.GradScaler) and isinstance(scaler, torchs)
    """
    done = python("-c", textwrap.dedent(program), str(tmp_path / "scalers"))
    assert done.returncode == 0, done.stderr
