"""Where data come from: the digits, the hub (`from_hub.py`), and the user's own files, arrays and functions."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cwfed.core.errors import ConfigError, CwfedError, DataError, did_you_mean
from cwfed.core.plugins import load_object, why
from cwfed.data import images, pfllib
from cwfed.data.columns import ALL, chosen_columns, text_dataset, vectors, with_clients
from cwfed.data.dataset import Dataset, number_labels
from cwfed.data.from_hub import HUB, Hub, load_hub
from cwfed.data.store import cached, content_key, read

OWN = ("hub", "imagefolder", "csv", "pfllib", "arrays")
MEMORY = ("memory", "memory_split")
"""The names in a config for data that were given in Python, cwfed.run(data=...); the second if they are split already."""
NAMES = ("digits", *HUB, *OWN, *MEMORY)
SPLIT = ("pfllib", "arrays", "memory_split")
"""Data that are split already: the settings of the partition do not apply."""


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
    """The data set; from the cache if it was decoded before. `data_dir`: default CWFED_DATA."""
    chosen = data_dir or os.environ.get("CWFED_DATA")
    folder = Path(chosen) if chosen else None
    if spec.name == "digits":
        return digits()
    if spec.name in MEMORY:
        raise ConfigError(
            f'data.name = "{spec.name}" stands for data that were given in Python: give them again, as cwfed.run(data=...)'
        )
    if spec.name in HUB:
        return load_hub(spec.name, replace(HUB[spec.name], client=spec.client_column), folder, spec.image_size)
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
        return load_hub(Path(spec.path).name, hub, folder, spec.image_size)
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
    """1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn.

    Their file is read directly: importing scikit-learn takes seconds.
    """
    package = find_spec("sklearn")
    assert package is not None, "scikit-learn is one of our requirements"
    (folder,) = package.submodule_search_locations or [""]
    table = np.loadtxt(Path(folder) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels = (table[:, :-1].reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32)
    labels = table[:, -1].astype(np.int64)
    for array in (pixels, labels):  # `cache` gives the same arrays to every caller
        array.flags.writeable = False
    return Dataset("digits", pixels, labels, tuple("0123456789"))


# --- the user's own


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
    key = content_key(paths, [str(p.relative_to(root)) for p in paths], classes, size)
    name = root.resolve().name
    return cached(name, key, lambda: Dataset(name, images.decode(paths, name, size), labels, tuple(classes)))


def _csv(path: Path, spec: SourceSpec) -> Dataset:
    """A header line, a column of labels, and a column of text or several of numbers."""
    column = spec.text_column or ("" if spec.feature_columns else "text")

    def decode() -> Dataset:
        header, rows = _csv_rows(path, spec, column)
        labels, names = number_labels([row[spec.label_column] for row in rows])
        if spec.feature_columns:
            chosen = chosen_columns(spec.feature_columns, header, spec.label_column, spec.client_column)
            inputs = vectors(str(path), {c: [row[c] for row in rows] for c in chosen})
            made = Dataset(path.stem, inputs, labels, names)
        else:
            made = text_dataset(path.stem, [row[column] or "" for row in rows], labels, names)
        return with_clients(made, spec.client_column, [row.get(spec.client_column) for row in rows])

    later = {"features": spec.feature_columns, "client": spec.client_column, "delimiter": spec.delimiter.strip(",")}
    used = {name: value for name, value in later.items() if value}
    key = content_key([path], column, spec.label_column, *([used] if used else []))
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
                    raise DataError(f"{path} has no column {wanted!r}: {_csv_hint(header, wanted, spec)}")
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
    """The end of the error for a missing column: what may be meant."""
    if other := [d for d in ";\t|" if len(header) == 1 and d in header[0] and d != spec.delimiter]:
        return f"if its columns are separated by {other[0]!r}, set data.delimiter"
    known = did_you_mean(wanted, header)
    if wanted == "text" and not spec.text_column:
        return f'{known}; data.text_column names the column of texts, data.feature_columns = ["*"] takes columns of numbers'
    return known


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
