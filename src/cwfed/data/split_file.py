"""Reads a split from a file: which client holds which samples, as CSV or JSON.

    client,sample,part              {"anna": {"train": [0, 5, 7], "test": [3]},
    anna,0,train                     "ben":  {"train": [1, 2], "test": [4]}}
    ben,1,train
    ...                             or without parts: {"anna": [0, 3, 5, 7], "ben": [1, 2, 4]}, or a list of such

Without the column `part`, each client's samples are split as in any partition. Samples that are not in the file are not used.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cwfed.core.errors import DataError, did_you_mean
from cwfed.core.files import read_text
from cwfed.data.dataset import PARTS


@dataclass(frozen=True)
class Split:
    """For each client its name and its sample numbers, by part if the file has parts."""

    names: tuple[str, ...]
    shares: tuple[NDArray[np.int64], ...] = ()
    parts: tuple[tuple[NDArray[np.int64], ...], ...] = ()
    """(train, test) or (train, validation, test) of each client if the file has parts; then `shares` is empty."""


LONGEST = 20
"""Digits from which on a client's number is treated as a name."""
Entry = tuple[str, Any, str]
"""A client, a sample number, a part ("" where there are none)."""


def read(path: Path, samples: int) -> Split:
    """The split in a file, for a data set of so many samples."""
    try:
        text = read_text(path)
    except OSError as error:
        raise DataError(f"the split file {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(f"the split file {path} is no text in UTF-8") from None
    entries = list(_json(text, path) if path.suffix.lower() == ".json" else _csv(text, path))
    return arrange(entries, samples, str(path))


def arrange(entries: list[Entry], samples: int, where: str = "the split") -> Split:
    """Entries as a split; DataError if they are not a possible one.

    >>> arrange([("b", 3, ""), ("a", 0, ""), ("b", 1, "")], 5).shares
    (array([0]), array([1, 3]))
    """
    if not entries:
        raise DataError(f"{where} names no samples")
    numbers = [_number(entry, samples, where) for entry in entries]
    counted = Counter(numbers)
    if len(counted) < len(numbers):
        sample = next(number for number, times in counted.items() if times > 1)
        owners = [client for number, (client, _, _) in zip(numbers, entries, strict=True) if number == sample]
        raise DataError(
            f"{where} gives sample {sample} twice, to {owners[0]!r} and to {owners[1]!r}: each goes to one client, once"
        )
    parts = {part for _, _, part in entries}
    if unknown := sorted(parts - {*PARTS, ""}):
        raise DataError(f"{where} has a part {unknown[0]!r}: {did_you_mean(unknown[0], PARTS)}")
    if "" in parts and len(parts) > 1:
        raise DataError(
            f"{where} gives a part for some samples and none for others: give it for all samples or for none"
        )
    held: dict[str, dict[str, list[int]]] = {}
    for (client, _, part), number in zip(entries, numbers, strict=True):
        held.setdefault(client, {}).setdefault(part, []).append(number)
    names = tuple(sorted(held, key=_order(held)))
    if parts == {""}:
        return Split(names, shares=tuple(_indices(held[name][""]) for name in names))
    if empty := [name for name in names if "train" not in held[name]]:
        raise DataError(f"{where} gives client {empty[0]!r} no training samples")
    kinds = PARTS if "validation" in parts else ("train", "test")
    return Split(names, parts=tuple(tuple(_indices(held[n].get(kind, [])) for kind in kinds) for n in names))


def _order(names: Mapping[str, Any]) -> Any:
    """Numbers by their value, other names as texts."""
    return int if all(name.isdecimal() and len(name) < LONGEST for name in names) else str


def _indices(numbers: list[int]) -> NDArray[np.int64]:
    return np.array(sorted(numbers), dtype=np.int64)


def _number(entry: Entry, samples: int, where: str) -> int:
    client, given, _ = entry
    try:
        number = int(given)
        if isinstance(given, bool | float):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{where}: client {client!r} has the sample {given!r}, which is not a whole number") from None
    if not 0 <= number < samples:
        raise DataError(f"{where}: client {client!r} has the sample {number}, and the samples are 0 to {samples - 1}")
    return number


def _csv(text: str, path: Path) -> Iterator[Entry]:
    try:
        reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
        header = reader.fieldnames or ()
        for wanted in ("client", "sample"):
            if wanted not in header:
                near = did_you_mean(wanted, header) if header else "it is empty"
                raise DataError(f"the split file {path} has no column {wanted!r}: {near}")
        for row in reader:
            yield (row["client"] or "").strip(), (row["sample"] or "").strip(), (row.get("part") or "").strip()
    except csv.Error as error:
        raise DataError(f"the split file {path} cannot be read as CSV ({error})") from None


def _json(text: str, path: Path) -> Iterator[Entry]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the split file {path} cannot be read as JSON ({error})") from None
    clients = dict(enumerate(table)) if isinstance(table, list) else table
    if not isinstance(clients, dict):
        raise DataError(f"the split file {path} must be a table or a list of clients")
    for client, held in clients.items():
        for part, numbers in held.items() if isinstance(held, dict) else (("", held),):
            if not isinstance(numbers, list):
                raise DataError(f"the split file {path}: client {str(client)!r} must have a list of sample numbers")
            yield from ((str(client), number, part) for number in numbers)
