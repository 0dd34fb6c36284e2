"""Folders in PFLlib's layout (train/0.npz ..., test/0.npz ..., config.json), with their exact split.

PFLlib stores `data` = {"x": array, "y": array} as an object array, which is a pickle. It is read by an
unpickler that can build numpy arrays and plain containers and nothing else, so a foreign file runs no code.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from cwfed.data.dataset import Dataset
from cwfed.data.text import PADDING
from cwfed.errors import DataError

ALLOWED = {
    (module, name)
    for package in ("numpy.core", "numpy._core")
    for module, name in (
        (f"{package}.multiarray", "_reconstruct"),
        (f"{package}.multiarray", "scalar"),
        (f"{package}.numeric", "_frombuffer"),
    )
} | {("numpy", "ndarray"), ("numpy", "dtype")}

MOST_NAMES = 10_000_000
"""Classes or words that a folder may have: a name is made for each, and a wrong number must not fill the memory."""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}, which is not allowed")
        return super().find_class(module, name)


def _read_object(file: IO[bytes]) -> Any:
    """The one object of a .npy stream whose array has the dtype object."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if not dtype.hasobject or shape != ():
        raise ValueError(f"`data` is not one dict but {dtype} of shape {shape}")
    return _ArraysOnly(file).load().item()


def _read(path: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as file:
            data = _read_object(file)
        x, y = _inputs(data["x"]), np.asarray(data["y"]).astype(np.int64).reshape(-1)
        if len(x) != len(y) or (path.parent.name == "train" and len(y) == 0):
            raise ValueError(f"it has {len(x)} samples and {len(y)} labels")
        return x, y
    except FileNotFoundError:
        raise DataError(f"{path} is missing from the PFLlib folder") from None
    except Exception as error:  # whatever a damaged or hostile file provokes ends here, with its name
        raise DataError(f"{path} cannot be read as a PFLlib file: {error}") from None


def _inputs(x: Any) -> NDArray[Any]:
    """Images N C H W become N H W C; texts, kept as (tokens, length) pairs, become one array of tokens."""
    array = np.asarray(x, dtype=object) if isinstance(x, list) else np.asarray(x)
    if array.dtype == object:
        tokens = [row[0] if len(row) == 2 and np.ndim(row[0]) == 1 else row for row in array]
        return np.asarray(tokens, dtype=np.int32)
    if array.ndim == 4:
        array = array.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(array, dtype=np.float32)


def load(folder: Path) -> Dataset:
    """The whole folder as one data set that knows its split."""
    try:
        config = json.loads((folder / "config.json").read_text())
        clients, classes = int(config["num_clients"]), int(config["num_classes"])
        if clients < 1:
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
