"""One thread, as on a busy machine more threads take ten times as long; a small cache; signals."""

from __future__ import annotations

import signal

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import kernels


@pytest.fixture(autouse=True)
def one_thread_of_the_cpu(monkeypatch):
    """Limits threads, device, and the cache, which lists overflow; undoes changes of signals."""
    monkeypatch.setattr(command, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 1 << 13)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    torch.set_num_threads(threads)
