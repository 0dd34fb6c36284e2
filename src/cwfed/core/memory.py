"""Memory that is reused: getting fresh pages from the system takes longer than filling them, above all in a virtual machine."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import defaultdict
from contextlib import suppress
from functools import cache
from math import prod

import numpy as np
import torch
from torch import Tensor

LARGE = 2**20
"""Bytes from which on a tensor's memory is worth keeping; the memory of a smaller one comes from the heap anyway."""
KEPT = 2**30
"""Freed bytes that a thread's heap keeps at its end; the system's default is a few hundred kilobytes."""
IN_HEAP = 2**25
"""Bytes up to which a block is taken from the heap: the most that glibc allows. Larger ones go back to the system at once."""
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Constants of malloc.h."""


@cache
def keep_freed() -> None:
    """Let the heap keep freed memory (glibc): otherwise a step's gradients are returned after each step and fetched again.

    Nothing is changed if the user has set glibc's own environment variables for this.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return
    with suppress(OSError, AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, IN_HEAP)
        mallopt(TRIM_THRESHOLD, KEPT)


class Shelf:
    """Memory for large tensors, by name. Memory is reused when its tensor is garbage; it is not set to zero.

    A tensor, or a view of one, keeps its memory for as long as it is referenced: a name needs as much memory as is in use at once.
    """

    def __init__(self) -> None:
        self._free: defaultdict[str, list[mmap.mmap]] = defaultdict(list)

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with arbitrary values."""
        size = prod(shape) * dtype.itemsize
        if size < LARGE:
            return torch.empty(shape, dtype=dtype)
        free = self._free[name]
        memory = free.pop() if free else None
        if memory is None or len(memory) < size:
            memory = _pages(size)
        seen = np.frombuffer(memory, np.uint8, size)  # freed with the last tensor that uses it
        weakref.finalize(seen, free.append, memory).atexit = False
        return torch.from_numpy(seen).view(dtype).view(shape)

    def clear(self) -> None:
        """Free the memory that is not in use."""
        self._free.clear()


def _pages(size: int) -> mmap.mmap:
    """New memory, in large pages if possible: rows of a large table are looked up at random places."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
