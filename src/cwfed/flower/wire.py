"""Converts our messages to Flower's records and back. Incoming messages are checked before they are read.

Numbers are sent in numpy's file format, as in Flower's own records. They are read here by their header, never by `numpy.load`: a header may
claim more memory than the machine has.

Between processes Flower sends every record, every array and every 5 MiB of an array by a separate call, from the server to the SuperLink, from
there to the node, and from there to the process of the message: three times some 20 calls for a network of eight tensors. So a message with
numbers is sent as one piece of bytes (`wrapped`), in Flower's own encoding.
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
"""The version that both sides of a federation must share. The first number changes with the meaning of a message, the second with the numbers
that are computed (a mixed federation would not have the simulator's bits). Other versions of cwfed can be mixed."""
HEADER = 256
"""The most bytes of numpy's header before the numbers."""
LONGEST_HEADER = 2**14
"""Bytes in which a header is searched; numpy reads none of more than 10,000."""
LONGEST = 300
"""The most characters of a node's own text in a log or an event."""
PIECE, PIECES = 4 * 2**20, "piece-"
"""The most bytes of a message in one call, and the prefix of the names of such pieces."""
LARGEST = 1e100
"""The largest loss or sum that is accepted: losses are computed in float32, and sums of such numbers are finite."""

Pack: TypeAlias = Callable[[Params], ArrayRecord]
"""How tensors are put into a message."""


class BadMessage(RunError):
    """A message that is not as it should be; the sentence says why."""


def wrapped(content: RecordDict) -> RecordDict:
    """A message's content as pieces of bytes, for sending between processes; a content without numbers stays as it is."""
    if not content.array_records:
        return content
    whole = memoryview(recorddict_to_proto(content).SerializeToString())
    starts = range(0, len(whole), PIECE)
    return RecordDict(
        {f"{PIECES}{i}": ConfigRecord({"": bytes(whole[at : at + PIECE])}) for i, at in enumerate(starts)}
    )


def is_wrapped(content: RecordDict) -> bool:
    """Whether a content is wrapped."""
    return f"{PIECES}0" in content


def unwrapped(content: RecordDict) -> RecordDict:
    """The content that was wrapped; any other content stays as it is."""
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
    """A node's own text, made safe for a log or an event: short, and one line."""
    return " ".join(plain(str(words), longest).split())


def to_record(params: Params) -> ArrayRecord:
    """Tensors by name as Flower's record."""
    return ArrayRecord({name: Array(as_numpy(tensor)) for name, tensor in params.items()})


def from_record(record: Mapping[str, Array], what: str, forms: Mapping[str, ExtraSpec] | None = None) -> Params:
    """The tensors of a record. If their forms are known, a tensor of another form is refused before it is decoded."""
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
        numbers = bytearray(array.data)  # torch needs writable memory
    try:
        return torch.from_numpy(np.frombuffer(numbers, dtype, offset=data.tell()).reshape(shape))
    except (TypeError, ValueError) as error:
        raise BadMessage(f"{what} cannot be read ({error})") from None


def _check_form(shape: tuple[int, ...], dtype: np.dtype[Any], what: str, form: ExtraSpec | None) -> None:
    if form is not None and (shape != form.shape or dtype != _numpy_type(form.dtype)):
        raise BadMessage(f"{what} has {dtype} of the shape {shape}, not {_numpy_type(form.dtype)} of {form.shape}")


def _as_they_are(numbers: NDArray[Any], what: str, form: ExtraSpec | None) -> torch.Tensor:
    """Numbers from another process of a simulation, without a copy."""
    _check_form(numbers.shape, numbers.dtype, what, form)
    with warnings.catch_warnings():  # torch warns of read-only memory, which is only read here
        warnings.simplefilter("ignore")
        return torch.from_numpy(numbers)


def _numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def check_size(records: Iterable[ArrayRecord], forms: Iterable[Mapping[str, ExtraSpec]]) -> None:
    """BadMessage if a message is larger than it can be with these forms."""
    size = sum(len(array.data) for record in records for array in record.values())
    most = sum(HEADER + int(np.prod(form.shape)) * form.dtype.itemsize for group in forms for form in group.values())
    if size > most:
        raise BadMessage(f"{size:,} bytes of numbers, more than the {most:,} that such a message can have")


def download_to(content: RecordDict, download: Download, pack: Pack = to_record) -> None:
    """Put a download into a message. Empty notes get no record: Flower's mods want exactly one record of arrays in a message."""
    for i, model in enumerate(download.models):
        content[f"model-{i}"] = pack(model)
    if download.notes:
        content["notes"] = pack(download.notes)


def download_from(content: RecordDict, forms: Mapping[str, ExtraSpec]) -> Download:
    """Read the download in a message."""
    names = [f"model-{i}" for i in range(sum(name.startswith("model-") for name in content.array_records))]
    models = [from_record(arrays(content, name), f"the received {name}", forms) for name in names]
    return Download(tuple(models), from_record(arrays(content, "notes"), "the received notes"))


def upload_to(content: RecordDict, model: Params, extras: Params, pack: Pack = to_record) -> None:
    """Put an upload into a message."""
    for name, params in (("model", model), ("beside", extras)):
        if params:
            content[name] = pack(params)


def arrays(content: RecordDict, name: str) -> ArrayRecord:
    """The record of arrays of this name in a message; empty if there is none."""
    return content.array_records.get(name, ArrayRecord())


def texts(content: RecordDict, name: str) -> ConfigRecord:
    """A record of settings, which the message must have."""
    if name not in content.config_records:
        raise BadMessage(f"the message has no {name!r}")
    return content.config_records[name]


def metrics(
    content: RecordDict, whole: Iterable[str], real: Iterable[str] = (), optional: Iterable[str] = ()
) -> dict[str, Any]:
    """The metrics of a message, checked: `whole` numbers from 0 on, `real` numbers, and real numbers that may be missing (`optional`)."""
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
