"""Ranges of CPU memory that kernels may access."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

__all__ = ["Range", "merged"]


class Range(ctypes.Structure):
    """Range of CPU memory that a launch may read, and perhaps write.

    Args:
        address: First byte.
        bytes: Number of bytes.
        may_write: Whether writes are allowed, too.
    """

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_int64),
        ("may_write", ctypes.c_int64),
    )

    @classmethod
    def of(cls, buffer: Any, *, may_write: bool = True) -> Range:
        """Returns the memory of a buffer.

        Args:
            buffer: CPU tensor, from its first to its last element in memory, or an object with a
                writable contiguous buffer, such as a numpy array.
            may_write: Whether writes are allowed, too.

        Raises:
            TypeError: If it has no such memory.
        """
        if hasattr(buffer, "data_ptr"):
            if buffer.device.type != "cpu":
                raise TypeError(f"kernels run on CPU tensors, got one on {buffer.device}")
            strides = zip(buffer.shape, buffer.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in strides)
            elements = last + 1 if buffer.numel() else 0
            return cls(buffer.data_ptr(), elements * buffer.itemsize, may_write)
        try:
            with memoryview(buffer) as view:
                size = view.nbytes
            first = ctypes.c_char.from_buffer(buffer)
        except (TypeError, ValueError, BufferError) as error:
            raise TypeError(f"no memory to give to a kernel: {error}") from error
        return cls(ctypes.addressof(first), size, may_write)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Joins overlapping ranges; one of them suffices to make the whole writable."""
    joined: list[Range] = []
    for part in sorted(ranges, key=lambda part: part.address):
        end = part.address + part.bytes
        if joined and part.address < joined[-1].address + joined[-1].bytes:
            last = joined[-1]
            last.bytes = max(last.bytes, end - last.address)
            last.may_write |= part.may_write
        else:
            joined.append(Range(part.address, part.bytes, part.may_write))
    return joined
