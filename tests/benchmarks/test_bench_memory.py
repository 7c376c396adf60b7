"""Benchmark of memory: one call in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import pytest
import torch

from ampfast.backends import cpu
from benchmarks import memory


@pytest.fixture
def trimmed():
    """Returns free heap memory to the system, which would hide the growth to be measured."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.usefixtures("trimmed")
def test_memory_sees_a_copy_and_only_a_copy():
    # Large enough for the allocator to take a copy from the system and return it.
    gradients = [torch.ones(1 << 24) for _ in range(2)]
    largest = gradients[0].nbytes
    nothing = memory.usage_of_call(lambda gradients: gradients[0].mul_(2), gradients)
    assert nothing.list_bytes == 2 * largest
    assert nothing.allocated_bytes < 4096
    # Copies live one at a time, so the peak is one copy.
    copies = memory.usage_of_call(
        lambda gradients: [(g + 1)[0].item() for g in gradients], gradients
    )
    assert largest <= copies.allocated_bytes < 2 * largest
    if memory.CLEAR_REFS.exists():
        assert nothing.extra_bytes < largest / 2 < copies.extra_bytes


def test_the_core_keeps_less_than_64_bytes_for_each_chunk_of_a_list():
    gradients = [torch.ones(1024) for _ in range(1000)]
    grads = cpu.list_of(gradients, torch.device("cpu"))
    assert cpu.DeviceTable.of(grads, 1, False).buffer.nbytes < 64 * grads.chunks


def test_memory_is_measured_in_a_process_of_its_own():
    measured = memory.measure("1000x1k", "check", "cpu")
    (row,) = measured.rows
    assert row.name == ("memory", "1000x1k", "float32", "check", "ampfast")
    assert row.list_bytes == 4096 * 1000
    assert measured.goals == [], "the list is too small"
