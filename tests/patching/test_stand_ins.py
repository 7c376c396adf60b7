"""Stand-in classes behind torch's names while patched: their instances and comparisons."""

from __future__ import annotations

import abc
import copy
import copyreg
import functools
import inspect
import io
import pickle
import pkgutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from originals import TORCH
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import sharded_grad_scaler

import ampfast

KINDS = list(TORCH)
LEGACY = ["cuda", "cpu"]


def named(kind: str) -> Any:
    """Current class behind torch's name for this kind."""
    if kind == "sharded":
        return sharded_grad_scaler.ShardedGradScaler
    module = torch.amp if kind == "amp" else getattr(torch, kind).amp
    return module.GradScaler


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    """Single-rank world for FSDP's scaler."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(kind: str, init_scale: float = 8.0, *args: Any, **kwargs: Any) -> Any:
    """Scaler from torch's name for this kind, without its deprecation warnings."""
    device = () if kind in LEGACY else ("cpu",)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return named(kind)(*device, init_scale, *args, **kwargs)


def step(scaler: Any, gradient: float) -> list[float]:
    """Parameter of ones after one training step."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale((param * gradient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return param.tolist()


def warned(function: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Warnings of a call, with the lines they point at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [(w.category, str(w.message), w.filename, w.lineno) for w in caught]


@pytest.mark.parametrize("kind", KINDS)
def test_instances_made_by_each_name(kind: str) -> None:
    ampfast.patch()
    scaler = make(kind)
    assert type(scaler) is named(kind)
    assert isinstance(scaler, ampfast.GradScaler)
    assert isinstance(scaler, TORCH[kind])
    assert type(scaler).__qualname__ == type(scaler).__name__ == TORCH[kind].__qualname__
    assert type(scaler).__module__ == TORCH[kind].__module__


def test_it_works_as_torchs() -> None:
    theirs = TORCH["amp"]("cpu", init_scale=8.0, growth_interval=2)
    ampfast.patch()
    ours = torch.amp.GradScaler(device="cpu", init_scale=8.0, growth_interval=2)
    for gradient in (1.0, 2.0, torch.inf, 3.0):
        assert step(ours, gradient) == step(theirs, gradient)
        assert ours.state_dict() == theirs.state_dict()
    assert ours.get_scale() == 8.0


def test_our_methods_are_not_overridden() -> None:
    """The scaler looks for overridden hooks in subclasses; a stand-in overrides none."""
    ampfast.patch()
    for kind in KINDS:
        ours = ampfast.ShardedGradScaler if kind == "sharded" else ampfast.GradScaler
        own = {"__init__", "__module__", "__doc__", "__annotations__"}
        for name in vars(ampfast.GradScaler).keys() - own:
            assert getattr(named(kind), name) is getattr(ours, name), name


def test_the_sharded_scaler_overrides_no_method() -> None:
    own = {"__init__", "__module__", "__doc__", "__annotations__", "__parameters__"}
    assert not {n for n in vars(ampfast.ShardedGradScaler).keys() - own if not n.startswith("_")}
    methods = {n for n, value in vars(ampfast.GradScaler).items() if callable(value)}
    assert not (vars(ampfast.ShardedGradScaler).keys() & methods) - own


def test_old_instances_and_classes_pass_isinstance() -> None:
    old = {kind: make(kind) for kind in KINDS}
    derived = {kind: type(f"Mine{kind}", (TORCH[kind],), {}) for kind in KINDS}
    old_derived = {kind: object.__new__(cls) for kind, cls in derived.items()}
    ampfast.patch()
    for kind in KINDS:
        for scaler in (old[kind], old_derived[kind], make(kind)):
            assert isinstance(scaler, torch.amp.GradScaler)
            assert isinstance(scaler, torch.GradScaler | None)
            assert issubclass(type(scaler), torch.amp.GradScaler)
        assert isinstance(old[kind], named(kind))
        assert isinstance(old_derived[kind], named(kind))
        assert issubclass(derived[kind], named(kind))


def test_isinstance_stays_false_where_it_was() -> None:
    old = {kind: make(kind) for kind in KINDS}
    ampfast.patch()
    new = {kind: make(kind) for kind in KINDS}
    mine = type("Mine", (torch.amp.GradScaler,), {})
    for scalers in (old, new):
        for kind in LEGACY:
            assert not isinstance(scalers["amp"], named(kind))
        assert not isinstance(scalers["cuda"], torch.cpu.amp.GradScaler)
        assert not isinstance(scalers["cpu"], torch.cuda.amp.GradScaler)
        assert not any(isinstance(scaler, mine) for scaler in scalers.values())
    assert not any(isinstance(scaler, ampfast.GradScaler) for scaler in old.values())
    assert not isinstance(torch.ones(1), torch.amp.GradScaler)
    assert not issubclass(torch.amp.GradScaler, mine)


@pytest.mark.parametrize("kind", KINDS)
def test_isinstance_outlives_the_patch(kind: str) -> None:
    with ampfast.patch():
        scaler = make(kind)
        assert isinstance(scaler, TORCH[kind])
    assert isinstance(scaler, named(kind))
    assert step(make("amp"), 1.0) == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_signatures_begin_with_torchs(kind: str) -> None:
    theirs = list(inspect.signature(TORCH[kind]).parameters.values())
    ampfast.patch()
    for callee in (named(kind), named(kind).__init__):
        ours = [p for p in inspect.signature(callee).parameters.values() if p.name != "self"]
        both = zip(ours, theirs, strict=False)
        assert [(a.name, a.default, a.kind) for a, _ in both] == [
            (b.name, b.default, b.kind) for b in theirs
        ]
        extra = {p.kind for p in ours[len(theirs) :]}
        assert extra <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


def test_device_by_keyword() -> None:
    ampfast.patch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = getattr(torch, "amp").GradScaler(device="cuda")  # noqa: B009
    assert isinstance(scaler, ampfast.GradScaler)
    assert scaler._device == "cuda"


@pytest.mark.parametrize("kind", LEGACY)
def test_init_scale_is_first(kind: str) -> None:
    def settings() -> list[object]:
        scaler = make(kind, 4.0, 3.0, 0.25, 7, False)
        by_name = make(kind, 4.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
        by_place = make(kind, 4.0, 3.0, 0.25, 7)
        assert by_place.state_dict() == by_name.state_dict()
        return [scaler._device, scaler.is_enabled(), by_name._device, by_name.state_dict()]

    theirs = settings()
    ampfast.patch()
    assert settings() == theirs


@pytest.mark.parametrize("kind", LEGACY)
def test_wrong_arguments_of_the_deprecated_names(kind: str) -> None:
    ampfast.patch()
    for wrong in ({"nonsense": 1}, {"device": "cpu"}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            make(kind, **wrong)
    with pytest.raises(TypeError, match="positional"):
        named(kind).__init__.__wrapped__(make(kind), 4.0, 2.0, 0.5, 7, True, None)


@pytest.mark.parametrize("kind", KINDS)
def test_our_keywords(kind: str) -> None:
    ampfast.patch()
    assert isinstance(make(kind, backend="aten", allow_fp16=True), ampfast.GradScaler)
    with pytest.raises(TypeError, match="allow_fp16"):
        make(kind, allow_fp16="yes")
    with pytest.raises(ValueError, match="nonsense"):
        make(kind, backend="nonsense")


@pytest.mark.parametrize("kind", LEGACY)
def test_the_deprecation_is_torchs(kind: str) -> None:
    class Old(TORCH[kind]):
        def __init__(self) -> None:
            super().__init__(enabled=False)

    def direct() -> None:
        named(kind)(enabled=False)

    theirs, text = warned(direct), named(kind).__init__.__deprecated__
    derived = warned(Old)
    assert [w[0] for w in theirs] == [FutureWarning]
    assert theirs[0][2] == __file__
    ampfast.patch()
    assert warned(direct) == theirs
    assert named(kind).__init__.__deprecated__ == text == theirs[0][1]

    class New(named(kind)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(enabled=False)

    ours = warned(New)
    assert [w[:3] for w in ours] == [w[:3] for w in derived]
    assert ours[0][3] == New.__init__.__code__.co_firstlineno + 1


def test_a_missing_device_warns_at_the_callers_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")
    ampfast.patch()
    _, missing = warned(lambda: torch.cuda.amp.GradScaler())
    assert "CUDA is not available" in missing[1]
    assert missing[2] == __file__


def test_the_current_name_does_not_warn() -> None:
    ampfast.patch()
    assert warned(lambda: torch.amp.GradScaler("cpu")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_subclassing_a_patched_name(kind: str) -> None:
    before = type("Before", (TORCH[kind],), {"before": True})
    with ampfast.patch():
        base = named(kind)

        class Mine(base):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.steps = 0

            def step(self, *args: Any, **kwargs: Any) -> Any:
                self.steps += 1
                return super().step(*args, **kwargs)

        class Mixed(Mine, before):  # type: ignore[misc, valid-type]
            pass

        device = () if kind in LEGACY else ("cpu",)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine, mixed = Mine(*device, 8.0), Mixed(*device, 8.0)
        assert mixed.before
        for scaler in (mine, mixed):
            assert isinstance(scaler, ampfast.GradScaler)
            assert isinstance(scaler, base)
            assert isinstance(scaler, Mine)
    for scaler in (mine, mixed):
        assert isinstance(scaler, named(kind))
        if scaler.is_enabled():
            assert scaler.get_scale() == 8.0
        assert step(scaler, 1.0) == [0.0, 0.0]
        assert scaler.steps == 1


def test_subclassing_with_other_metaclasses() -> None:
    ampfast.patch()

    class Checkpointed(torch.amp.GradScaler, Stateful):
        pass

    class Abstract(torch.amp.GradScaler, abc.ABC):
        @abc.abstractmethod
        def name(self) -> str: ...

    assert isinstance(Checkpointed("cpu"), Stateful)
    assert isinstance(Checkpointed("cpu"), ampfast.GradScaler)
    with pytest.raises(TypeError, match="abstract"):
        Abstract("cpu")


def test_dispatch_by_type() -> None:
    old = make("amp")
    ampfast.patch()

    @functools.singledispatch
    def kind(scaler: object) -> str:
        return "other"

    kind.register(torch.amp.GradScaler, lambda scaler: "amp")
    kind.register(torch.cuda.amp.GradScaler, lambda scaler: "cuda")
    assert kind(make("amp")) == kind(old) == "amp"
    assert kind(make("cuda")) == "cuda"
    assert kind(1) == "other"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", KINDS)
class TestPickle:
    """Whole scalers, pickled by the name of their class."""

    def test_torchs_loads_as_ours(self, kind: str, protocol: int) -> None:
        old = make(kind)
        step(old, torch.inf)
        data = pickle.dumps(old, protocol)
        ampfast.patch()
        new = pickle.loads(data)
        assert type(new) is named(kind)
        assert new.state_dict() == old.state_dict()
        assert step(new, 1.0) == step(old, 1.0) == [0.0, 0.0]
        assert new.state_dict() == old.state_dict()
        assert pickle.loads(pickle.dumps(new, protocol)).state_dict() == new.state_dict()

    def test_ours_loads_patched_or_not(self, kind: str, protocol: int) -> None:
        with ampfast.patch():
            new = make(kind)
            step(new, torch.inf)
            data = pickle.dumps(new, protocol)
            assert type(pickle.loads(data)) is type(new)
        for scaler in (
            pickle.loads(data),
            pickle.loads(pickle.dumps(new, protocol)),
            copy.deepcopy(new),
        ):
            assert type(scaler) is type(new)
            assert scaler.state_dict() == new.state_dict()
            assert step(scaler, 1.0) == [0.0, 0.0]

    def test_an_old_instance_stays_torchs(self, kind: str, protocol: int) -> None:
        old = make(kind)
        step(old, torch.inf)
        expected = vars(pickle.loads(pickle.dumps(old, protocol)))
        with ampfast.patch():
            data = pickle.dumps(old, protocol)
            copies = [pickle.loads(data), copy.deepcopy(old), copy.copy(old)]
        for scaler in (*copies, pickle.loads(data)):
            assert type(scaler) is TORCH[kind]
            assert vars(scaler) == expected
        assert pickle.dumps(old, protocol) != data

    def test_the_class_itself(self, kind: str, protocol: int) -> None:
        ampfast.patch()
        assert pickle.loads(pickle.dumps(named(kind), protocol)) is named(kind)


def checkpoint(scaler: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(scaler, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("kind", KINDS)
class TestTorchLoad:
    """Whole scalers in a checkpoint."""

    def test_torchs_loads_by_safe_globals(self, kind: str) -> None:
        old = make(kind)
        step(old, torch.inf)
        file = checkpoint(old)
        # A disabled one, as of CUDA where there is none, has no entries.
        entries = [old._per_optimizer_states.default_factory] if old._enabled else []
        ampfast.patch()
        for is_safe in (True, False):
            file.seek(0)
            with torch.serialization.safe_globals([named(kind), defaultdict, *entries]):
                new = torch.load(file, weights_only=is_safe)
            assert type(new) is named(kind)
            assert new.state_dict() == old.state_dict()
            assert step(new, 1.0) == [0.0, 0.0]

    def test_no_class_is_safe_by_itself(self, kind: str) -> None:
        file = checkpoint(make(kind))
        ampfast.patch()
        with pytest.raises(pickle.UnpicklingError, match="was not an allowed global"):
            torch.load(file, weights_only=True)

    def test_ours_loads_by_the_globals_that_torch_names(self, kind: str) -> None:
        ampfast.patch()
        new = make(kind)
        step(new, torch.inf)
        file = checkpoint(new)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        found = [named(kind), *((pkgutil.resolve_name(name), name) for name in names)]
        for is_safe in (True, False):
            file.seek(0)
            with torch.serialization.safe_globals(found):
                loaded = torch.load(file, weights_only=is_safe)
            assert type(loaded) is type(new)
            assert loaded.state_dict() == new.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_of_an_older_torch_has_no_device(kind: str) -> None:
    old = make(kind)
    del old._device
    data = pickle.dumps(old)
    with ampfast.patch():
        new = pickle.loads(data)
    new.check_ranks()
    assert new._device == "cuda"
    assert step(new, 1.0) == [0.0, 0.0]


def test_a_subclass_is_pickled_by_its_own_name(module: Callable[..., ModuleType]) -> None:
    code = "import torch\nclass {}(torch.amp.GradScaler): pass"
    user = module("user", code.format("Before"))
    before = user.Before("cpu", 4.0)
    with ampfast.patch():
        late = module("late", code.format("After"))
        after = late.After("cpu", 4.0)
        data = [pickle.dumps(scaler) for scaler in (before, after)]
        assert [type(pickle.loads(d)) for d in data] == [user.Before, late.After]
    assert [type(pickle.loads(d)) for d in data] == [user.Before, late.After]


def test_a_reducer_of_someone_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(scaler: object) -> tuple[Any, ...]:
        return str, ("theirs",)

    before = dict(copyreg.dispatch_table)
    with ampfast.patch():
        pass
    assert copyreg.dispatch_table == before
    old = make("amp")
    monkeypatch.setitem(copyreg.dispatch_table, TORCH["amp"], theirs)
    with ampfast.patch():
        assert pickle.loads(pickle.dumps(old)) == "theirs"
    assert copyreg.dispatch_table[TORCH["amp"]] is theirs
