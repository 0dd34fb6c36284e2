"""Which client holds which samples: a pure function of (labels or a column, spec, seed). The same seed gives the same split everywhere.

M clients, K classes, N samples; n_i of them at client i, N_k of them of class k.
"""

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
"""The most Dirichlet draws: a spec that cannot be satisfied must end in an error, not in a loop."""
FIRST_DRAWS, HOPELESS = 50, 30
"""Where the first draws leave so many clients with too little, on average, no other draw will do: its chance is about exp(-30)."""
MAX_FITS = 1000
"""The most steps of proportional fitting; it converges much earlier, unless sizes and mixes nearly contradict each other."""
SMALLEST = 1e-9
"""The least share of a class in a client's mix: with no share at 0, a table with the wanted sums always exists."""


@dataclass(frozen=True)
class PartitionSpec:
    """How the samples are dealt out to clients."""

    kind: str
    """One of `NAMES`, or "module:function" for the user's own: function(labels, clients, classes, rng)."""
    clients: int
    classes_per_client: int = 2
    alpha: float = 0.1
    balanced: bool = False
    """Pathological: equal shares of a class instead of random ones."""
    shuffled: bool = False
    """Pathological: classes dealt in random order, so that neighbours need not share them."""
    batch_size: int = 10
    """It sets the least number of samples, so that a client can fill batches."""
    shards_per_client: int = 2
    """Shards: how many each client is dealt."""
    quantity_alpha: float = 0.5
    """Quantity: alpha of the Dirichlet distribution of the clients' sizes."""
    least_samples: int = 0
    """The fewest samples that a client may hold; 0: what a batch needs."""
    column: str = ""
    """Column: its name, for messages."""
    file: str = ""
    """File: its path."""

    def least(self, samples: int) -> float:
        """The fewest samples a client may hold: min(batch / 0.25, N / M / 2), or what was asked for."""
        return self.least_samples or min(self.batch_size / 0.25, samples / self.clients / 2)


def partition(labels: Labels, spec: PartitionSpec, seed: int, classes: int) -> list[Indices]:
    """The sample indices of each client; no sample is held twice."""
    if spec.clients > len(labels):
        raise ConfigError(f"data.clients = {spec.clients}, but there are only {len(labels)} samples to share")
    if spec.clients * spec.least_samples > len(labels):
        raise ConfigError(
            f"data.least_samples = {spec.least_samples} for each of {spec.clients} clients are more than the "
            f"{len(labels)} samples there are: use fewer clients or a smaller one"
        )
    rng = stream(seed, "partition")
    deal = _own if ":" in spec.kind else PARTITIONS[spec.kind]
    shares = [np.sort(share) for share in deal(labels, spec, rng, classes)]
    if empty := [i for i, share in enumerate(shares) if len(share) == 0]:
        raise DataError(
            f"the {spec.kind} partition leaves client {empty[0]} without a sample: use fewer clients or more samples"
        )
    return shares


def _own(labels: Labels, spec: PartitionSpec, rng: np.random.Generator, classes: int) -> list[Indices]:
    """The user's own partition; its result is checked."""
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
        spare = sum(places) - (classes - 1 - place)  # the places that may be taken if each later class is to find one
        takers = [i for i, free in enumerate(places) if free][: min(takers_per_class, max(1, spare))]
        if not takers:
            break  # M * c < K and every client has its classes: no client holds the rest
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
    return [np.concatenate(parts) for parts in held]


def _dirichlet(labels: Labels, spec: PartitionSpec, rng: np.random.Generator, classes: int) -> list[Indices]:
    """For each class, proportions from Dir(alpha); a client that already holds N / M samples gets none."""
    clients, samples = spec.clients, len(labels)
    least = spec.least(samples)
    members = [np.flatnonzero(labels == k) for k in range(classes)]
    fewest = short = draw = 0
    while draw < MAX_DRAWS and (draw != FIRST_DRAWS or short < FIRST_DRAWS * HOPELESS):
        draw += 1
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
        fewest, short = max(fewest, int(sizes.min())), short + int((sizes < least).sum())
    raise DataError(
        f"no Dirichlet({spec.alpha:g}) split over {clients} clients gave every client {ceil(least)} samples in "
        f"{draw} draws (the best gave {fewest}): use fewer clients, a larger alpha, more "
        "samples or a smaller data.least_samples"
    )


def _quantity(labels: Labels, spec: PartitionSpec, rng: np.random.Generator, classes: int) -> list[Indices]:
    """All classes at every client, in unequal amounts."""
    order = rng.permutation(len(labels))
    return np.split(order, np.cumsum(_unequal_sizes(len(labels), spec, rng))[:-1])


def _unequal_sizes(samples: int, spec: PartitionSpec, rng: np.random.Generator) -> NDArray[np.int64]:
    """n_i = m + (N - M m) q_i with q ~ Dir(quantity_alpha): every client has the least number, m, and a random share of the rest."""
    least = max(1, int(spec.least(samples)))
    shares = rng.dirichlet(np.full(spec.clients, spec.quantity_alpha))
    return least + _whole(shares, samples - spec.clients * least)


def _whole(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Whole numbers that add up to `total`, each less than one away from its share of it."""
    ends = np.floor(np.cumsum(shares)[:-1] / shares.sum() * total).astype(np.int64)
    sizes: NDArray[np.int64] = np.diff(ends, prepend=0, append=total)
    return sizes


def _shards(labels: Labels, spec: PartitionSpec, rng: np.random.Generator, classes: int) -> list[Indices]:
    """McMahan et al. (2017): samples sorted by label, cut into M s equal shards, s of them for each client at random."""
    number = spec.clients * spec.shards_per_client
    if number > len(labels):
        raise ConfigError(
            f"data.clients = {spec.clients} times data.shards_per_client = {spec.shards_per_client} are {number} shards, "
            f"but there are only {len(labels)} samples: use fewer"
        )
    mixed = rng.permutation(len(labels))
    shards = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], number)
    dealt = rng.permutation(number).reshape(spec.clients, spec.shards_per_client)
    return [np.concatenate([shards[shard] for shard in own]) for own in dealt]


def _extended_dirichlet(labels: Labels, spec: PartitionSpec, rng: np.random.Generator, classes: int) -> list[Indices]:
    """Li and Lyu (2023): c classes for each client, then per class proportions from Dir(alpha) over its holders.

    A client takes the c classes that have the fewest holders so far, ties at random, so every class has a holder if M c >= K. Of a class
    with h holders, each has m_k = min(least / c, N_k / h / 2) samples, and a share of the rest.
    """
    per_client, there = spec.classes_per_client, np.unique(labels)
    if per_client > len(there):
        raise ConfigError(f"data.classes_per_client = {per_client}, but the data have only {len(there)} classes")
    holders: dict[int, list[int]] = {int(k): [] for k in there}
    for client in range(spec.clients):
        held = np.array([len(of_class) for of_class in holders.values()])
        for k in there[np.lexsort((rng.random(len(there)), held))[:per_client]]:
            holders[int(k)].append(client)
    parts: list[list[Indices]] = [[] for _ in range(spec.clients)]
    for k, takers in holders.items():
        if not takers:
            continue  # M c < K: no client holds this class
        members = rng.permutation(np.flatnonzero(labels == k))
        least = int(min(ceil(spec.least(len(labels)) / per_client), len(members) / len(takers) / 2))
        shares = rng.dirichlet(np.full(len(takers), spec.alpha))
        sizes = least + _whole(shares, len(members) - len(takers) * least)
        for client, part in zip(takers, np.split(members, np.cumsum(sizes)[:-1]), strict=True):
            parts[client].append(part)
    return [np.concatenate(own) for own in parts]


def _label_quantity(labels: Labels, spec: PartitionSpec, rng: np.random.Generator, classes: int) -> list[Indices]:
    """Sizes n_i as in quantity, class mixes p_i ~ Dir(alpha): n_ik = a_i b_k p_ik, with a and b such that all rows and columns add up."""
    sizes = _unequal_sizes(len(labels), spec, rng)
    mixes = np.maximum(rng.dirichlet(np.full(classes, spec.alpha), size=spec.clients), SMALLEST)
    members = [rng.permutation(of_class) for k in range(classes) if len(of_class := np.flatnonzero(labels == k))]
    totals = np.array([len(of_class) for of_class in members])
    table = fit_sums(mixes[:, np.unique(labels)], sizes, totals)
    counts = [_whole(table[:, k], total) for k, total in enumerate(totals)]
    parts = [np.split(of_class, np.cumsum(c)[:-1]) for of_class, c in zip(members, counts, strict=True)]
    return [np.concatenate(own) for own in zip(*parts, strict=True)]


def fit_sums(table: NDArray[np.float64], rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Scale the rows and columns of a positive table until they have these sums (iterative proportional fitting).

    It ends with the columns, which then add up exactly; the rows do to half a sample.
    """
    for _ in range(MAX_FITS):
        table = table * (rows / table.sum(1))[:, None]
        table = table * (columns / table.sum(0))
        if np.abs(table.sum(1) - rows).max() < 0.5:
            break
    return table


PARTITIONS = {
    "pathological": _pathological,
    "dirichlet": _dirichlet,
    "iid": _iid,
    "quantity": _quantity,
    "shards": _shards,
    "extended_dirichlet": _extended_dirichlet,
    "label_quantity": _label_quantity,
}
"""The partitions by labels, by their names in a config; a new one is a function here."""
NAMES = (*PARTITIONS, "column", "file")
"""All partitions: also by a column with the client of each sample (`natural`), and by a file (`split_file.py`)."""


def natural(owners: Indices, spec: PartitionSpec, seed: int) -> list[int]:
    """The values of a column that become clients: those with at least `least_samples` samples; if there are more than M, M at random."""
    counts = np.bincount(owners)
    found = np.flatnonzero(counts >= max(1, spec.least_samples))
    if not len(found):
        raise ConfigError(
            f"no client in the column {spec.column!r} has data.least_samples = {spec.least_samples} samples: "
            f"the largest has {counts.max()}"
        )
    if len(found) > spec.clients:
        found = np.sort(stream(seed, "partition").choice(found, spec.clients, replace=False))
    return [int(owner) for owner in found]


def split(share: Indices, seed: int, client: int, validation: float) -> tuple[Indices, Indices, Indices]:
    """A client's (train, validation, test): 25 % test, then the validation part of the training data."""
    order = stream(seed, "split", client=client).permutation(share)
    test_from = max(1, round(len(order) * 0.75))
    held_out = round(test_from * validation)
    train_to = max(1, test_from - held_out)
    return np.sort(order[:train_to]), np.sort(order[train_to:test_from]), np.sort(order[test_from:])
