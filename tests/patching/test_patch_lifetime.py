"""`ampfast.patch()` and `ampfast.unpatch()`: when torch's names are replaced and restored."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from originals import NAMES, TORCH, is_patched, meaning, snapshot

import ampfast


def test_patching_twice_is_patching_once() -> None:
    first = ampfast.patch()
    cls = torch.amp.GradScaler
    second = ampfast.patch()
    assert torch.amp.GradScaler is cls
    assert second.replaced == first.replaced
    assert second.derived_before == first.derived_before
    ampfast.unpatch()
    assert not is_patched()


def test_unpatching_without_a_patch_does_nothing() -> None:
    before = snapshot()
    ampfast.unpatch()
    with ampfast.patch():
        pass
    ampfast.unpatch()
    assert snapshot() == before


def test_it_can_be_patched_again() -> None:
    for _ in range(3):
        with ampfast.patch() as patch:
            assert is_patched()
            assert set(NAMES) <= set(patch.replaced)
        assert not is_patched()


def test_nested_blocks() -> None:
    with ampfast.patch():
        with ampfast.patch(), ampfast.patch():
            assert is_patched()
        assert is_patched()
    assert not is_patched()


def test_a_block_in_a_patched_program() -> None:
    ampfast.patch()
    with ampfast.patch():
        assert is_patched()
    assert is_patched()


def test_a_plain_call_in_a_block() -> None:
    with ampfast.patch():
        ampfast.patch()
    assert not is_patched()


def test_an_exception_in_a_block() -> None:
    with pytest.raises(ZeroDivisionError), ampfast.patch(), ampfast.patch():
        raise ZeroDivisionError
    assert not is_patched()


def test_an_interrupt_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Iterator[tuple[str, dict[str, Any]]]:
        yield "torch.amp", vars(torch.amp)
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(sys.modules["ampfast.patch"], "_namespaces", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ampfast.patch()
    assert is_patched()
    ampfast.unpatch()
    assert not is_patched()


def test_unpatching_in_a_block() -> None:
    with ampfast.patch():
        ampfast.unpatch()
        assert not is_patched()
    assert not is_patched()


def test_a_block_does_not_end_a_later_patch() -> None:
    with ampfast.patch():
        ampfast.unpatch()
        ampfast.patch()
    assert is_patched()


def test_the_result_can_be_entered_later_and_again() -> None:
    patch = ampfast.patch()
    for _ in range(2):
        with patch as entered:
            assert entered is patch
            assert is_patched()
        assert not is_patched()


def test_overlapping_blocks_end_with_the_last() -> None:
    first, second = ampfast.patch(), ampfast.patch()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_patched()
    second.__exit__(None, None, None)
    assert not is_patched()


def test_modules_loaded_while_patched(module: Callable[..., ModuleType]) -> None:
    code = """
        from torch.amp import GradScaler as amp
        from torch.cuda.amp import GradScaler as cuda
        from torch.cpu.amp import GradScaler as cpu
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as sharded
        from ampfast import GradScaler as ours
    """
    with ampfast.patch():
        late = module("late", code)
        assert late.amp is torch.amp.GradScaler
    assert {kind: getattr(late, kind) for kind in TORCH} == TORCH
    assert late.ours is ampfast.GradScaler


def test_a_module_that_was_unloaded(module: Callable[..., ModuleType]) -> None:
    user = module("user", "from torch.cpu.amp import GradScaler")
    with ampfast.patch():
        assert user.GradScaler is torch.cpu.amp.GradScaler
        del sys.modules["user"]
    assert user.GradScaler is TORCH["cpu"]


def test_names_with_another_meaning_are_left_alone(module: Callable[..., ModuleType]) -> None:
    user = module("user", "from torch.amp import GradScaler")
    with ampfast.patch():
        user.GradScaler = fake = object()
    assert user.GradScaler is fake


def test_threads() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                with ampfast.patch():
                    # This block is still open, whatever the others do.
                    assert all(issubclass(meaning(n), ampfast.GradScaler) for n in NAMES)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(6)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert not is_patched()
