"""Our messages as Flower's records and back. What comes in is checked before it is read.

Numbers travel as numpy's file format, as Flower's own records do. They are read here by their header, never by
`numpy.load`: a header may claim more memory than a machine has.

Between processes Flower sends every record, every array and every 5 MiB of an array by a call of its own, from the server to the SuperLink, from there to the node
and from there to the process of the message: some 20 calls three times for a network of eight tensors. So where a message has numbers, all of it
travels as one piece of bytes (`wrapped`), which is Flower's own encoding of such a content.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Encoded
from numpy.lib import format as npy
from numpy.typing import NDArray

from cwfed.core.errors import RunError, plain
from cwfed.core.types import Download, ExtraSpec, Params
from cwfed.flower.numbers import Numbers, as_numpy

PROTOCOL = "2.0"
"""What the two sides of a federation must have in common. The first number changes with the meaning of a message, the second
with the numbers that come out (a federation of both would not have the simulator's bits); all other versions go together."""
HEADER = 256
"""Bytes that numpy's header may take in front of the numbers."""
LONGEST_HEADER = 2**14
"""Bytes in which a header is looked for; numpy reads none of more than 10,000."""
LONGEST = 300
"""Characters of a node's own words that go into a log or an event."""
PIECE, PIECES = 4 * 2**20, "piece-"
"""Bytes of a message that travel in one call at most, and what such pieces are called."""
LARGEST = 1e100
"""No loss is larger (they are computed in float32), and sums of such numbers are finite."""

Pack: TypeAlias = Callable[[Params], ArrayRecord]
"""How tensors go into a message."""


class BadMessage(RunError):
    """A message that is not what it should be; the sentence says how."""


def wrapped(content: RecordDict) -> RecordDict:
    """A message's content for the way between processes; one without numbers stays as it is."""
    if not content.array_records:
        return content
    whole = memoryview(recorddict_to_proto(content).SerializeToString())
    starts = range(0, len(whole), PIECE)
    return RecordDict(
        {f"{PIECES}{i}": ConfigRecord({"": bytes(whole[at : at + PIECE])}) for i, at in enumerate(starts)}
    )


def is_wrapped(content: RecordDict) -> bool:
    """Whether this is a content in pieces."""
    return f"{PIECES}0" in content


def unwrapped(content: RecordDict) -> RecordDict:
    """The content that was wrapped; one that was not is what it is."""
    if not is_wrapped(content):
        return content
    pieces = [texts(content, f"{PIECES}{i}").get("") for i in range(len(content))]
    whole = [piece for piece in pieces if isinstance(piece, bytes)]
    try:
        if len(whole) == len(pieces):
            return recorddict_from_proto(Encoded.FromString(b"".join(whole)))
    except Exception as error:  # of protobuf, and of Flower's records for values that they do not take
        raise BadMessage(f"the message cannot be unwrapped ({type(error).__name__})") from None
    raise BadMessage("a piece of the message is not bytes")


def said(words: object, longest: int = LONGEST) -> str:
    """A node's own words, for a log or an event: not long, and on one line."""
    return " ".join(plain(str(words), longest).split())


def to_record(params: Params) -> ArrayRecord:
    """Tensors by name as Flower's record."""
    return ArrayRecord({name: Array(as_numpy(tensor)) for name, tensor in params.items()})


def from_record(record: Mapping[str, Array], what: str, forms: Mapping[str, ExtraSpec] | None = None) -> Params:
    """The tensors of a record; where their forms are known, anything else is refused before it is decoded."""
    if forms is not None and record.keys() != forms.keys():
        name = min(record.keys() ^ forms.keys())
        raise BadMessage(f"{what} lacks {name}" if name in forms else f"{what} has an unknown tensor {name}")
    return {
        name: _decode(array, f"{name} of {what}", forms[name] if forms is not None else None)
        for name, array in record.items()
    }


def _decode(array: Array, what: str, form: ExtraSpec | None) -> torch.Tensor:
    if isinstance(array, Numbers):
        return _as_they_are(array.numbers, what, form)
    data = io.BytesIO(array.data[:LONGEST_HEADER])
    try:
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(data)]
        shape, is_fortran, dtype = read_header(data)
    except Exception as error:  # numpy reads the header with Python's tokenizer, which has errors of many kinds
        raise BadMessage(f"{what} is not in numpy's format ({type(error).__name__})") from None
    if dtype.hasobject or dtype.kind not in "fiub" or is_fortran:
        raise BadMessage(f"{what} is an array of {dtype}, which is not sent here")
    _check_form(shape, dtype, what, form)
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(array.data) - data.tell() != size:
        raise BadMessage(f"{what} has {len(array.data) - data.tell():,} bytes where its header says {size:,}")
    numbers: object = array.data
    if not isinstance(numbers, bytearray):
        numbers = bytearray(array.data)  # a tensor must be writable
    try:
        return torch.from_numpy(np.frombuffer(numbers, dtype, offset=data.tell()).reshape(shape))
    except (TypeError, ValueError) as error:
        raise BadMessage(f"{what} cannot be read ({error})") from None


def _check_form(shape: tuple[int, ...], dtype: np.dtype[Any], what: str, form: ExtraSpec | None) -> None:
    if form is not None and (shape != form.shape or dtype != _numpy_type(form.dtype)):
        raise BadMessage(f"{what} has {dtype} of the shape {shape}, not {_numpy_type(form.dtype)} of {form.shape}")


def _as_they_are(numbers: NDArray[Any], what: str, form: ExtraSpec | None) -> torch.Tensor:
    """Numbers of another process of a simulation, wherever they lie."""
    _check_form(numbers.shape, numbers.dtype, what, form)
    with warnings.catch_warnings():  # torch's, of memory that cannot be written to: what is lent is only read
        warnings.simplefilter("ignore")
        return torch.from_numpy(numbers)


def _numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def check_size(records: Iterable[ArrayRecord], forms: Iterable[Mapping[str, ExtraSpec]]) -> None:
    """Refuse a message that is larger than what it should hold, whatever it holds."""
    size = sum(len(array.data) for record in records for array in record.values())
    most = sum(HEADER + int(np.prod(form.shape)) * form.dtype.itemsize for group in forms for form in group.values())
    if size > most:
        raise BadMessage(f"{size:,} bytes of numbers, more than the {most:,} that such a message can have")


def download_to(content: RecordDict, download: Download, pack: Pack = to_record) -> None:
    """Put what a client is sent into a message. Nothing is no record: Flower's mods want exactly one in a message."""
    for i, model in enumerate(download.models):
        content[f"model-{i}"] = pack(model)
    if download.notes:
        content["notes"] = pack(download.notes)


def download_from(content: RecordDict, forms: Mapping[str, ExtraSpec]) -> Download:
    """What a client was sent."""
    names = [f"model-{i}" for i in range(sum(name.startswith("model-") for name in content.array_records))]
    models = [from_record(arrays(content, name), f"the received {name}", forms) for name in names]
    return Download(tuple(models), from_record(arrays(content, "notes"), "the received notes"))


def upload_to(content: RecordDict, model: Params, extras: Params, pack: Pack = to_record) -> None:
    """Put what a client sends into a message."""
    for name, params in (("model", model), ("beside", extras)):
        if params:
            content[name] = pack(params)


def arrays(content: RecordDict, name: str) -> ArrayRecord:
    """The numbers of this name in a message; what is not there is empty."""
    return content.array_records.get(name, ArrayRecord())


def texts(content: RecordDict, name: str) -> ConfigRecord:
    """A record of settings, which the message must have."""
    if name not in content.config_records:
        raise BadMessage(f"the message has no {name!r}")
    return content.config_records[name]


def metrics(
    content: RecordDict, whole: Iterable[str], real: Iterable[str] = (), optional: Iterable[str] = ()
) -> dict[str, Any]:
    """The metrics of a message that must be there: whole numbers from 0 on, and real ones; and real ones that may be missing."""
    if "metrics" not in content.metric_records:
        raise BadMessage("the message has no 'metrics'")
    record = content.metric_records["metrics"]
    reals = (*real, *(name for name in optional if name in record))
    for names, kinds in ((tuple(whole), (int,)), (reals, (int, float))):
        for name in names:
            value: Any = record.get(name)
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not is_number or not abs(value) <= LARGEST or (kinds == (int,) and value < 0):
                raise BadMessage(f"the metric {name} is {plain(repr(value), 50)}, which is not possible")
    return dict(record)
