"""`patch()` and `unpatch()` after a reload or a repeated import of ampfast."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from originals import NAMES, run

# Program that may unload ampfast, and has torch's own classes.
PROGRAM = f"""
import importlib, pickle, sys
import torch, torch.distributed.fsdp.sharded_grad_scaler
import ampfast

def meanings():
    return [getattr(sys.modules[n.rpartition(".")[0]], n.rpartition(".")[2]) for n in {list(NAMES)}]

def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "ampfast"]:
        del sys.modules[name]

def train(scaler):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return p.tolist() == [0.0, 0.0]

torchs = meanings()
"""


def run_program(code: str, *arguments: str) -> None:
    run(PROGRAM + textwrap.dedent(code), *arguments)


class TestImportedAnew:
    """ampfast removed from `sys.modules` while patched, and imported again."""

    def test_its_classes_derive_from_torchs(self) -> None:
        run_program(
            """
            ampfast.patch()
            before = meanings()
            forget()
            import ampfast
            assert meanings() == before
            assert torchs[0] in ampfast.GradScaler.__mro__
            assert torchs[-1] in ampfast.ShardedGradScaler.__mro__
            for cls in (ampfast.GradScaler, ampfast.ShardedGradScaler):
                assert not set(before) & set(cls.__mro__)
            assert train(ampfast.GradScaler("cpu")) and train(torch.amp.GradScaler("cpu"))
            """
        )

    def test_unpatch(self) -> None:
        run_program(
            """
            ampfast.patch()
            forget()
            import ampfast
            ampfast.unpatch()
            assert meanings() == torchs
            old = torch.amp.GradScaler("cpu")
            assert type(pickle.loads(pickle.dumps(old))) is torchs[0]
            """
        )

    def test_patch_takes_the_new_classes(self) -> None:
        run_program(
            """
            class Mine(ampfast.GradScaler): pass
            first = ampfast.patch()
            old = torch.cuda.amp.GradScaler(enabled=False)
            forget()
            import ampfast
            second = ampfast.patch()
            assert ampfast.patch().replaced == second.replaced == first.replaced
            assert Mine not in second.derived_before
            for torch_class, cls in zip(torchs, meanings()):
                assert issubclass(cls, ampfast.GradScaler)
                assert {torch_class, ampfast.GradScaler} <= set(cls.__mro__)
            assert isinstance(old, torch.cuda.amp.GradScaler)
            new = torch.amp.GradScaler("cpu")
            assert train(new) and train(pickle.loads(pickle.dumps(new)))
            ampfast.unpatch()
            assert meanings() == torchs
            """
        )

    def test_a_block_of_the_old_one(self) -> None:
        run_program(
            """
            with ampfast.patch():
                forget()
                import ampfast
            assert meanings() == torchs
            with ampfast.patch():
                forget()
                import ampfast
                ampfast.patch()
            assert issubclass(torch.amp.GradScaler, ampfast.GradScaler)
            """
        )


def test_reload_while_patched() -> None:
    run_program(
        """
        import ampfast.fsdp
        scaler = ["ampfast.grad_scaler", "ampfast.fsdp", "ampfast.patch", "ampfast"]
        for modules in (["ampfast.patch"], ["ampfast.patch", "ampfast"], scaler):
            ampfast.patch()
            for name in modules:
                importlib.reload(sys.modules[name])
            ampfast.unpatch()
            assert meanings() == torchs, modules
            with ampfast.patch():
                assert all(issubclass(cls, ampfast.GradScaler) for cls in meanings()), modules
        """
    )


@pytest.mark.parametrize("first", ["import ampfast", "import ampfast.patch"])
def test_the_function_is_not_shadowed_by_its_module(first: str) -> None:
    """An import sets the module of the same name on the package."""
    run(
        f"""
        {first}
        import importlib, sys, types
        import ampfast.patch
        for reloaded in ("ampfast", "ampfast.patch", "ampfast"):
            assert isinstance(ampfast.patch, types.FunctionType)
            importlib.reload(sys.modules[reloaded])
        from ampfast import patch
        assert isinstance(patch, types.FunctionType)
        assert isinstance(ampfast.patch, types.FunctionType)
        """
    )


def test_pickles_load_in_a_program_that_is_not_patched(tmp_path: Path) -> None:
    run_program(
        """
        old = [torchs[0]("cpu"), torchs[4](enabled=False)]
        ampfast.patch()
        new = [torch.amp.GradScaler("cpu"), torch.cpu.amp.GradScaler(enabled=False)]
        with open(sys.argv[1], "wb") as file:
            pickle.dump([old, new], file)
        """,
        str(tmp_path / "scalers"),
    )
    run(
        """
        import pickle, sys, torch
        with open(sys.argv[1], "rb") as file:
            old, new = pickle.load(file)
        import ampfast
        for scaler, torchs in zip(old, (torch.amp.GradScaler, torch.cuda.amp.GradScaler)):
            assert type(scaler) is torchs
        for scaler, torchs in zip(new, (torch.amp.GradScaler, torch.cpu.amp.GradScaler)):
            assert isinstance(scaler, ampfast.GradScaler) and isinstance(scaler, torchs)
        """,
        str(tmp_path / "scalers"),
    )
