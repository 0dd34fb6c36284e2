"""Folders in PFLlib's layout (train/0.npz ..., test/0.npz ..., config.json), with their exact split.

PFLlib stores `data` = {"x": array, "y": array} as an object array, which is a pickle; for texts, `x` is an object array itself,
of (tokens, length). `pickled.py` reads it without unpickling, so that a file of unknown origin cannot run code or reach our memory.
`write` makes such a folder from any split, packed as by PFLlib's own programs.
"""

from __future__ import annotations

import ast
import json
import zipfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from cwfed.core.errors import DataError
from cwfed.core.files import check_regular, read_text
from cwfed.data import pickled
from cwfed.data.clients import Federation, to_network
from cwfed.data.dataset import Dataset
from cwfed.data.text import PADDING

MOST_NAMES = 10_000_000
"""The most classes or words of a folder: each gets a name, and a wrong number must not fill the memory."""
MOST_CLIENTS = 1_000_000
MOST_BYTES = 2**33
"""The most bytes of a client's file when unpacked: a small archive may claim any size."""
_HEADER = {"descr": "|O", "fortran_order": False, "shape": ()}


def _read_object(file: IO[bytes]) -> tuple[Any, int]:
    """The object in a .npy stream with an array of dtype object, and the number of its bytes."""
    version = np.lib.format.read_magic(file)
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    header = file.read(min(length, 10_000)).decode("latin-1")
    if ast.literal_eval(header.strip()) != _HEADER:
        raise ValueError(f"`data` is not one dict but {header.strip()}")
    content = file.read()
    found = pickled.load(content)
    if not isinstance(found, pickled.Objects) or len(found.items) != 1 or not isinstance(found.items[0], dict):
        raise ValueError("`data` is not one dict")
    return found.items[0], len(content)


def _read(path: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            about = archive.getinfo("data.npy")
            if about.file_size > MOST_BYTES:
                raise ValueError(f"unpacked it would have {about.file_size:,} bytes")
            if about.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("it is packed in a way that numpy does not use")
            with archive.open(about) as file:
                data, room = _read_object(file)
        x, y = _inputs(pickled.finished(data["x"]), room), _labels(pickled.finished(data["y"]))
        if len(x) != len(y) or (path.parent.name == "train" and len(y) == 0):
            raise ValueError(f"it has {len(x)} samples and {len(y)} labels")
        return x, y
    except FileNotFoundError:
        raise DataError(f"{path} is missing from the PFLlib folder") from None
    except Exception as error:  # whatever a damaged or hostile file provokes ends here, with its name
        raise DataError(f"{path} cannot be read as a PFLlib file: {error}") from None


def _labels(y: Any) -> NDArray[np.int64]:
    if isinstance(y, list):
        return np.array(array("q", y), dtype=np.int64)
    with np.errstate(invalid="ignore"):
        labels: NDArray[np.int64] = y.astype(np.int64).reshape(-1)
    if (labels != y.reshape(-1)).any():
        raise ValueError("its labels are not whole numbers")
    return labels


def _inputs(x: Any, room: int) -> NDArray[Any]:
    """Images N C H W become N H W C; texts, stored as pairs (tokens, length), become one array of tokens."""
    if not isinstance(x, np.ndarray):
        return _tokens(x, room)
    if x.ndim == 4:
        x = x.transpose(0, 2, 3, 1)
    with np.errstate(over="ignore"):  # what is not finite then is refused with the whole data set
        return np.ascontiguousarray(x, dtype=np.float32)


def _tokens(x: Any, room: int) -> NDArray[np.int32]:
    rows: list[Any] = x.items if isinstance(x, pickled.Objects) else x
    if isinstance(x, pickled.Objects) and len(x.shape) == 2:
        width = x.shape[1]
        rows = [x.items[at : at + width] for at in range(0, len(x.items), width)] if width else []
    texts = [_text(row) for row in rows]
    lengths = {len(text) for text in texts}
    if len(lengths) != 1:
        raise ValueError(f"its texts have {len(lengths)} different lengths")
    if sum(map(len, texts)) > room:  # a pickle can name one list any number of times
        raise ValueError("it repeats its texts without end")
    return np.array([array("i", text) for text in texts], dtype=np.int32)


def _text(row: Any) -> Sequence[int]:
    """The tokens of a row: the row itself, or the first of a pair (tokens, length)."""
    row = pickled.finished(row)
    first = pickled.finished(row[0]) if len(row) == 2 else None
    tokens = first if isinstance(first, list | tuple | np.ndarray) else row
    if isinstance(tokens, np.ndarray):
        tokens = tokens.tolist() if tokens.ndim == 1 else None
    if not isinstance(tokens, list | tuple):
        raise ValueError("a text is not a list of numbers")
    return tokens


def load(folder: Path) -> Dataset:
    """The whole folder as one data set with its split."""
    try:
        config = json.loads(read_text(folder / "config.json"))
        clients, classes = int(config["num_clients"]), int(config["num_classes"])
        if not 1 <= clients <= MOST_CLIENTS:
            raise ValueError(f"num_clients is {clients}")
        if classes > MOST_NAMES:
            raise ValueError(f"num_classes is {classes}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{folder} is not a PFLlib folder: its config.json must give num_clients and num_classes ({error})"
        ) from None
    inputs, labels, split, at = [], [], [], 0
    for client in range(clients):
        parts = []
        for part in ("train", "test"):
            x, y = _read(folder / part / f"{client}.npz")
            inputs.append(x)
            labels.append(y)
            parts.append(np.arange(at, at + len(y)))
            at += len(y)
        split.append((parts[0], parts[1]))
    if len({x.shape[1:] for x in inputs}) > 1:
        raise DataError(f"{folder}: the clients' samples have different shapes")
    x = np.concatenate(inputs)
    words: tuple[str, ...] = ()
    if np.issubdtype(x.dtype, np.integer):
        largest = int(x.max(initial=0))
        if largest > MOST_NAMES:
            raise DataError(f"{folder}: the token {largest} is beyond any vocabulary")
        words = (PADDING, *(f"#{token}" for token in range(1, largest + 1)))
    names = tuple(str(k) for k in range(classes))
    return Dataset(folder.name or "pfllib", x, np.concatenate(labels), names, words, tuple(split))


def write(federation: Federation, folder: Path) -> None:
    """Write a split in PFLlib's layout, with inputs as the network sees them. PFLlib has no held-out data: they become training data."""
    whole = federation.data
    shards = federation.shards.values()
    config = {
        "num_clients": len(federation),
        "num_classes": whole.classes,
        "non_iid": True,
        "balance": False,
        "partition": "cwfed",
        "Size of samples for labels in clients": [
            [(k, int(n)) for k, n in enumerate(row) if n] for row in federation.histogram()
        ],
        "alpha": None,
        "batch_size": None,
    }  # all keys that PFLlib's own programs look for
    try:
        for part in ("train", "test"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for client, shard in enumerate(shards):
            train = np.sort(np.concatenate([shard.train, shard.holdout, shard.validation]))
            for part, rows in (("train", train), ("test", shard.test)):
                data: Any = {"x": _as_pfllib(whole.inputs[rows]), "y": whole.labels[rows]}
                np.savez_compressed(folder / part / f"{client}.npz", data=data)
        (folder / "config.json").write_text(json.dumps(config) + "\n")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from None


def _as_pfllib(inputs: NDArray[Any]) -> Any:
    """Images N C H W and vectors as numbers; texts as (tokens, length)."""
    seen = to_network(torch.from_numpy(np.array(inputs)))
    if seen.is_floating_point():
        return seen.contiguous().numpy()
    return [(tokens, len(tokens)) for tokens in seen.tolist()]
