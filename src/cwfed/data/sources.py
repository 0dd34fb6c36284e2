"""Where data come from: the embedded digits, the hub or its parquet files on disk, and the user's own."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cwfed.core.errors import ConfigError, CwfedError, DataError, did_you_mean
from cwfed.core.files import check_regular
from cwfed.core.plugins import load_object, why
from cwfed.data import images, pfllib, text
from cwfed.data.dataset import CACHE_VERSION, Dataset, cached, read


@dataclass(frozen=True)
class Hub:
    """A data set of the Hugging Face hub: which columns and which splits are merged."""

    repository: str
    label: str = "label"
    image: str = ""
    text: str = ""
    splits: tuple[str, ...] = ("train", "test")


HUB = {
    "mnist": Hub("ylecun/mnist", image="image"),
    "fashion_mnist": Hub("zalando-datasets/fashion_mnist", image="image"),
    "cifar10": Hub("uoft-cs/cifar10", image="img"),
    "cifar100": Hub("uoft-cs/cifar100", image="img", label="fine_label"),
    "tiny_imagenet": Hub("zh-plus/tiny-imagenet", image="image", splits=("train", "valid")),
    "ag_news": Hub("fancyzhx/ag_news", text="text"),
}
OWN = ("hub", "imagefolder", "csv", "pfllib", "arrays")
NAMES = ("digits", *HUB, *OWN)
SPLIT = ("pfllib", "arrays")
"""Data of these come dealt out to clients: the settings of the partition do not apply."""


@dataclass(frozen=True)
class SourceSpec:
    """Which data to load. `name` is one of NAMES or "module:function"."""

    name: str
    path: str = ""
    image_column: str = ""
    text_column: str = ""
    label_column: str = "label"
    image_size: int = 0


def load(spec: SourceSpec, data_dir: str | Path | None = None) -> Dataset:
    """The data set, from the cache where it was decoded before. `data_dir` defaults to CWFED_DATA."""
    chosen = data_dir or os.environ.get("CWFED_DATA")
    folder = Path(chosen) if chosen else None
    if spec.name == "digits":
        return digits()
    if spec.name in HUB:
        return _hub(spec.name, HUB[spec.name], folder, spec.image_size)
    if ":" in spec.name:
        return _function(spec.name)
    if spec.name not in OWN:
        raise ConfigError(f"unknown data set {spec.name!r}: {did_you_mean(spec.name, NAMES)}")
    if not spec.path:
        raise ConfigError(f'data.name = "{spec.name}" needs data.path')
    if spec.name == "hub":
        if bool(spec.image_column) == bool(spec.text_column):
            raise ConfigError('data.name = "hub" needs one of data.image_column and data.text_column')
        hub = Hub(spec.path, spec.label_column, spec.image_column, spec.text_column, splits=())
        return _hub(Path(spec.path).name, hub, folder, spec.image_size)
    path = Path(spec.path)
    if not path.exists():
        raise DataError(f"data.path {spec.path} does not exist")
    if spec.name == "pfllib":
        return pfllib.load(path)
    if spec.name == "arrays":
        return read(path.name, path)
    return _imagefolder(path, spec.image_size) if spec.name == "imagefolder" else _csv(path, spec)


def digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels that ship inside scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = (found.images[..., None] / 8 - 1).astype(np.float32)
    return Dataset("digits", pixels, found.target.astype(np.int64), tuple("0123456789"))


# --- the hub, online or as parquet files on disk ---------------------------------------------------------


def _hub(name: str, hub: Hub, data_dir: Path | None, size: int) -> Dataset:
    files = _parquet_files(hub, data_dir)
    if files:
        key = _content_key([p for paths in files.values() for p in paths], hub, size)
        return cached(name, key, lambda: _decode(name, hub, _open_parquet(name, files), size, False))
    tables = _open_online(name, hub, data_dir)
    key = _key([t._fingerprint for t in tables], hub, size)
    return cached(name, key, lambda: _decode(name, hub, tables, size, True))


def _parquet_files(hub: Hub, data_dir: Path | None) -> dict[str, list[Path]]:
    """The files of each split below DIR/<hub name>, or below a local folder given instead of a hub name."""
    if not hub.splits and Path(hub.repository).is_file():
        return {"everything": [Path(hub.repository)]}
    roots = [Path(hub.repository)] if not hub.splits else []
    roots += [data_dir / hub.repository] if data_dir else []
    for root in roots:
        found = sorted(root.rglob("*.parquet"))
        if not hub.splits and found:
            return {"everything": found}
        by_split = {s: [p for p in found if p.name.startswith((f"{s}-", f"{s}."))] for s in hub.splits}
        if found and not all(by_split.values()):
            missing = [s for s, paths in by_split.items() if not paths]
            raise DataError(f"{root} has no parquet file for the split {missing[0]!r}")
        if found:
            return by_split
    return {}


def _open_parquet(name: str, files: dict[str, list[Path]]) -> list[Any]:
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as scratch:  # our own cache keeps the arrays: no second copy on disk
        try:
            paths = {split: [str(p) for p in found] for split, found in files.items()}
            opened = datasets.load_dataset("parquet", data_files=paths, cache_dir=scratch, keep_in_memory=True)
            return [opened[split] for split in files]
        except Exception as error:  # datasets wraps what pyarrow says in several layers of its own types
            reason = str(error.__cause__ or error).splitlines()[0]
            raise DataError(f"data set {name!r}: the parquet files cannot be read ({reason})") from None


def _open_online(name: str, hub: Hub, data_dir: Path | None) -> list[Any]:
    import datasets

    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # its retries are not the user's concern
    try:
        found = datasets.load_dataset(hub.repository)
        return [found[split] for split in hub.splits or found]
    except Exception as error:  # network, permissions, names: whatever it is, the hub is not to be had
        looked = f"{data_dir / hub.repository} has no parquet files" if data_dir else "no --data-dir was given"
        raise DataError(
            f"data set {name!r} is not here: {looked}, and the hub did not give {hub.repository} "
            f"({type(error).__name__}); download it there and pass its folder as --data-dir or CWFED_DATA"
        ) from None


def _decode(name: str, hub: Hub, tables: Sequence[Any], size: int, may_name_files: bool) -> Dataset:
    import datasets

    column = hub.image or hub.text
    for table in tables:
        for wanted in (column, hub.label):
            if wanted not in table.column_names:
                near = did_you_mean(wanted, table.column_names)
                raise DataError(f"data set {name!r} has no column {wanted!r}: {near}")
    feature = tables[0].features[hub.label]
    raw = [value for table in tables for value in _column(table, hub.label)]
    if isinstance(feature, datasets.ClassLabel):
        labels, names = _numbers(name, raw), tuple(feature.names)
    else:
        labels, names = number_labels(raw)
    if hub.text:
        return _texts(name, [str(v) for table in tables for v in _column(table, column)], labels, names)
    pictures: list[images.Picture] = []
    for table in tables:
        try:
            encoded = table.cast_column(column, datasets.Image(decode=False))
        except Exception as error:  # pyarrow and datasets have several types for this
            raise DataError(f"data set {name!r}: the column {column!r} does not hold images ({error})") from None
        pictures += [_picture(name, value, may_name_files) for value in _column(encoded, column)]
    return Dataset(name, images.decode(pictures, name, size), labels, names)


def _numbers(name: str, raw: Sequence[Any]) -> NDArray[np.int64]:
    try:
        return np.asarray(raw, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"data set {name!r}: a sample has no label, or one that is no number") from None


def _picture(name: str, value: Any, may_name_files: bool) -> images.Picture:
    """A picture of a column: its bytes, or, of the hub's own copies, the file they are in."""
    if value and value["bytes"] is not None:
        found: bytes = value["bytes"]
        return found
    if not value or not may_name_files:  # a file from somewhere must not choose what is read from this disk
        raise DataError(f"data set {name!r}: a picture is missing from the parquet files, or only named there")
    return Path(value["path"])


def _column(table: Any, name: str) -> list[Any]:
    """One column, without decoding the others."""
    values: list[Any] = table.select_columns([name])[:][name]
    return values


# --- the user's own --------------------------------------------------------------------------------------


def _imagefolder(root: Path, size: int) -> Dataset:
    """One folder a class, images below it."""
    endings = images.endings()
    folders = [p.name for p in root.iterdir() if p.is_dir()] if root.is_dir() else []
    classes = sorted(name for name in folders if not name.startswith("."))
    found = [(p, k) for k in classes for p in sorted((root / k).rglob("*")) if p.name.lower().endswith(endings)]
    if not found:
        raise DataError(f"{root} has no images in class folders, such as {root}/cat/1.png")
    paths = [p for p, _ in found]
    labels = np.array([classes.index(k) for _, k in found], dtype=np.int64)
    key = _content_key(paths, [str(p.relative_to(root)) for p in paths], classes, size)
    name = root.resolve().name
    return cached(name, key, lambda: Dataset(name, images.decode(paths, name, size), labels, tuple(classes)))


def _csv(path: Path, spec: SourceSpec) -> Dataset:
    """A header line, a column of text and a column of labels."""
    column = spec.text_column or "text"

    def decode() -> Dataset:
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file)
                header = reader.fieldnames
                if header is None:
                    raise DataError(f"{path} is empty")
                for wanted in (column, spec.label_column):
                    if wanted not in header:
                        raise DataError(f"{path} has no column {wanted!r}: {did_you_mean(wanted, header)}")
                rows = [(row[column] or "", row[spec.label_column]) for row in reader]
                if unlabelled := [number for number, (_, label) in enumerate(rows, start=1) if not label]:
                    raise DataError(f"{path}: sample {unlabelled[0]} has no label")
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} cannot be read as CSV in UTF-8 ({error})") from None
        return _texts(path.stem, [t for t, _ in rows], *number_labels([k for _, k in rows]))

    return cached(path.stem, _content_key([path], column, spec.label_column), decode)


def _function(name: str) -> Dataset:
    """The user's function gives a Dataset, or (inputs, labels) as arrays."""
    function = load_object(name, "data")
    if not callable(function):
        raise ConfigError(f"data {name!r} is not a function")
    try:
        made = function()
    except CwfedError:
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever stops the user's code, or code that was never meant to be called
        raise DataError(f"data {name!r}: the function failed ({why(error)})") from None
    if isinstance(made, Dataset):
        return made
    try:
        inputs, raw = made
    except (TypeError, ValueError):
        raise DataError(f"{name} must return (inputs, labels) or a cwfed Dataset") from None
    inputs = np.asarray(inputs)
    if np.issubdtype(inputs.dtype, np.floating):
        inputs = inputs.astype(np.float32)
    return Dataset(name, inputs, *number_labels(np.asarray(raw).tolist()))


def number_labels(raw: Iterable[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Any labels as 0 .. K-1 in their sorted order, with their names."""
    values = list(raw)
    try:
        names = sorted(set(values))
    except TypeError:
        raise DataError("the labels must be all numbers or all text") from None
    number = {value: i for i, value in enumerate(names)}
    return np.array([number[v] for v in values], dtype=np.int64), tuple(map(str, names))


def _texts(name: str, texts: list[str], labels: NDArray[np.int64], names: tuple[str, ...]) -> Dataset:
    words = text.vocabulary(texts)
    return Dataset(name, text.encode(texts, words), labels, names, words)


# --- cache keys ------------------------------------------------------------------------------------------


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([CACHE_VERSION, *map(repr, parts)]).encode()).hexdigest()


def _content_key(paths: Sequence[Path], *parts: Any) -> str:
    """A hash of the files' contents: the cache never serves arrays of files that have changed."""
    digests = []
    for path in paths:
        try:
            check_regular(path)
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror})") from None
    return _key(digests, *parts)
