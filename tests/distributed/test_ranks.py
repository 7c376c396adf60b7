"""The runner of these ranks: errors."""

from __future__ import annotations

import os

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
