"""One thread, as on a busy machine more threads take ten times as long; CPU; signals."""

from __future__ import annotations

import signal

import pytest
import torch

from benchmarks import __main__ as command


@pytest.fixture(autouse=True)
def one_thread_of_the_cpu(monkeypatch):
    """Limits torch to one thread, and the command to the CPU; undoes what it does to signals."""
    monkeypatch.setattr(command, "default_device", lambda: torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
    torch.set_num_threads(threads)
