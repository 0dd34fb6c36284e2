"""What pictures show of more clients than they have room for, and the words that say what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

MANY = 60
"""The most clients that each have a place of their own in a picture."""
POINTS = 200
"""The most points of a sorted curve."""
DOTS = 3000
"""The most points of p~ against p."""


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """At most so many of the numbers below `count`, evenly spread, with the first and the last.

    >>> evenly(9, 3).tolist()
    [0, 4, 8]
    """
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def rows_to_show(shares: Sequence[Sequence[float]] | NDArray[Any]) -> list[int]:
    """Which clients are the rows of a heat map: all, in their order; of many, an even sample in the order of their main class.

    `shares`: who has how much of which class, clients x classes.
    """
    table = np.asarray(shares, dtype=float)
    if len(table) <= MANY:
        return list(range(len(table)))
    main_share = table.max(1) / table.sum(1).clip(1e-12)
    by_main_class = np.lexsort((-main_share, table.argmax(1)))
    return [int(row) for row in by_main_class[evenly(len(table), MANY)]]


def rows_in_words(count: int, of: int | None = None) -> str:
    """What `rows_to_show` did with so many clients (of even more, where not all could be asked); nothing where it shows all.

    >>> rows_in_words(1000)
    '60 of 1,000 clients, sorted by their main class'
    """
    if count <= MANY and count == (of or count):
        return ""
    order = ", sorted by their main class" if count > MANY else ""
    return f"{min(count, MANY)} of {of or count:,} clients{order}"


def end_of_colours(counts: NDArray[Any]) -> tuple[float, str]:
    """Where the colours of a heat map of counts end, and what is said of it: at the largest, unless few cells are far above all
    others, such as a client that holds the rest of the data.

    >>> end_of_colours(np.array([[3, 0, 5], [4, 6, 0]]))
    (6.0, '')
    >>> end_of_colours(np.array([[3] * 99 + [0, 970]]))
    (3.0, 'colours end at 3 samples, the largest cell has 970')
    """
    held = counts[counts > 0]
    largest = float(held.max()) if held.size else 0.0
    usual = ceil(np.quantile(held, 0.98)) if held.size else 0
    if largest <= 4 * usual:
        return largest, ""
    return float(usual), f"colours end at {usual:,} samples, the largest cell has {largest:,.0f}"


def worst_to_best(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Places (from 1) and values of a sorted curve; for many clients an even sample."""
    places = evenly(len(values), POINTS)
    return (places + 1).tolist(), np.sort(values)[places].tolist()
