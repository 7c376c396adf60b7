"""`ampfast.patch()`: names that it replaces, and classes that it leaves to torch."""

from __future__ import annotations

import importlib.util
import pickle
import random
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.sharded_grad_scaler as sharded
from originals import NAMES, TORCH, is_patched, meaning, run, snapshot

import ampfast


class TestNames:
    """Names that are replaced or left alone."""

    @pytest.mark.parametrize("name", NAMES)
    def test_every_name_of_torch(self, name: str) -> None:
        torchs = TORCH[NAMES[name]]
        assert meaning(name) is torchs
        patch = ampfast.patch()
        assert issubclass(meaning(name), ampfast.GradScaler)
        assert ampfast.GradScaler in meaning(name).__mro__
        assert name in patch.replaced
        ampfast.unpatch()
        assert meaning(name) is torchs

    def test_no_module_but_ours_still_holds_torchs(self) -> None:
        with ampfast.patch():
            left = [name for name, cls in snapshot().items() if cls in TORCH.values()]
        assert [name for name in left if not name.startswith("ampfast.")] == []
        assert left != []

    def test_names_of_the_same_class_stay_the_same_class(self) -> None:
        ampfast.patch()
        for kind in TORCH:
            assert len({meaning(name) for name in NAMES if NAMES[name] == kind}) == 1

    def test_our_own_names_stay(self) -> None:
        def ours() -> dict[str, Any]:
            return {name: cls for name, cls in snapshot().items() if name.startswith("ampfast")}

        before = ours()
        assert {"ampfast.GradScaler", "ampfast.grad_scaler.GradScaler"} <= set(before)
        ampfast.patch()
        assert ours() == before

    def test_import_patches_nothing(self) -> None:
        run(
            """
            import torch
            before = torch.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler
            import ampfast, ampfast.patch
            assert torch.GradScaler is torch.amp.GradScaler is torch.amp.grad_scaler.GradScaler
            assert before == (torch.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler)
            assert not issubclass(torch.GradScaler, ampfast.GradScaler)
            """
        )

    def test_names_that_modules_hold_already(self, module: Callable[..., ModuleType]) -> None:
        code = """
            from torch import GradScaler as G
            from torch.amp import GradScaler
            from torch.cuda.amp import GradScaler as Scaler
            from torch.cpu.amp.grad_scaler import GradScaler as _cpu
            other = int
        """
        user = module("user", code)
        before = dict(vars(user))
        patch = ampfast.patch()
        assert user.G is user.GradScaler is torch.amp.GradScaler
        assert user.Scaler is torch.cuda.amp.GradScaler
        assert user._cpu is torch.cpu.amp.GradScaler
        assert user.other is int
        names = {"user.G", "user.GradScaler", "user.Scaler", "user._cpu"}
        assert names == {name for name in patch.replaced if name.startswith("user.")}
        ampfast.unpatch()
        assert vars(user) == before

    def test_names_of_the_program_itself(self) -> None:
        run(
            """
            from torch.cuda.amp import GradScaler
            import ampfast
            theirs = [GradScaler]
            with ampfast.patch() as patch:
                assert issubclass(GradScaler, ampfast.GradScaler)
                assert "__main__.GradScaler" in patch.replaced
            assert GradScaler is theirs[0]
            """
        )

    def test_strange_modules(
        self, module: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Untouchable:
            __hash__ = None

            def __getattribute__(self, name: str) -> Any:
                raise RuntimeError(name)

            def __eq__(self, other: object) -> bool:
                raise RuntimeError("==")

        class Lazy(ModuleType):
            def __getattribute__(self, name: str) -> Any:
                raise RuntimeError(name)

            def __setattr__(self, name: str, value: Any) -> None:
                raise RuntimeError(name)

            @property
            def __dict__(self) -> Any:
                raise RuntimeError("__dict__")

        monkeypatch.setitem(sys.modules, "strange.none", None)
        monkeypatch.setitem(sys.modules, "strange.object", Untouchable())
        module("strange.values").value = Untouchable()
        module("strange.getattr", "def __getattr__(name): raise RuntimeError(name)")
        lazy = module("strange.lazy", "from torch.amp import GradScaler", Lazy("strange.lazy"))
        ampfast.patch()
        namespace = ModuleType.__dict__["__dict__"].__get__(lazy)
        assert namespace["GradScaler"] is torch.amp.GradScaler
        ampfast.unpatch()
        assert namespace["GradScaler"] is TORCH["amp"]

    def test_a_lazy_import_stays_lazy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "this"
        monkeypatch.delitem(sys.modules, name, raising=False)
        spec = importlib.util.find_spec(name)
        spec.loader = importlib.util.LazyLoader(spec.loader)
        lazy = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, lazy)
        spec.loader.exec_module(lazy)
        with ampfast.patch():
            pass
        assert type(lazy) is not ModuleType
        assert "zen" not in object.__getattribute__(lazy, "__dict__")

    def test_modules_that_change_meanwhile(self, module: Callable[..., ModuleType]) -> None:
        busy, stop = module("busy"), threading.Event()

        def change() -> None:
            while not stop.is_set():
                name = f"name{random.randrange(1000)}"
                vars(busy)[name] = 1
                vars(busy).pop(f"name{random.randrange(1000)}", None)
                sys.modules[f"busy.{name}"] = busy
                sys.modules.pop(f"busy.name{random.randrange(1000)}", None)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        thread = threading.Thread(target=change)
        thread.start()
        try:
            for _ in range(10):
                with ampfast.patch():
                    assert is_patched()
        finally:
            stop.set()
            thread.join()
            sys.setswitchinterval(interval)
            for name in [name for name in sys.modules if name.startswith("busy.")]:
                del sys.modules[name]

    def test_repr_tells_the_whole_story(self, module: Callable[..., ModuleType]) -> None:
        module("user", "import torch\nclass Mine(torch.amp.GradScaler): pass")
        patch = ampfast.patch()
        assert repr(patch).startswith("<ampfast.patch(): ")
        for part in ("'torch.amp.GradScaler'", "user.Mine", "kept=[]", ".ShardedGradScaler'"):
            assert part in repr(patch)


class TestDerivedBefore:
    """Subclasses that exist before the patch."""

    def test_all_are_listed_once(self, module: Callable[..., ModuleType]) -> None:
        code = """
            import ampfast, torch
            class Mine(torch.amp.GradScaler): pass
            class Cuda(torch.cuda.amp.GradScaler): pass
            class Both(Mine, Cuda): pass
            class Ours(ampfast.GradScaler): pass
            class Mixed(Ours, Mine): pass
        """
        user = module("user", code)
        derived = ampfast.patch().derived_before
        assert [cls for cls in derived if cls.__module__ == "user"] != []
        assert {user.Mine, user.Cuda, user.Both} <= set(derived)
        assert len(set(derived)) == len(derived)
        assert not {user.Ours, user.Mixed} & set(derived)
        assert not any(cls in TORCH.values() for cls in derived)
        assert not any(cls.__module__.startswith("ampfast") for cls in derived)

    def test_classes_derived_while_patched_are_not(self) -> None:
        with ampfast.patch():
            derived = type("Derived", (torch.cuda.amp.GradScaler,), {})
        assert derived not in ampfast.patch().derived_before

    def test_explicit_calls_of_the_base_class(self, module: Callable[..., ModuleType]) -> None:
        code = """
            import functools
            from torch.amp import GradScaler
            from torch.amp import GradScaler as Wrapped, GradScaler as Nested, GradScaler as Free

            def decorate(function):
                @functools.wraps(function)
                def wrapper(*args, **kwargs):
                    return function(*args, **kwargs)
                return wrapper

            class Mine(GradScaler):
                def __init__(self):
                    GradScaler.__init__(self, "cpu", init_scale=8.0)

                @decorate
                def get_scale(self):
                    return Wrapped.get_scale(self)

                def state_dict(self):
                    return (lambda: Nested.state_dict(self))()
        """
        user = module("user", code)
        patch = ampfast.patch()
        mine = user.Mine()
        assert mine.get_scale() == mine.state_dict()["scale"] == 8.0
        assert isinstance(torch.amp.GradScaler("cpu"), user.GradScaler)
        kept = ["user.GradScaler", "user.Nested", "user.Wrapped"]
        assert sorted(patch.kept) == kept
        assert user.Free is torch.amp.GradScaler
        assert not set(kept) & set(patch.replaced)


class TestFSDP:
    """FSDP's scaler, in a module of its own."""

    def test_the_name_is_taken_and_given_back(self, module: Callable[..., ModuleType]) -> None:
        user = module(
            "user",
            f"from {sharded.__name__} import ShardedGradScaler as Scaler; mine = Scaler('cpu')",
        )
        with ampfast.patch() as patch:
            assert f"{sharded.__name__}.ShardedGradScaler" in patch.replaced
            assert "user.Scaler" in patch.replaced
            assert sharded.ShardedGradScaler is user.Scaler
            scaler = user.Scaler("cpu")
            assert isinstance(scaler, ampfast.ShardedGradScaler)
            assert isinstance(scaler, torch.amp.GradScaler)
            assert isinstance(user.mine, user.Scaler)
            assert not isinstance(torch.amp.GradScaler("cpu"), user.Scaler)
            assert type(scaler).__qualname__ == "ShardedGradScaler"
        assert sharded.ShardedGradScaler is user.Scaler is TORCH["sharded"]
        assert isinstance(scaler, TORCH["sharded"])

    def test_torchs_pickles_load(self) -> None:
        pickled = pickle.dumps(TORCH["sharded"]("cpu", init_scale=4.0))
        with ampfast.patch():
            scaler = pickle.loads(pickled)
            assert type(scaler) is sharded.ShardedGradScaler
        assert scaler.get_scale() == 4.0

    def test_it_works_in_a_program_that_imports_it_later(self) -> None:
        run(
            """
            import tempfile, torch, ampfast
            ampfast.patch()
            import torch.distributed as dist
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
            assert issubclass(ShardedGradScaler, ampfast.ShardedGradScaler)
            with tempfile.TemporaryDirectory() as folder:
                dist.init_process_group("gloo", f"file://{folder}/s", rank=0, world_size=1)
                p = torch.nn.Parameter(torch.ones(3))
                optimizer = torch.optim.SGD([p], lr=1.0)
                scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=dist.group.WORLD)
                for gradient, scale in ((1.0, 4.0), (torch.inf, 2.0)):
                    scaler.scale((p * gradient).sum()).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    assert scaler.get_scale() == scale
                assert p.tolist() == [0.0] * 3
                dist.destroy_process_group()
            """
        )
