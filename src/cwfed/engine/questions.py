"""The samples of a batched evaluation: many clients' test and held-out samples as one rectangle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cwfed.core.metrics import OwnSums, Places
from cwfed.data import Federation, Samples
from cwfed.data.clients import GATHERED

MEASURED = 4096
"""The most samples measured at once, over all clients."""


class Questions(NamedTuple):
    """The samples that are measured, clients x samples. A client with fewer samples than others has some repeated, which are not counted."""

    parts: list[tuple[int, int]]
    """For each client, how many of its samples are test data and how many validation data."""
    is_test: Tensor
    places: Places
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]


def questions(federation: Federation, samples: Samples, clients: Sequence[int]) -> Questions:
    """The test and validation samples of these clients."""
    shards = [federation.shards[c] for c in clients]
    parts = [np.concatenate([s.test, s.validation]) for s in shards]
    longest = max(len(part) for part in parts)
    place = torch.arange(longest)
    tests = torch.tensor([len(s.test) for s in shards])[:, None]
    ends = torch.tensor([len(part) for part in parts])[:, None]
    indices = np.stack([np.resize(part, longest) if len(part) else np.zeros(longest, np.int64) for part in parts])
    size = max(1, MEASURED // len(parts))

    def gathered() -> Iterator[tuple[Tensor, Tensor]]:
        for at in range(0, longest, size):
            yield samples.batch(indices[:, at : at + size])

    kept = list(gathered()) if indices.size * federation.data.inputs[0].size <= GATHERED else None
    first = 2 * torch.arange(len(parts))[:, None]
    part = torch.where(place < tests, first, torch.where(place < ends, first + 1, 2 * len(parts)))
    places = Places(federation.data.labels[indices], part.numpy(), 2 * len(parts), federation.data.classes)
    counts = [(len(s.test), len(s.validation)) for s in shards]
    return Questions(counts, place < tests, places, gathered if kept is None else lambda: kept)


def add_own(own: OwnSums, parts: Sequence[tuple[int, int]], at: int, logits: Tensor, labels: Tensor) -> None:
    """Add a batch, which begins at position `at`, to the sums of the user's own metrics."""
    for i, (tests, validations) in enumerate(parts):
        for part, first, end in ((2 * i, 0, tests), (2 * i + 1, tests, tests + validations)):
            here = slice(max(first - at, 0), min(end - at, labels.shape[1]))
            if here.start < here.stop:
                own.add(part, logits[i, here], labels[i, here])
