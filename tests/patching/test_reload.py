"""`patch()` and `unpatch()` after a reload or a repeated import of ampfast, and pickles."""

from __future__ import annotations

import textwrap
from pathlib import Path

from originals import NAMES, run

# Program that may unload ampfast, and has torch's own classes.
PROGRAM = f"""
import importlib, pickle, sys, types
import torch, torch.distributed.fsdp.sharded_grad_scaler
import ampfast

def meanings():
    return [getattr(sys.modules[n.rpartition(".")[0]], n.rpartition(".")[2]) for n in {list(NAMES)}]

def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "ampfast"]:
        if not name.endswith("._C") and "triton" not in name:
            del sys.modules[name]

def train(scaler):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return p.tolist() == [0.0, 0.0]

torchs = meanings()
torch_clip = [torch.nn.utils.clip_grad_norm_, torch.nn.utils.get_total_norm]
"""


def run_program(code: str, *arguments: str) -> None:
    run(PROGRAM + textwrap.dedent(code), *arguments)


def test_imported_anew_while_patched() -> None:
    run_program(
        """
        class Mine(ampfast.GradScaler): pass
        first = ampfast.patch(clip_grad_norm=True)
        before, old = meanings(), torch.cuda.amp.GradScaler(enabled=False)
        forget()
        import ampfast
        assert meanings() == before
        assert torchs[0] in ampfast.GradScaler.__mro__
        assert torchs[-1] in ampfast.ShardedGradScaler.__mro__
        assert not set(before) & {*ampfast.GradScaler.__mro__, *ampfast.ShardedGradScaler.__mro__}
        assert train(ampfast.GradScaler("cpu")) and train(torch.amp.GradScaler("cpu"))
        assert ampfast.clip_grad.torch_clip_grad_norm_ is torch_clip[0]
        second = ampfast.patch(clip_grad_norm=True)
        assert ampfast.clip_grad.torch_get_total_norm is torch_clip[1]
        assert torch.nn.utils.clip_grad_norm_ is ampfast.clip_grad.stand_in_clip_grad_norm_
        assert ampfast.patch().replaced == second.replaced
        assert set(second.replaced) == set(first.replaced)
        assert Mine not in second.derived_before
        for torch_class, cls in zip(torchs, meanings()):
            assert {torch_class, ampfast.GradScaler} <= set(cls.__mro__)
        assert isinstance(old, torch.cuda.amp.GradScaler)
        new = torch.amp.GradScaler("cpu")
        assert train(new) and train(pickle.loads(pickle.dumps(new)))
        forget()
        import ampfast
        ampfast.unpatch()
        assert meanings() == torchs
        assert [torch.nn.utils.clip_grad_norm_, torch.nn.utils.get_total_norm] == torch_clip
        assert type(pickle.loads(pickle.dumps(torch.amp.GradScaler("cpu")))) is torchs[0]
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


def test_reloaded() -> None:
    run_program(
        """
        import ampfast.patch, ampfast.fsdp
        # An import sets the module of the same name on the package.
        for reloaded in ("ampfast", "ampfast.patch", "ampfast"):
            assert isinstance(ampfast.patch, types.FunctionType)
            importlib.reload(sys.modules[reloaded])
        from ampfast import patch
        assert isinstance(patch, types.FunctionType)
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
        assert [type(each) for each in old] == [torch.amp.GradScaler, torch.cuda.amp.GradScaler]
        for scaler, torchs in zip(new, (torch.amp.GradScaler, torch.cpu.amp.GradScaler)):
            assert isinstance(scaler, ampfast.GradScaler) and isinstance(scaler, torchs)
        """,
        str(tmp_path / "scalers"),
    )
