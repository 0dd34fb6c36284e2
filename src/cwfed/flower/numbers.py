"""Tensors in the messages of a simulation, which are pickled between processes, without a file format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType
from numpy.typing import NDArray
from torch import Tensor

from cwfed.core.types import Params

SMALL = 2**16
"""Bytes up to which numbers are copied out of Ray's store, so that they do not keep everything else alive there."""


class Numbers(Array):
    """An array whose numbers are not copied until Ray puts them into its object store, beside the pickled message. The reader of the message
    gets a copy of its own.
    """

    def __init__(self, numbers: NDArray[Any]) -> None:
        # the same as Array's own constructor, which takes longer to inspect its arguments than sending takes
        about = {"dtype": str(numbers.dtype), "shape": numbers.shape, "stype": SType.NUMPY, "data": b""}
        self.__dict__.update(about, numbers=numbers)
        self.numbers: NDArray[Any]

    def __reduce__(self) -> tuple[Callable[..., Array], tuple[Any, ...]]:
        return _copied, (self.numbers,)


class Lent(Numbers):
    """The same, but the reader gets a read-only view of the store, which it should release soon."""

    def __reduce__(self) -> tuple[Callable[..., Array], tuple[Any, ...]]:
        return _lent, (self.numbers,)


def _copied(numbers: NDArray[Any]) -> Numbers:
    return Numbers(numbers.copy())


def _lent(numbers: NDArray[Any]) -> Numbers:
    return Lent(numbers) if numbers.nbytes > SMALL else Numbers(numbers.copy())


class Packer:
    """Turns tensors into records of messages. A tensor that several messages have becomes one array, which is pickled once."""

    def __init__(self) -> None:
        self._packed: dict[Any, Numbers] = {}

    def __call__(self, params: Params) -> ArrayRecord:
        return _record({name: self._numbers(tensor) for name, tensor in params.items()})

    def _numbers(self, tensor: Tensor) -> Numbers:
        # the remembered arrays keep their memory, so an address identifies a tensor
        where = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if where not in self._packed:
            self._packed[where] = Numbers(as_numpy(tensor))
        return self._packed[where]

    def forget(self) -> None:
        """Forget all tensors, when the messages have been made."""
        self._packed.clear()


def lend(params: Params) -> ArrayRecord:
    """Tensors as a record that is read directly in the store."""
    return _record({name: Lent(as_numpy(tensor)) for name, tensor in params.items()})


def _record(arrays: dict[str, Numbers]) -> ArrayRecord:
    record = ArrayRecord()  # which would make plain arrays of what it is constructed with
    record.update(arrays)
    return record


def as_numpy(tensor: Tensor) -> NDArray[Any]:
    """A tensor's numbers as a contiguous array, without a copy if they are contiguous already."""
    return tensor.detach().cpu().contiguous().numpy()
