"""A data set in memory, and the cache of decoded arrays that makes a second start fast."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cwfed.core import files
from cwfed.core.errors import MOST_NAME, DataError, plain

CACHE_VERSION = 1
"""Part of every cache key: raise it when decoding changes."""


PARTS = ("train", "validation", "test")
"""What parts.npy of a written data set says of each sample, where it comes split: 0, 1 or 2."""


@dataclass(frozen=True)
class Dataset:
    """Samples and labels. Images are N x H x W x C; bytes are pixels, whole numbers tokens, floats as they are."""

    name: str
    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    words: tuple[str, ...] = ()
    """For text: the word of each token; 0 is padding, 1 any unknown word."""
    fixed_split: tuple[tuple[NDArray[np.int64], ...], ...] | None = None
    """(train, test) or (train, validation, test) indices of each client, for data that come split."""
    digest: str = ""
    """A hash of inputs and labels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", plain(self.name, MOST_NAME))
        object.__setattr__(self, "class_names", tuple(plain(name, MOST_NAME) for name in self.class_names))
        problem = _problem(self)
        if problem:
            raise DataError(f"data set {self.name!r}: {problem}")
        if not self.digest:
            object.__setattr__(self, "digest", _digest(self.inputs, self.labels))

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


def _problem(data: Dataset) -> str:
    inputs, labels = data.inputs, data.labels
    if len(inputs) != len(labels):
        return f"{len(inputs)} samples but {len(labels)} labels"
    if len(labels) == 0:
        return "there are no samples"
    if labels.ndim != 1 or labels.dtype != np.int64:
        return "labels must be one whole number a sample"
    if labels.min() < 0 or labels.max() >= data.classes:
        return f"labels run from {labels.min()} to {labels.max()}, outside the {data.classes} classes"
    if data.classes < 2:
        return "a classifier needs at least two classes"
    if inputs.dtype != np.uint8 and not np.issubdtype(inputs.dtype, np.floating):
        if not (np.issubdtype(inputs.dtype, np.integer) and inputs.ndim == 2 and data.words):
            return f"inputs of type {inputs.dtype} and shape {inputs.shape[1:]} are neither images, vectors nor text"
        if inputs.size and (inputs.min() < 0 or inputs.max() >= len(data.words)):
            return f"tokens run from {inputs.min()} to {inputs.max()}, outside the {len(data.words)} words"
    elif inputs.ndim not in (2, 4):
        return f"a sample must be a vector or an image (height, width, channels), not {inputs.shape[1:]}"
    if np.issubdtype(inputs.dtype, np.floating) and not np.isfinite(inputs).all():
        return "some inputs are not finite numbers"
    return ""


def _digest(*arrays: NDArray[Any]) -> str:
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(f"{array.dtype.str}{array.shape}".encode())
        sha.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return sha.hexdigest()


def cache_dir() -> Path:
    """Where decoded data live: CWFED_CACHE, or cwfed in the user's cache folder."""
    if chosen := os.environ.get("CWFED_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cwfed"


def cached(name: str, key: str, decode: Callable[[], Dataset]) -> Dataset:
    """The data set of this content key: from the cache if it is whole, else decoded and put there."""
    folder = cache_dir() / f"{name.replace('/', '--')}-{key[:16]}"
    found = _read(name, folder)
    if found is None:
        data = decode()
        try:
            write(data, folder)
        except OSError as error:
            raise DataError(
                f"cannot write the data cache {folder.parent} ({error.strerror or error}): "
                "set CWFED_CACHE to a folder with room"
            ) from None
        found = _read(name, folder) or data
    return found


def _read(name: str, folder: Path) -> Dataset | None:
    """None where the cache has nothing or something damaged, which is then decoded again."""
    try:
        return read(name, folder)
    except DataError:
        return None


def read(name: str, folder: Path) -> Dataset:
    """A data set that `write` left: arrays, and what they mean."""
    try:
        meta = json.loads(files.read_text(folder / "meta.json"))
        if files.SEAL not in meta:  # an earlier version's: its names are not covered by a checksum
            raise ValueError("it has no checksum")
        files.open_table(meta)
        inputs, labels = _array(folder / "inputs.npy"), np.array(_array(folder / "labels.npy"))
        if meta["digest"] != _digest(inputs, labels):
            raise ValueError("its contents do not match their checksum")
        split = None
        if (folder / "parts.npy").exists():
            parts = _array(folder / "parts.npy")
            if parts.shape != labels.shape:
                raise ValueError("parts.npy must say 0, 1 or 2 for each sample")
            split = (tuple(np.flatnonzero(parts == part) for part in range(len(PARTS))),)
        return Dataset(name, inputs, labels, tuple(meta["classes"]), tuple(meta["words"]), split, meta["digest"])
    except Exception as error:  # numpy parses headers as Python: a damaged one raises anything
        raise DataError(f"{folder} holds no data set of cwfed, or a damaged one ({error})") from None


def _array(path: Path) -> NDArray[Any]:
    """A view of a file: what its header claims is there, or numpy refuses it before it takes any memory."""
    files.check_regular(path)
    found: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    return found


def write(data: Dataset, folder: Path) -> None:
    """Beside its place first, then renamed: there is never half a data set."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        np.save(scratch / "inputs.npy", data.inputs)
        np.save(scratch / "labels.npy", data.labels)
        if data.fixed_split:
            parts = np.zeros(len(data.labels), np.int8)
            (own,) = data.fixed_split
            for number, indices in enumerate(own):
                parts[indices] = number
            np.save(scratch / "parts.npy", parts)
        meta = {"digest": data.digest, "classes": data.class_names, "words": data.words}
        (scratch / "meta.json").write_text(json.dumps(files.seal_table(meta)))
        shutil.rmtree(folder, ignore_errors=True)
        try:
            scratch.rename(folder)
        except FileExistsError:
            pass  # another process was faster, with the same content
        except OSError as error:
            if not folder.exists():
                raise error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
