"""Data sets of the Hugging Face hub: online, or from its parquet files on disk."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cwfed.core.errors import DataError, did_you_mean
from cwfed.data import images
from cwfed.data.columns import ALL, chosen_columns, text_dataset, vectors, with_clients
from cwfed.data.dataset import Dataset, number_labels
from cwfed.data.store import cache_key, cached, content_key


@dataclass(frozen=True)
class Hub:
    """A data set of the Hugging Face hub: which columns are read, and which splits are merged."""

    repository: str
    label: str = "label"
    image: str = ""
    text: str = ""
    splits: tuple[str, ...] = ("train", "test")
    """None named: all there are."""
    subset: str = field(default="", repr=False)
    """The configuration, for repositories that have several; offline, the folder of that name."""
    features: tuple[str, ...] = field(default=(), repr=False)
    """Columns of numbers, for vectors."""
    client: str = field(default="", repr=False)
    """The column with the client of each sample."""
    is_own: bool = field(default=False, repr=False)
    """Whether `repository` may be a local file or folder."""

    def key(self) -> list[Any]:
        """What the decoded arrays depend on, for the cache. Fields that were added later count only if they are set, so that old keys stay."""
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


def load_hub(name: str, hub: Hub, data_dir: Path | None, size: int) -> Dataset:
    """A data set of the hub: from parquet files on disk if there are any, else online."""
    files = _parquet_files(hub, data_dir)
    if files:
        key = content_key([p for paths in files.values() for p in paths], *hub.key(), size)
        return cached(name, key, lambda: _decode(name, hub, _open_parquet(name, files), size, False))
    tables = _open_online(name, hub, data_dir)
    key = cache_key([t._fingerprint for t in tables], *hub.key(), size)
    return cached(name, key, lambda: _decode(name, hub, tables, size, True))


def _parquet_files(hub: Hub, data_dir: Path | None) -> dict[str, list[Path]]:
    """By split, the parquet files below DIR/<hub name>, or below a local folder given in place of a hub name; empty if there are none."""
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

    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it logs every retry
    try:
        found = datasets.load_dataset(hub.repository, hub.subset or None)
    except Exception as error:  # network, permissions, an unknown name
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
        chosen = chosen_columns(hub.features, tables[0].column_names, hub.label, hub.client)
        columns = {c: [value for table in tables for value in _column(table, c)] for c in chosen}
        made = Dataset(name, vectors(f"data set {name!r}", columns), labels, names)
    elif hub.text:
        made = text_dataset(name, list(map(str, values[hub.text])), labels, names)
    else:
        pictures = [p for table in tables for p in _pictures(name, table, column, may_name_files)]
        made = Dataset(name, images.decode(pictures, name, size), labels, names)
    return with_clients(made, hub.client, values.get(hub.client, ()))


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
        raise DataError(f"data set {name!r}: a sample has no label, or one that is not a number") from None


def _picture(name: str, value: Any, may_name_files: bool) -> images.Picture:
    """A picture of a column: its bytes, or, for the hub's own copies only, the path of its file."""
    if value and value["bytes"] is not None:
        found: bytes = value["bytes"]
        return found
    if not value or not may_name_files:  # a file from somewhere must not choose what is read from this disk
        raise DataError(f"data set {name!r}: a picture is missing from the parquet files, which may only name it")
    return Path(value["path"])


def _column(table: Any, name: str) -> list[Any]:
    """One column, without decoding the others."""
    values: list[Any] = table.select_columns([name])[:][name]
    return values
