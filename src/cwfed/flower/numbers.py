"""Tensors in messages that are pickled: between the processes of a simulation, where nothing has to be in a file format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType
from numpy.typing import NDArray
from torch import Tensor

from cwfed.core.types import Params

SMALL = 2**16
"""Bytes of numbers that are copied out of a store, so that they do not keep all the rest there."""


class Numbers(Array):
    """An array whose numbers stay where they are until Ray copies them into its object store, beside the pickled message. Who reads
    the message has a copy of its own.
    """

    def __init__(self, numbers: NDArray[Any]) -> None:
        # as Array's own constructor does it, which looks for longer what it was given than it takes to send it
        about = {"dtype": str(numbers.dtype), "shape": numbers.shape, "stype": SType.NUMPY, "data": b""}
        self.__dict__.update(about, numbers=numbers)
        self.numbers: NDArray[Any]

    def __reduce__(self) -> tuple[Callable[..., Array], tuple[Any, ...]]:
        return _copied, (self.numbers,)


class Lent(Numbers):
    """The same, but who reads it reads it in the store, cannot write to it, and lets go of it soon."""

    def __reduce__(self) -> tuple[Callable[..., Array], tuple[Any, ...]]:
        return _lent, (self.numbers,)


def _copied(numbers: NDArray[Any]) -> Numbers:
    return Numbers(numbers.copy())


def _lent(numbers: NDArray[Any]) -> Numbers:
    return Lent(numbers) if numbers.nbytes > SMALL else Numbers(numbers.copy())


class Packer:
    """Tensors as records of messages. What several of them have in common is one array, which is in a pickle once."""

    def __init__(self) -> None:
        self._packed: dict[Any, Numbers] = {}

    def __call__(self, params: Params) -> ArrayRecord:
        return _record({name: self._numbers(tensor) for name, tensor in params.items()})

    def _numbers(self, tensor: Tensor) -> Numbers:
        # what is remembered is alive, so nothing else can be where it is
        where = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if where not in self._packed:
            self._packed[where] = Numbers(as_numpy(tensor))
        return self._packed[where]

    def forget(self) -> None:
        """When the messages are made: whatever comes next has nothing in common with them."""
        self._packed.clear()


def lend(params: Params) -> ArrayRecord:
    """Tensors as a record that is read in the store."""
    return _record({name: Lent(as_numpy(tensor)) for name, tensor in params.items()})


def _record(arrays: dict[str, Numbers]) -> ArrayRecord:
    record = ArrayRecord()  # which would make plain arrays of what it is constructed with
    record.update(arrays)
    return record


def as_numpy(tensor: Tensor) -> NDArray[Any]:
    """A tensor's numbers, one after the other; where that is how they are, they are not copied."""
    return tensor.detach().cpu().contiguous().numpy()
