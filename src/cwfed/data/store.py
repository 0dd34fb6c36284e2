"""Data sets on disk: the folder of one (`write`, `read`), and the cache of decoded arrays that makes a second start fast."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cwfed.core import files
from cwfed.core.errors import DataError
from cwfed.data.dataset import PARTS, Dataset, digest_of

CACHE_VERSION = 1
"""Part of every cache key: raise it when decoding changes."""


# --- the folder of a data set


def write(data: Dataset, folder: Path) -> None:
    """Write a data set to a folder. It is written beside it first and renamed, so that there is never half a data set."""
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
        if data.owners is not None:
            np.save(scratch / "owners.npy", data.owners)
            meta |= {"owners": data.owner_names, "owners_digest": digest_of(data.owners)}
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


def read(name: str, folder: Path) -> Dataset:
    """The data set in a folder that `write` made; DataError if it is damaged."""
    try:
        meta = json.loads(files.read_text(folder / "meta.json"))
        if files.SEAL not in meta:  # an earlier version's: its names are not covered by a checksum
            raise ValueError("it has no checksum")
        files.open_table(meta)
        inputs, labels = _array(folder / "inputs.npy"), np.array(_array(folder / "labels.npy"))
        if meta["digest"] != digest_of(inputs, labels):
            raise ValueError("its contents do not match their checksum")
        split = None
        if (folder / "parts.npy").exists():
            parts = _array(folder / "parts.npy")
            if parts.shape != labels.shape:
                raise ValueError("parts.npy must say 0, 1 or 2 for each sample")
            split = (tuple(np.flatnonzero(parts == part) for part in range(len(PARTS))),)
        owners = np.array(_array(folder / "owners.npy")) if "owners" in meta else None
        if owners is not None and meta["owners_digest"] != digest_of(owners):
            raise ValueError("its samples' clients do not match their checksum")
        return Dataset(
            name,
            inputs,
            labels,
            tuple(meta["classes"]),
            tuple(meta["words"]),
            split,
            meta["digest"],
            owners,
            tuple(meta.get("owners", ())),
        )
    except Exception as error:  # numpy parses headers as Python: a damaged one raises anything
        raise DataError(f"{folder} holds no data set of cwfed, or a damaged one ({error})") from None


def _array(path: Path) -> NDArray[Any]:
    """A view of a file: a header that claims more than there is cannot take any memory."""
    files.check_regular(path)
    found: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    return found


# --- the cache


def cache_dir() -> Path:
    """The folder of the cache: CWFED_CACHE, or cwfed in the user's cache folder."""
    if chosen := os.environ.get("CWFED_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cwfed"


def cached(name: str, key: str, decode: Callable[[], Dataset]) -> Dataset:
    """The data set with this key: from the cache, or else decoded and put there."""
    folder = cache_dir() / f"{name.replace('/', '--')}-{key[:16]}"
    found = _read_if_whole(name, folder)
    if found is None:
        data = decode()
        try:
            write(data, folder)
        except OSError as error:
            raise DataError(
                f"cannot write the data cache {folder.parent} ({error.strerror or error}): "
                "set CWFED_CACHE to a folder with room"
            ) from None
        found = _read_if_whole(name, folder) or data
    return found


def _read_if_whole(name: str, folder: Path) -> Dataset | None:
    """None if the cache does not have it, or only damaged: then it is decoded again."""
    try:
        return read(name, folder)
    except DataError:
        return None


def cache_key(*parts: Any) -> str:
    """A hash of everything that decoded arrays depend on."""
    return hashlib.sha256(json.dumps([CACHE_VERSION, *map(repr, parts)]).encode()).hexdigest()


def content_key(paths: Sequence[Path], *parts: Any) -> str:
    """The same with the contents of files: arrays of a file that has changed are never taken from the cache."""
    digests = []
    for path in paths:
        try:
            files.check_regular(path)
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror})") from None
    return cache_key(digests, *parts)
