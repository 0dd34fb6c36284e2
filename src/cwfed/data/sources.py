"""Where data come from: the embedded digits, the hub or its parquet files on disk, and the user's own."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cwfed.core.errors import ConfigError, CwfedError, DataError, did_you_mean
from cwfed.core.files import check_regular
from cwfed.core.plugins import load_object, why
from cwfed.data import images, pfllib, text
from cwfed.data.dataset import CACHE_VERSION, Dataset, cached, number_labels, read


@dataclass(frozen=True)
class Hub:
    """A data set of the Hugging Face hub: which columns and which splits are merged."""

    repository: str
    label: str = "label"
    image: str = ""
    text: str = ""
    splits: tuple[str, ...] = ("train", "test")
    """All there are where none is named."""
    subset: str = field(default="", repr=False)
    """Which of the configurations that some repositories have; offline, the folder of that name."""
    features: tuple[str, ...] = field(default=(), repr=False)
    """Columns of numbers, for vectors."""
    client: str = field(default="", repr=False)
    """The column that says whose a sample is."""
    is_own: bool = field(default=False, repr=False)
    """Whether `repository` may be a file or a folder here."""

    def key(self) -> list[Any]:
        """What the decoded arrays depend on, for the cache; what came later is only said where it is used."""
        later = {name: getattr(self, name) for name in ("subset", "features", "client")}
        return [self, *([used] if (used := {name: value for name, value in later.items() if value}) else [])]


HUB = {
    "mnist": Hub("ylecun/mnist", image="image"),
    "fashion_mnist": Hub("zalando-datasets/fashion_mnist", image="image"),
    "cifar10": Hub("uoft-cs/cifar10", image="img"),
    "cifar100": Hub("uoft-cs/cifar100", image="img", label="fine_label"),
    "tiny_imagenet": Hub("zh-plus/tiny-imagenet", image="image", splits=("train", "valid")),
    "ag_news": Hub("fancyzhx/ag_news", text="text"),
}
OWN = ("hub", "imagefolder", "csv", "pfllib", "arrays")
MEMORY = ("memory", "memory_split")
"""These stand in a config for data that were given in Python, cwfed.run(data=...); the second for such that come split."""
NAMES = ("digits", *HUB, *OWN, *MEMORY)
SPLIT = ("pfllib", "arrays", "memory_split")
"""Data of these come dealt out to clients: the settings of the partition do not apply."""
ALL = ("*",)
"""As `feature_columns`: all columns but those of the labels and the clients."""


@dataclass(frozen=True)
class SourceSpec:
    """Which data to load. `name` is one of NAMES or "module:function"."""

    name: str
    path: str = ""
    image_column: str = ""
    text_column: str = ""
    label_column: str = "label"
    image_size: int = 0
    feature_columns: tuple[str, ...] = ()
    client_column: str = ""
    delimiter: str = ","
    subset: str = ""
    splits: tuple[str, ...] = ()


def load(spec: SourceSpec, data_dir: str | Path | None = None) -> Dataset:
    """The data set, from the cache where it was decoded before. `data_dir` defaults to CWFED_DATA."""
    chosen = data_dir or os.environ.get("CWFED_DATA")
    folder = Path(chosen) if chosen else None
    if spec.name == "digits":
        return digits()
    if spec.name in MEMORY:
        raise ConfigError(
            f'data.name = "{spec.name}" stands for data that were given in Python: give them again, as cwfed.run(data=...)'
        )
    if spec.name in HUB:
        return _hub(spec.name, replace(HUB[spec.name], client=spec.client_column), folder, spec.image_size)
    if ":" in spec.name:
        return _function(spec.name)
    if spec.name not in OWN:
        raise ConfigError(f"unknown data set {spec.name!r}: {did_you_mean(spec.name, NAMES)}")
    if not spec.path:
        raise ConfigError(f'data.name = "{spec.name}" needs data.path')
    if spec.name == "hub":
        if sum(map(bool, (spec.image_column, spec.text_column, spec.feature_columns))) != 1:
            raise ConfigError(
                'data.name = "hub" needs one of data.image_column and data.text_column, or data.feature_columns'
            )
        hub = Hub(
            spec.path,
            spec.label_column,
            spec.image_column,
            spec.text_column,
            spec.splits,
            spec.subset,
            spec.feature_columns,
            spec.client_column,
            is_own=True,
        )
        return _hub(Path(spec.path).name, hub, folder, spec.image_size)
    path = Path(spec.path)
    if not path.exists():
        raise DataError(f"data.path {spec.path} does not exist")
    if spec.name == "pfllib":
        return pfllib.load(path)
    if spec.name == "arrays":
        return read(path.name, path)
    return _imagefolder(path, spec.image_size) if spec.name == "imagefolder" else _csv(path, spec)


@cache
def digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels that ship inside scikit-learn.

    Its file is read as it lies there: importing scikit-learn for it takes seconds.
    """
    package = find_spec("sklearn")
    assert package is not None, "scikit-learn is one of our requirements"
    (folder,) = package.submodule_search_locations or [""]
    table = np.loadtxt(Path(folder) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels = (table[:, :-1].reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32)
    labels = table[:, -1].astype(np.int64)
    for array in (pixels, labels):  # shared by all who ask
        array.flags.writeable = False
    return Dataset("digits", pixels, labels, tuple("0123456789"))


# --- the hub, online or as parquet files on disk ---------------------------------------------------------


def _hub(name: str, hub: Hub, data_dir: Path | None, size: int) -> Dataset:
    files = _parquet_files(hub, data_dir)
    if files:
        key = _content_key([p for paths in files.values() for p in paths], *hub.key(), size)
        return cached(name, key, lambda: _decode(name, hub, _open_parquet(name, files), size, False))
    tables = _open_online(name, hub, data_dir)
    key = _key([t._fingerprint for t in tables], *hub.key(), size)
    return cached(name, key, lambda: _decode(name, hub, tables, size, True))


def _parquet_files(hub: Hub, data_dir: Path | None) -> dict[str, list[Path]]:
    """The files of each split below DIR/<hub name>, or below a local folder given instead of a hub name."""
    if hub.is_own and Path(hub.repository).is_file():
        return {"everything": [Path(hub.repository)]}
    roots = [Path(hub.repository)] if hub.is_own else []
    roots += [data_dir / hub.repository] if data_dir else []
    for root in roots:
        found = sorted((root / hub.subset).rglob("*.parquet"))
        if hub.subset and not found and any(root.rglob("*.parquet")):
            raise DataError(f"{root} has no parquet files in a folder {hub.subset!r} (data.subset)")
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
        found = datasets.load_dataset(hub.repository, hub.subset or None)
    except Exception as error:  # network, permissions, names: whatever it is, the hub is not to be had
        looked = f"{data_dir / hub.repository} has no parquet files" if data_dir else "no --data-dir was given"
        raise DataError(
            f"data set {name!r} is not here: {looked}, and the hub did not give {hub.repository} "
            f"({type(error).__name__}); download it there and pass its folder as --data-dir or CWFED_DATA"
        ) from None
    if unknown := [split for split in hub.splits if split not in found]:
        raise DataError(f"{hub.repository} has no split {unknown[0]!r}: {did_you_mean(unknown[0], found)}")
    return [found[split] for split in hub.splits or found]


def _decode(name: str, hub: Hub, tables: Sequence[Any], size: int, may_name_files: bool) -> Dataset:
    import datasets

    column = hub.image or hub.text
    for table in tables:
        named = [] if hub.features == ALL else hub.features
        for wanted in filter(None, (column, hub.label, hub.client, *named)):
            if wanted not in table.column_names:
                near = did_you_mean(wanted, table.column_names)
                raise DataError(f"data set {name!r} has no column {wanted!r}: {near}")
    feature = tables[0].features[hub.label]
    raw = [value for table in tables for value in _column(table, hub.label)]
    if isinstance(feature, datasets.ClassLabel):
        labels, names = _numbers(name, raw), tuple(feature.names)
    else:
        labels, names = number_labels(raw)
    values = {c: [value for table in tables for value in _column(table, c)] for c in (hub.text, hub.client) if c}
    if hub.features:
        chosen = _features(hub.features, tables[0].column_names, hub.label, hub.client)
        columns = {c: [value for table in tables for value in _column(table, c)] for c in chosen}
        made = Dataset(name, _vectors(f"data set {name!r}", columns), labels, names)
    elif hub.text:
        made = _texts(name, list(map(str, values[hub.text])), labels, names)
    else:
        pictures = [p for table in tables for p in _pictures(name, table, column, may_name_files)]
        made = Dataset(name, images.decode(pictures, name, size), labels, names)
    return _owned(made, hub.client, values.get(hub.client, ()))


def _pictures(name: str, table: Any, column: str, may_name_files: bool) -> list[images.Picture]:
    import datasets

    try:
        encoded = table.cast_column(column, datasets.Image(decode=False))
    except Exception as error:  # pyarrow and datasets have several types for this
        raise DataError(f"data set {name!r}: the column {column!r} does not hold images ({error})") from None
    return [_picture(name, value, may_name_files) for value in _column(encoded, column)]


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


# --- columns of a table, from the hub or from a CSV file ---------------------------------------------------


def _features(wanted: tuple[str, ...], known: Sequence[str], label: str, client: str) -> list[str]:
    """The columns that make a vector."""
    return [c for c in known if c not in (label, client)] if wanted == ALL else list(wanted)


def _vectors(what: str, columns: dict[str, list[Any]]) -> NDArray[np.float32]:
    """Columns of numbers as vectors, one for each sample."""
    if not columns:
        raise DataError(f"{what} has no column beside that of the labels")
    made = []
    for name, values in columns.items():
        numbers = []
        for sample, value in enumerate(values):
            try:
                numbers.append(float(value))
            except (TypeError, ValueError):
                raise DataError(
                    f"{what}: the column {name!r} has {value!r} at sample {sample}, which is no number: name columns of "
                    "numbers as data.feature_columns"
                ) from None
        made.append(np.array(numbers, dtype=np.float32))
    return np.stack(made, axis=1)


def _owned(made: Dataset, column: str, owners: Sequence[Any]) -> Dataset:
    """The data set with the clients of this column, where one is named."""
    if not column:
        return made
    if missing := [sample for sample, owner in enumerate(owners) if owner is None or owner == ""]:
        raise DataError(f"data set {made.name!r}: sample {missing[0]} has no client in the column {column!r}")
    if not all(isinstance(owner, str | int) for owner in owners):
        raise DataError(f"data set {made.name!r}: the column {column!r} must name clients by texts or whole numbers")
    return made.owned_by(list(map(str, owners)) if any(isinstance(owner, str) for owner in owners) else list(owners))


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
    """A header line, a column of labels, and a column of text or several of numbers."""
    column = spec.text_column or ("" if spec.feature_columns else "text")

    def decode() -> Dataset:
        header, rows = _csv_rows(path, spec, column)
        labels, names = number_labels([row[spec.label_column] for row in rows])
        if spec.feature_columns:
            chosen = _features(spec.feature_columns, header, spec.label_column, spec.client_column)
            vectors = _vectors(str(path), {c: [row[c] for row in rows] for c in chosen})
            made = Dataset(path.stem, vectors, labels, names)
        else:
            made = _texts(path.stem, [row[column] or "" for row in rows], labels, names)
        return _owned(made, spec.client_column, [row.get(spec.client_column) for row in rows])

    later = {"features": spec.feature_columns, "client": spec.client_column, "delimiter": spec.delimiter.strip(",")}
    used = {name: value for name, value in later.items() if value}
    key = _content_key([path], column, spec.label_column, *([used] if used else []))
    return cached(path.stem, key, decode)


def _csv_rows(path: Path, spec: SourceSpec, column: str) -> tuple[Sequence[str], list[dict[str, Any]]]:
    """The header and the rows of a CSV file that has all columns that are wanted."""
    if spec.feature_columns and spec.text_column:
        raise ConfigError('data.name = "csv" takes data.text_column or data.feature_columns, not both')
    named = () if spec.feature_columns == ALL else spec.feature_columns
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter=spec.delimiter)
            header = reader.fieldnames
            if header is None:
                raise DataError(f"{path} is empty")
            for wanted in filter(None, (column, spec.label_column, spec.client_column, *named)):
                if wanted not in header:
                    hint = _csv_hint(header, wanted, spec)
                    raise DataError(f"{path} has no column {wanted!r}: {did_you_mean(wanted, header)}{hint}")
            rows = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV in UTF-8 ({error})") from None
    except (TypeError, ValueError):
        raise ConfigError(f"data.delimiter = {spec.delimiter!r} must be one character, such as ';'") from None
    if unlabelled := [number for number, row in enumerate(rows, start=1) if not row[spec.label_column]]:
        raise DataError(f"{path}: sample {unlabelled[0]} has no label")
    if not rows:
        raise DataError(f"{path} has no samples")
    return header, rows


def _csv_hint(header: Sequence[str], wanted: str, spec: SourceSpec) -> str:
    """What may be meant where a column is missing."""
    if other := [d for d in ";\t|" if len(header) == 1 and d in header[0] and d != spec.delimiter]:
        return f"; if its columns are separated by {other[0]!r}, set data.delimiter"
    if wanted == "text" and not spec.text_column:
        return '; data.text_column names the column of texts, data.feature_columns = ["*"] takes columns of numbers'
    return ""


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
    return Dataset.from_arrays(inputs, raw, name=name)


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
