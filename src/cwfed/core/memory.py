"""Memory that is used again: fresh pages from the system take longer than to fill them, above all in a virtual machine."""

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
"""Bytes of a tensor from which on its memory is worth keeping; a smaller one's comes from the heap anyway."""
KEPT = 2**30
"""Bytes that a thread's heap keeps at its end after they were freed; the system's default is a few hundred kilobytes."""
IN_HEAP = 2**25
"""Bytes up to which a block is of the heap: the most that glibc allows. Larger ones go back to the system at once."""
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""As malloc.h has them."""


@cache
def keep_freed() -> None:
    """Let the heap keep what is freed (glibc): else a step's gradients are given back after each step and fetched again.

    Who has set glibc's own environment variables for it has decided already.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return
    with suppress(OSError, AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, IN_HEAP)
        mallopt(TRIM_THRESHOLD, KEPT)


class Shelf:
    """Memory for large tensors by name. What nobody looks at any more is given out again, and is not zero then.

    Whoever still has a tensor, or a view of one, keeps its memory: a name has as much as is in use at once.
    """

    def __init__(self) -> None:
        self._free: defaultdict[str, list[mmap.mmap]] = defaultdict(list)

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with whatever is in its memory."""
        size = prod(shape) * dtype.itemsize
        if size < LARGE:
            return torch.empty(shape, dtype=dtype)
        free = self._free[name]
        memory = free.pop() if free else None
        if memory is None or len(memory) < size:
            memory = _pages(size)
        seen = np.frombuffer(memory, np.uint8, size)  # torch lets go of it with the last tensor that shows it
        weakref.finalize(seen, free.append, memory).atexit = False
        return torch.from_numpy(seen).view(dtype).view(shape)

    def clear(self) -> None:
        """Give back what nobody uses."""
        self._free.clear()


def _pages(size: int) -> mmap.mmap:
    """Memory of our own, in large pages where there are some: a table's rows are looked up all over it."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
