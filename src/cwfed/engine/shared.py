"""Messages between a process and its workers: tensors and arrays are in shared memory, only the rest is pickled.

Shared memory is an unnamed file that a worker inherits when it starts, so the system frees it when the last process that has it ends,
however that ends. Arrays that are views of a file, such as the cache of decoded data, are opened again by the worker.

Unpickling is safe here: the message was pickled by this process or by a worker that it started, and came through an unnamed socket.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import tempfile
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
"""Bytes. As torch aligns its own tensors: with another alignment some libraries round differently."""
SMALL_ARRAY = 1024
"""Bytes below which an array is pickled like everything else."""
COMPARED = 2**24
"""Bytes of an array that are compared with its file at once."""


class Memory:
    """Memory that a process shares with its workers. One side writes a message, then the other reads it."""

    def __init__(self, file: int | None = None) -> None:
        self.file = _without_a_name() if file is None else file
        self._map: mmap.mmap | None = None
        self._used = 0

    def clear(self) -> None:
        """Free all of it: the next message is written over the last one."""
        self._used = 0

    def reserve(self, size: int) -> int:
        """A place for so many bytes."""
        place = -(-self._used // ALIGNMENT) * ALIGNMENT
        self._used = place + size
        if self._used > os.fstat(self.file).st_size:
            os.ftruncate(self.file, 2 * self._used)
        return place

    def view(self, end: int) -> mmap.mmap:
        """All of it, up to this place at least."""
        if self._map is None or len(self._map) < end:
            self._map = mmap.mmap(self.file, 0)  # tensors in the former view keep it alive
        return self._map

    def close(self) -> None:
        """Free it in this process."""
        self._map = None
        os.close(self.file)


def _without_a_name() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("cwfed")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


Place: TypeAlias = tuple[Any, ...]
"""Where something is: ("tensor", offset, type, shape, strides), ("array", offset, type, shape) or ("file", path, offset, type, shape)."""


def pack(message: Any, memory: Memory) -> bytes:
    """Write a message into memory, over the last one; returns a few bytes that say where it is."""
    memory.clear()
    pickled = io.BytesIO()
    _Packer(pickled, memory).dump(message)
    size = pickled.tell()
    offset = memory.reserve(size)
    memory.view(offset + size)[offset : offset + size] = pickled.getbuffer()
    return _WHERE.pack(offset, size)


def unpack(where: bytes, memory: Memory, *, copy: bool) -> Any:
    """Read the message there. Without `copy` its tensors are views of the memory, which the next message will change."""
    offset, size = _WHERE.unpack(where)
    pickled = io.BytesIO(memory.view(offset + size)[offset : offset + size])
    return _Unpacker(pickled, memory, copy).load()


_WHERE = struct.Struct("<QQ")


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """cloudpickle also knows classes and functions of a script or a notebook, which a worker could not import."""

    def __init__(self, file: io.BytesIO, memory: Memory) -> None:
        super().__init__(file, protocol=5)
        self._memory = memory
        self._placed: dict[int, tuple[Any, Place]] = {}

    def persistent_id(self, thing: Any) -> Place | None:
        if type(thing) is Tensor:
            placed = _is_plain(thing)
        else:
            placed = isinstance(thing, np.ndarray) and thing.nbytes >= SMALL_ARRAY and not thing.dtype.hasobject
        if not placed:
            return None
        if id(thing) not in self._placed:  # one object stays one object on the other side
            self._placed[id(thing)] = thing, self._place(thing)
        return self._placed[id(thing)][1]

    def _place(self, thing: Tensor | NDArray[Any]) -> Place:
        if isinstance(thing, np.ndarray):
            if mapped := _file_of(thing):
                return mapped
            place: Place = ("array", self._memory.reserve(thing.nbytes), thing.dtype.str, thing.shape)
            _array_at(place, self._memory)[...] = thing
        else:
            offset = self._memory.reserve(thing.nbytes)
            place = ("tensor", offset, thing.dtype, tuple(thing.shape), thing.stride())
            _tensor_at(place, self._memory).copy_(thing)
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Memory, copy: bool) -> None:
        super().__init__(file)
        self._memory, self._copy = memory, copy
        self._found: dict[Place, Any] = {}

    def persistent_load(self, place: Place) -> Any:
        if place not in self._found:
            self._found[place] = self._at(place)
        return self._found[place]

    def _at(self, place: Place) -> Any:
        if place[0] == "file":
            _, path, offset, dtype, shape = place
            return np.memmap(path, dtype, "c", offset, shape)
        if place[0] == "array":
            array = _array_at(place, self._memory)
            return array.copy() if self._copy else array
        tensor = _tensor_at(place, self._memory)
        return tensor.clone() if self._copy else tensor


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is fully described by numbers and strides; torch pickles all others."""
    dense = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    return dense and (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))


def _tensor_at(place: Place, memory: Memory) -> Tensor:
    _, offset, dtype, shape, strides = place
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return torch.empty(shape, dtype=dtype)
    view = memory.view(offset + count * dtype.itemsize)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=offset).as_strided(shape, strides)


def _array_at(place: Place, memory: Memory) -> NDArray[Any]:
    _, offset, dtype, shape = place
    count = int(np.prod(shape, dtype=np.int64))
    view = memory.view(offset + count * np.dtype(dtype).itemsize)
    return np.frombuffer(view, dtype, count, offset).reshape(shape)


def _file_of(array: NDArray[Any]) -> Place | None:
    """The file that an array is a view of; None if there is none, or if the view was written to since."""
    base: object = array.base  # for a slice of a view this is the view itself
    if not (isinstance(array, np.memmap) and isinstance(base, mmap.mmap) and array.flags.c_contiguous):
        return None
    path, offset = os.path.abspath(array.filename or ""), int(array.offset)
    try:
        there = np.memmap(path, array.dtype, "r", offset, array.shape)
    except (OSError, ValueError):
        return None
    here, said = (which.reshape(-1).view(np.uint8) for which in (array, there))
    parts = (slice(at, at + COMPARED) for at in range(0, len(here), COMPARED))
    same = all(np.array_equal(here[part], said[part]) for part in parts)
    return ("file", path, offset, array.dtype.str, array.shape) if same else None
