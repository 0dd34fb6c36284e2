"""Arrays of messages that are pickled: between the processes of a simulation, where nothing has to be in a file format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Array
from flwr.common.constant import SType
from numpy.typing import NDArray

SMALL = 2**16
"""Bytes of numbers that are copied out of a store, so that they do not keep all the rest there."""


class Numbers(Array):
    """An array whose numbers stay where they are until Ray copies them into its object store, beside the pickled message. Who reads
    the message has a copy of its own.
    """

    def __init__(self, numbers: NDArray[Any]) -> None:
        super().__init__(str(numbers.dtype), numbers.shape, SType.NUMPY, b"")
        self.numbers = numbers

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
