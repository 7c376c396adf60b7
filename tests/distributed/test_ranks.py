"""The runner of these ranks: errors and crashes."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path

import pytest
import ranks
import torch.distributed as dist


def fails(how: str) -> None:
    if dist.get_rank() == 1:
        print("goodbye", flush=True)
        if how == "dies":
            os._exit(7)
        raise LookupError("nothing here")


@pytest.mark.parametrize(
    ("how", "error", "details"),
    [("raises", "LookupError: nothing here", "in fails"), ("dies", "exit code 7", "goodbye")],
)
def test_a_rank_that_fails_tells_how(how: str, error: str, details: str) -> None:
    first, second = ranks.attempt(fails, how)
    assert first.error is None
    assert second.error == error
    assert details in second.details
    if how == "raises":
        with pytest.raises(ranks.RanksFailedError, match="rank 1: LookupError: nothing here"):
            ranks.run(fails, how)


def crashes(sign: Path) -> int:
    """Crashes in its first run, on rank 1, by reading at address 0 in a thread of its own."""
    if dist.get_rank() == 1 and not sign.exists():
        sign.touch()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, libc.strlen, None)
        time.sleep(600)
    dist.barrier()
    return dist.get_rank()


def test_a_crash_in_a_thread_of_torch_is_reported_and_retried(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="once more") as text:
        assert ranks.run(crashes, tmp_path / "sign") == [0, 1]
    assert "frame #0: " in str(text[0].message)
