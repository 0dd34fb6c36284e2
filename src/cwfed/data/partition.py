"""Who holds which samples: a pure function of (labels, spec, seed). Same seed, same split, everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cwfed.core.errors import ConfigError, DataError
from cwfed.core.plugins import load_object, why
from cwfed.core.rng import stream

Labels = NDArray[np.int64]
Indices = NDArray[np.int64]

MAX_DRAWS = 20_000
"""Dirichlet draws before giving up: a spec that cannot be drawn must end in an error, not in a loop."""


@dataclass(frozen=True)
class PartitionSpec:
    """How the samples are dealt out to clients."""

    kind: str
    """One of `PARTITIONS`, or "module:function" for the user's own: function(labels, clients, classes, rng)."""
    clients: int
    classes_per_client: int = 2
    alpha: float = 0.1
    balanced: bool = False
    """Pathological: equal shares of a class instead of random ones."""
    shuffled: bool = False
    """Pathological: classes dealt in random order, so that neighbours need not share them."""
    batch_size: int = 10
    """A client should be able to fill a batch: this sets the least number of samples."""

    def least(self, samples: int) -> float:
        """The fewest samples a client may hold: min(batch / 0.25, N / M / 2)."""
        return min(self.batch_size / 0.25, samples / self.clients / 2)


def partition(labels: Labels, spec: PartitionSpec, seed: int, classes: int) -> list[Indices]:
    """The sample indices of each client; no sample is held twice."""
    if spec.clients > len(labels):
        raise ConfigError(f"data.clients = {spec.clients}, but there are only {len(labels)} samples to share")
    rng = stream(seed, "partition")
    deal = _own if ":" in spec.kind else PARTITIONS[spec.kind]
    return [np.sort(share) for share in deal(labels, spec, rng, classes)]


def _own(labels: Labels, spec: PartitionSpec, rng: np.random.Generator, classes: int) -> list[Indices]:
    """The user's own: which samples each client holds, checked."""
    function = load_object(spec.kind, "partition")
    try:
        shares: list[Any] = [np.asarray(share) for share in function(labels, spec.clients, classes, rng)]
    except Exception as error:  # it is the user's code: whatever stops it is the answer
        raise ConfigError(f"partition {spec.kind!r} cannot be used: {why(error)}") from None
    if len(shares) != spec.clients:
        raise ConfigError(f"partition {spec.kind!r} gives {len(shares)} clients, and data.clients = {spec.clients}")
    for client, share in enumerate(shares):
        if share.ndim != 1 or not len(share) or not np.issubdtype(share.dtype, np.integer):
            raise ConfigError(
                f"partition {spec.kind!r} must give each client a list of sample numbers; client {client} has none"
            )
    held = np.concatenate(shares)
    if held.min() < 0 or held.max() >= len(labels) or len(np.unique(held)) < len(held):
        raise ConfigError(
            f"partition {spec.kind!r} must give sample numbers from 0 to {len(labels) - 1}, each once at most"
        )
    return [share.astype(np.int64) for share in shares]


def _iid(labels: Labels, spec: PartitionSpec, rng: np.random.Generator, classes: int) -> list[Indices]:
    return np.array_split(rng.permutation(len(labels)), spec.clients)


def _pathological(labels: Labels, spec: PartitionSpec, rng: np.random.Generator, classes: int) -> list[Indices]:
    """Class k goes to the first ceil(M / K * c) clients that still hold fewer than c classes, or to fewer of them:
    where M * c >= K, every class that is still to come finds a client with room for it."""
    per_client = spec.classes_per_client
    if per_client > classes:
        raise ConfigError(f"data.classes_per_client = {per_client}, but the data have only {classes} classes")
    takers_per_class = ceil(spec.clients / classes * per_client)
    least = spec.least(len(labels))
    held: list[list[Indices]] = [[] for _ in range(spec.clients)]
    order = rng.permutation(classes) if spec.shuffled else np.arange(classes)
    for place, k in enumerate(order):
        places = [per_client - len(parts) for parts in held]
        spare = sum(places) - (classes - 1 - place)  # so many may be taken, and each class after this one finds one
        takers = [i for i, free in enumerate(places) if free][: min(takers_per_class, max(1, spare))]
        if not takers:
            break  # M * c < K and every client has its classes: those that are left go to nobody
        members = rng.permutation(np.flatnonzero(labels == k))
        share = len(members) / len(takers)
        if spec.balanced:
            cuts = np.linspace(0, len(members), len(takers) + 1).astype(int)[1:-1]
        else:
            low = min(ceil(max(share / 10, least / classes)), int(share))
            sizes = rng.integers(low, max(int(share), low + 1), size=len(takers) - 1)
            cuts = np.cumsum(sizes)
        for i, part in zip(takers, np.split(members, cuts), strict=True):
            held[i].append(part)
    shares = [np.concatenate(parts) for parts in held]
    if empty := [i for i, share in enumerate(shares) if len(share) == 0]:
        raise DataError(
            f"the pathological partition leaves client {empty[0]} without a sample: use fewer clients or more samples"
        )
    return shares


def _dirichlet(labels: Labels, spec: PartitionSpec, rng: np.random.Generator, classes: int) -> list[Indices]:
    """Per class, proportions from Dir(alpha); a client that holds N / M samples already gets none."""
    clients, samples = spec.clients, len(labels)
    least = spec.least(samples)
    members = [np.flatnonzero(labels == k) for k in range(classes)]
    fewest = 0
    for _ in range(MAX_DRAWS):
        sizes = np.zeros(clients, dtype=np.int64)
        cuts = []
        for of_class in members:
            proportions = rng.dirichlet(np.full(clients, spec.alpha)) * (sizes < samples / clients)
            total = proportions.sum()
            if total == 0:  # the draw fell on full clients only: the whole class to the emptiest one
                proportions, total = (np.arange(clients) == sizes.argmin()).astype(float), 1.0
            cuts.append((np.cumsum(proportions / total)[:-1] * len(of_class)).astype(int))
            sizes += np.diff(cuts[-1], prepend=0, append=len(of_class))
        if sizes.min() >= least:
            parts = [np.split(rng.permutation(m), c) for m, c in zip(members, cuts, strict=True)]
            return [np.concatenate(of_client) for of_client in zip(*parts, strict=True)]
        fewest = max(fewest, int(sizes.min()))
    raise DataError(
        f"no Dirichlet({spec.alpha:g}) split over {clients} clients gave everybody {ceil(least)} samples in "
        f"{MAX_DRAWS} draws (the best gave {fewest}): use fewer clients, a larger alpha or more samples"
    )


PARTITIONS = {"pathological": _pathological, "dirichlet": _dirichlet, "iid": _iid}
"""By the name that a config gives them; a new one is a function here."""


def split(share: Indices, seed: int, client: int, validation: float) -> tuple[Indices, Indices, Indices]:
    """A client's (train, validation, test): 25 % test, then the validation part of the training data."""
    order = stream(seed, "split", client=client).permutation(share)
    test_from = max(1, round(len(order) * 0.75))
    held_out = round(test_from * validation)
    train_to = max(1, test_from - held_out)
    return np.sort(order[:train_to]), np.sort(order[train_to:test_from]), np.sort(order[test_from:])
