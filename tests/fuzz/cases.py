"""What hostile and damaged input looks like."""

from __future__ import annotations

import datetime
import io
import json
import pickle
import zipfile
from typing import Any

import numpy as np
from hypothesis import strategies as st

NAMES = st.sampled_from(
    ["", "..", "../..", "/etc/passwd", "../../outside", "a/b", "a\0b", "<script>alert(1)</script>", '"><img src=x>', "</script>",
     "<!--", "$\\frac{", "{}", "%s", "[/red]", "[red]", "\x1b[31m", "né", "\u2028", "\ud800", "x" * 300, "trap:boom", "os:system",
     "cwfedavg", "fedavg", "digits", "mlp", "auto", "nan", "-1", "1e999", " ", "\n", "'", "a'b\"c", "=1+1", "~", "$HOME", "--out", "[" * 3000, "1\nrun.seed = 3"]
) | st.text(max_size=12)  # fmt: skip
NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 7, -1, 2**31, 2**63, 10**30, 0.0, 0.5, -0.5, 1.5, 1e-300, 1e308, float("inf"), float("nan")]
)
MOMENTS = st.sampled_from([datetime.date(1979, 5, 27), datetime.time(7, 32), datetime.datetime(1979, 5, 27, 7, 32)])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)

Mutation = list[tuple[str, float, bytes]]
MUTATIONS: st.SearchStrategy[Mutation] = st.lists(
    st.tuples(
        st.sampled_from(["flip", "flip", "set", "insert", "cut", "delete", "repeat"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=4)
        | st.sampled_from([b"../", b"\n", b'"', b"[" * 5000, b"1e999", b"\xff" * 8, b"\0" * 64]),
    ),
    min_size=1,
    max_size=4,
)


def mutate(content: bytes, mutations: Mutation) -> bytes:
    """The content with these changes, one after the other."""
    data = bytearray(content)
    for kind, where, piece in mutations:
        at = int(where * len(data))
        if kind == "flip" and data:
            data[at] ^= 1 << (piece[0] % 8)
        elif kind == "set":
            data[at : at + len(piece)] = piece
        elif kind == "insert":
            data[at:at] = piece
        elif kind == "cut":
            del data[at:]
        elif kind == "delete":
            del data[at : at + piece[0]]
        elif kind == "repeat":
            data[at:at] = data[at : at + piece[0]]
    return bytes(data)


def replace(table: Any, path: list[int], value: Any) -> Any:
    """A JSON value with the one at some place inside it replaced."""
    if not path or not isinstance(table, dict | list) or not table:
        return value
    keys = list(table) if isinstance(table, dict) else list(range(len(table)))
    key = keys[path[0] % len(keys)]
    copied = table.copy()
    copied[key] = replace(table[key], path[1:], value)
    return copied


PLACES = st.lists(st.integers(0, 30), min_size=1, max_size=4)


class Trap:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.call


ARRAYS = st.sampled_from(
    [np.zeros((3, 1, 2, 2), np.float32), np.zeros((3, 4)), np.zeros(3, np.int64), np.zeros((0, 1, 2, 2)), np.array(["a", "b", "c"]),
     np.array([None, 1, "x"], dtype=object), np.full((3, 4), np.nan), np.array([0, 1, 10**12]), np.array(3), np.zeros((3, 1, 1, 1, 1)),
     np.array([[1, 2], [3, 2**31 - 1], [0, 1]], np.int64), np.zeros(3, [("a", "i4"), ("b", "f8")]), np.zeros(3, "M8[s]")]
)  # fmt: skip
TRAPS = st.sampled_from(
    [Trap(eval, "1+1"), Trap(open, "/tmp/fuzz-trap", "w"), Trap(np.fromfile, "/etc/passwd"), Trap(exec, "")]
)
OBJECTS = (
    ARRAYS
    | TRAPS
    | JSON
    | st.lists(st.tuples(st.lists(st.integers(-1, 9), max_size=3), st.integers(0, 3)), max_size=3)
)


def forged_type(flags: int = 0, kind: str = "V8", inner: str = "O", alignment: int = 1) -> Trap:
    """A dtype that says it holds no objects and has a field of them: numpy would follow the array's bytes as pointers."""
    state = (3, "|", None, ("a",), {"a": (np.dtype(inner), 0)}, 8, alignment, flags)
    return Trap(np.dtype, kind, False, True, state=state)


def forged_array(kind: Any, content: Any, shape: Any = (2,), version: Any = 1, fortran: Any = False) -> Trap:
    """An array whose parts are what the caller says."""
    state = (version, shape, kind, fortran, content)
    return Trap(np.zeros(0).__reduce__()[0], np.ndarray, (0,), b"b", state=state)


POINTERS = b"AAAAAAAA" * 2
ODD = NUMBERS | st.sampled_from(
    [None, "", "<", "O", "O8", "f4", "V8", b"", b"b", POINTERS, (), (0,), (2,), [1, 2], {}, True, -1]
)
KINDS = (
    st.builds(forged_type, ODD, st.sampled_from(["V8", "O8", "f8", "M8"]), st.sampled_from(["O", "f8", "S8"]), ODD)
    | st.sampled_from([np.dtype(kind) for kind in ("f8", "O", "S8", "M8[s]", "c16", ">i4", "U2", [("a", "O")])])
    | ODD
)
FORGED = (
    st.builds(forged_array, KINDS, st.sampled_from([POINTERS, [1, 2], [None], "text"]) | ODD, st.lists(ODD, max_size=3).map(tuple) | ODD, ODD, ODD)
    | st.builds(lambda kind, content: Trap(np.int64(1).__reduce__()[0], kind, content), KINDS, ODD)
    | st.builds(lambda *parts: Trap(np.arange(2).__reduce_ex__(5)[0], *parts), ODD, KINDS, ODD, ODD)
)  # fmt: skip
"""Pickles that numpy's own functions would be called for, with anything as their arguments."""


def npz(payload: Any, protocol: int = 3) -> bytes:
    """A PFLlib file: one pickled object in an object array."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": ()})
    inner = np.empty((), dtype=object)
    inner[()] = payload
    stream.write(pickle.dumps(inner, protocol=protocol))
    return packed(stream.getvalue())


def packed(stream: bytes) -> bytes:
    """The .npz file of this .npy stream, with right checksums."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.npy", stream)
    return file.getvalue()


def unpacked(content: bytes) -> bytes:
    """The other way round."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read("data.npy")


def dump(value: Any) -> bytes:
    """As JSON, with whatever Python's writer lets through."""
    return json.dumps(value, ensure_ascii=True).encode()
