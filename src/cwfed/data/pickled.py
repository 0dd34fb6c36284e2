"""Reads the arrays in a pickle without the pickle module: nothing that the file names is called.

The stream is read opcode by opcode, and only these are accepted: plain values, lists, tuples, dicts, and the few forms in which numpy writes
arrays (protocols 2 to 5). Arguments from a file for numpy's own constructors (`ndarray.__setstate__`, `dtype.__setstate__`) could point
anywhere in memory. Here a dtype comes from our own table, and an array is a view of bytes whose number was checked. Arrays of objects
become plain lists. Anything else is a ValueError.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOST_DIMENSIONS = 8

_NUMPY = ("numpy.core", "numpy._core")
_GLOBALS: Final = {
    **{(f"{package}.multiarray", "_reconstruct"): "array" for package in _NUMPY},
    **{(f"{package}.multiarray", "scalar"): "scalar" for package in _NUMPY},
    **{(f"{package}.numeric", "_frombuffer"): "view" for package in _NUMPY},
    ("numpy", "ndarray"): "class",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "bytes",  # how protocol 2 writes bytes
    ("__builtin__", "bytes"): "no bytes",
}
"""The names that a stream may contain, each with a word that stands for it; the objects themselves are never used."""
_TYPES: Final = {f"{kind}{size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)} | {
    name: np.dtype(name) for name in ("f2", "f4", "f8", "b1")
}
_OBJECT: Final = "O8"

_VALUES = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
    ]
)
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class _Name:
    word: str


@dataclass
class _Type:
    """A dtype whose byte order comes later in the stream."""

    code: str
    order: str = ""

    def dtype(self) -> np.dtype[Any]:
        if self.code == _OBJECT or not self.order:
            raise ValueError("an array has no plain numeric type")
        return _TYPES[self.code].newbyteorder(self.order)  # type: ignore[arg-type]


@dataclass
class _Array:
    """An array whose contents come later in the stream, and are put into `made`."""

    made: NDArray[Any] | Objects | None = None


@dataclass(frozen=True)
class Objects:
    """An array of objects: its shape, and its items in C order."""

    shape: tuple[int, ...]
    items: list[Any]


_MARK: Final = object()


def load(content: bytes) -> Any:
    """The one value of a pickle stream."""
    machine = _Machine(len(content))
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "STOP":
            return finished(machine.pop())
        machine.step(opcode.name, argument)
    raise ValueError("it ends in the middle")


def finished(value: Any) -> Any:
    """The array that a value stands for, or the value itself."""
    if not isinstance(value, _Array):
        return value
    if value.made is None:
        raise ValueError("an array has no contents")
    return value.made


class _Machine:
    """A stack and a memo of plain values."""

    def __init__(self, room: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.room = room  # characters that may become bytes: a remembered text could be converted repeatedly

    def pop(self) -> Any:
        value = self.stack.pop()  # IndexError is refused like anything else
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def top(self, kind: type) -> Any:
        """The value on the stack, which must be of this kind."""
        if not self.stack or type(self.stack[-1]) is not kind:
            raise ValueError(f"something is done to what is not a {kind.__name__.strip('_').lower()}")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        """The values above the last mark."""
        found: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            found.append(value)
        found.reverse()
        return found

    def step(self, name: str, argument: Any) -> None:
        """Carry out one opcode. Frequent ones come first: texts are lists of millions of small numbers."""
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("APPENDS", "APPEND"):
            items = self.marked() if name == "APPENDS" else [self.pop()]
            self.top(list).extend(items)
        elif name in ("SETITEMS", "SETITEM"):
            pairs = self.marked() if name == "SETITEMS" else [self.pop(), self.pop()][::-1]
            if len(pairs) % 2 or any(type(key) is not str for key in pairs[::2]):
                raise ValueError("the keys of a dict are not texts")
            self.top(dict).update(zip(pairs[::2], pairs[1::2], strict=True))
        elif name == "TUPLE":
            stack.append(tuple(self.marked()))
        elif name in _TUPLES:
            stack.append(tuple([self.pop() for _ in range(_TUPLES[name])][::-1]))
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "GLOBAL":
            stack.append(_known(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_known(*[self.pop(), self.pop()][::-1]))
        elif name == "REDUCE":
            arguments, function = self.pop(), self.pop()
            made = _made(function, arguments)
            self.room -= len(made) if isinstance(made, bytes) else 0
            if self.room < 0:
                raise ValueError("it repeats the same bytes without end")
            stack.append(made)
        elif name == "BUILD":
            _fill(*[self.pop(), stack[-1]][::-1])
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"an array does not need {name}")


def _known(module: Any, name: Any) -> _Name:
    if type(module) is not str or type(name) is not str or (module, name) not in _GLOBALS:
        raise ValueError(f"it wants to load {module}.{name}, which is not allowed")
    return _Name(_GLOBALS[module, name])


def _made(function: Any, arguments: Any) -> Any:
    """The result of a call, for the forms that numpy and pickle write."""
    match function, arguments:
        case _Name("dtype"), (str(code), _, _) if code in _TYPES or code == _OBJECT:
            return _Type(code)
        case _Name("array"), (_Name("class"), (0,), b"b"):
            return _Array()
        case _Name("view"), (bytes() | bytearray() as content, _Type() as kind, tuple(shape), "C" | "F" as order):
            return _Array(_numbers(content, kind.dtype(), shape, order))
        case _Name("scalar"), (_Type() as kind, bytes(content)):
            return _numbers(content, kind.dtype(), (), "C").item()
        case _Name("bytes"), (str(text), "latin1"):
            return text.encode("latin-1")
        case _Name("no bytes"), ():
            return b""
    raise ValueError("it calls something in a way that numpy does not")


def _fill(value: Any, state: Any) -> None:
    """Complete a dtype or an array with the state that follows it."""
    match value, state:
        case _Type(_, ""), (3, "<" | ">" | "|" | "=" as order, None, None, None, -1, -1, int()):
            value.order = order
        case _Array(None), (1, tuple(shape), _Type(code), _, list(items)) if code == _OBJECT:
            if _count(shape) != len(items):
                raise ValueError(f"an array of shape {shape} has {len(items)} values")
            value.made = Objects(shape, items)
        case _Array(None), (1, tuple(shape), _Type() as kind, bool(fortran), bytes(content)):
            value.made = _numbers(content, kind.dtype(), shape, "F" if fortran else "C")
        case _:
            raise ValueError("it fills something in a way that numpy does not")


def _count(shape: tuple[Any, ...]) -> int:
    """The number of values of an array of this shape; ValueError for impossible shapes."""
    if len(shape) > MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise ValueError("an array has an impossible shape")
    return math.prod(shape)


def _numbers(content: bytes | bytearray, dtype: np.dtype[Any], shape: tuple[Any, ...], order: str) -> NDArray[Any]:
    count = _count(shape)
    if count * dtype.itemsize != len(content):
        raise ValueError(f"an array of shape {shape} and type {dtype} has {len(content)} bytes")
    flat = np.frombuffer(content, dtype, count) if count else np.zeros(0, dtype)
    return flat.reshape(shape, order=order)  # type: ignore[call-overload, no-any-return]
