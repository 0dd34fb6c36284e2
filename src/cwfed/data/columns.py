"""Columns of a table, from the hub or from a CSV file, as samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cwfed.core.errors import DataError
from cwfed.data import text
from cwfed.data.dataset import Dataset

ALL = ("*",)
"""As `feature_columns`: all columns but those of the labels and the clients."""


def chosen_columns(wanted: tuple[str, ...], known: Sequence[str], label: str, client: str) -> list[str]:
    """The columns whose numbers make a sample's vector."""
    return [c for c in known if c not in (label, client)] if wanted == ALL else list(wanted)


def vectors(what: str, columns: dict[str, list[Any]]) -> NDArray[np.float32]:
    """Columns of numbers as vectors, one for each sample."""
    if not columns:
        raise DataError(f"{what} has no column besides that of the labels")
    made = []
    for name, values in columns.items():
        numbers = []
        for sample, value in enumerate(values):
            try:
                numbers.append(float(value))
            except (TypeError, ValueError):
                raise DataError(
                    f"{what}: the column {name!r} has {value!r} at sample {sample}, which is not a number: name columns of "
                    "numbers as data.feature_columns"
                ) from None
        made.append(np.array(numbers, dtype=np.float32))
    return np.stack(made, axis=1)


def with_clients(made: Dataset, column: str, owners: Sequence[Any]) -> Dataset:
    """The data set with the natural clients of a column, if one is named."""
    if not column:
        return made
    if missing := [sample for sample, owner in enumerate(owners) if owner is None or owner == ""]:
        raise DataError(f"data set {made.name!r}: sample {missing[0]} has no client in the column {column!r}")
    if not all(isinstance(owner, str | int) for owner in owners):
        raise DataError(f"data set {made.name!r}: the column {column!r} must name clients by texts or whole numbers")
    return made.owned_by(list(map(str, owners)) if any(isinstance(owner, str) for owner in owners) else list(owners))


def text_dataset(name: str, texts: list[str], labels: NDArray[np.int64], names: tuple[str, ...]) -> Dataset:
    """A data set of texts, as tokens of their own vocabulary."""
    words = text.vocabulary(texts)
    return Dataset(name, text.encode(texts, words), labels, names, words)
