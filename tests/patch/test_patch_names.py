"""`patch()` and `unpatch()`: when names of torch's scalers are replaced, restored or left alone."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from originals import NAMES, TORCH, is_patched, meaning, snapshot

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


def test_results_are_blocks() -> None:
    first, second = ampfast.patch(), ampfast.patch()
    assert (second.replaced, second.derived_before) == (first.replaced, first.derived_before)
    with second:
        assert is_patched()
    assert is_patched(), "the first one ends it"
    with pytest.raises(ZeroDivisionError), first as entered:
        assert entered is first and set(NAMES) <= set(first.replaced)
        raise ZeroDivisionError
    assert not is_patched()


def test_classes_derived_before_are_listed_once(module: Callable[..., ModuleType]) -> None:
    code = """
        import ampfast, torch
        class Mine(torch.amp.GradScaler): pass
        class Cuda(torch.cuda.amp.GradScaler): pass
        class Both(Mine, Cuda): pass
        class Ours(ampfast.GradScaler): pass
        class Mixed(Ours, Mine): pass
    """
    user = module("user", code)
    with ampfast.patch() as patch:
        derived = patch.derived_before
        assert {user.Mine, user.Cuda, user.Both} <= set(derived)
        assert len(set(derived)) == len(derived)
        assert not {user.Ours, user.Mixed, *TORCH.values()} & set(derived)
        assert not any(cls.__module__.startswith("ampfast") for cls in derived)
        late = type("Late", (torch.cuda.amp.GradScaler,), {})
        assert repr(patch).startswith("Patch(replaced=[")
        for part in ("'torch.amp.GradScaler'", "user.Mine", ".ShardedGradScaler'"):
            assert part in repr(patch)
    assert late not in ampfast.patch().derived_before
