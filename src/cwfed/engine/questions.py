"""The samples of a batched evaluation: many clients' test and held-out samples as one rectangle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from cwfed.core.metrics import OwnSums, Places
from cwfed.data import Federation, Samples
from cwfed.data.clients import GATHERED

MEASURED = 4096
"""The most samples measured at once, over all clients."""


class Questions(NamedTuple):
    """The samples that are measured, in rows of the clients' mean number of samples: a client with more has several rows.

    A row that is not full repeats some samples, which are not counted.
    """

    owners: list[int]
    """For each row, the place of its client among the clients."""
    starts: list[int]
    """Where each row begins among the samples of its owner, the test samples first."""
    sizes: list[tuple[int, int]]
    """How many test samples each client has, and how many held-out ones."""
    places: Places
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]


def questions(federation: Federation, samples: Samples, clients: Sequence[int]) -> Questions:
    """The test and validation samples of these clients."""
    shards = [federation.shards[c] for c in clients]
    asked = [np.concatenate([s.test, s.validation]) for s in shards]
    width = max(1, -(-sum(map(len, asked)) // len(asked)))
    rows = [(i, start) for i, own in enumerate(asked) for start in range(0, len(own), width)]
    indices = np.empty((len(rows), width), np.int64)
    part = np.full(indices.shape, 2 * len(asked))  # what is repeated is nobody's
    for row, (i, start) in enumerate(rows):
        own = asked[i][start : start + width]
        indices[row] = np.resize(own, width)
        part[row, : len(own)] = np.where(start + np.arange(len(own)) < len(shards[i].test), 2 * i, 2 * i + 1)
    at_once = max(1, MEASURED // max(1, len(rows)))

    def gathered() -> Iterator[tuple[Tensor, Tensor]]:
        for at in range(0, width if rows else 0, at_once):
            yield samples.batch(indices[:, at : at + at_once])

    kept = list(gathered()) if indices.size * federation.data.inputs[0].size <= GATHERED else None
    return Questions(
        owners=[i for i, _ in rows],
        starts=[start for _, start in rows],
        sizes=[(len(s.test), len(s.validation)) for s in shards],
        places=Places(federation.data.labels[indices], part, 2 * len(asked), federation.data.classes),
        batches=gathered if kept is None else lambda: kept,
    )


def add_own(own: OwnSums, asked: Questions, at: int, logits: Tensor, labels: Tensor) -> None:
    """Add a batch, which begins at column `at`, to the sums of the user's own metrics."""
    for row, (i, start) in enumerate(zip(asked.owners, asked.starts, strict=True)):
        tests, held_out = asked.sizes[i]
        for part, first, end in ((2 * i, 0, tests), (2 * i + 1, tests, tests + held_out)):
            here = slice(max(first - start - at, 0), min(end - start - at, labels.shape[1]))
            if here.start < here.stop:
                own.add(part, logits[row, here], labels[row, here])
