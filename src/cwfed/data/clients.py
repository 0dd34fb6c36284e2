"""The clients' data in memory: one array of all samples, and for each client the indices of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cwfed.core.errors import ConfigError, DataError
from cwfed.core.rng import stream
from cwfed.core.shape import InputShape
from cwfed.data import split_file
from cwfed.data.dataset import Dataset
from cwfed.data.partition import Indices, PartitionSpec, natural, partition, split
from cwfed.data.store import write

GATHERED = 4_000_000
"""The most numbers of inputs that are gathered ahead."""


@dataclass(frozen=True)
class Shard:
    """The sample indices of one client.

    Examples:
        >>> import cwfed
        >>> shard = cwfed.deal({"data": {"clients": 3, "partition": "iid"}}).shards[0]
        >>> len(shard.train), len(shard.validation), len(shard.test)
        (404, 45, 150)
    """

    train: Indices
    validation: Indices
    """Held out from the training data to pick a round."""
    test: Indices
    holdout: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Held out from the training data for the algorithm's own use."""


class Samples:
    """All samples as two tensors; batches are gathered by index and prepared for the network."""

    def __init__(self, inputs: NDArray[np.generic], labels: NDArray[np.int64], device: torch.device) -> None:
        # The cache's arrays are memory-mapped copy-on-write: nothing is copied into this process.
        self.inputs = torch.from_numpy(np.require(inputs, requirements=["C", "W"])).to(device)
        self.labels = torch.from_numpy(np.require(labels, requirements=["C", "W"])).to(device)
        self.device = device

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """(inputs, labels) of these samples; indices may have any shape, such as clients x samples."""
        where = torch.from_numpy(indices.reshape(-1)).to(self.device)
        inputs, labels = to_network(self.inputs.index_select(0, where)), self.labels.index_select(0, where)
        return inputs.view(*indices.shape, *inputs.shape[1:]), labels.view(indices.shape)

    def batches(self, indices: Indices) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, labels) for each row of indices; many rows are gathered at once."""
        ahead = max(1, GATHERED // max(1, indices[0].size * self.inputs[0].numel())) if len(indices) else 1
        for at in range(0, len(indices), ahead):
            inputs, labels = self.batch(indices[at : at + ahead])
            yield from zip(inputs, labels, strict=True)


def to_network(inputs: Tensor) -> Tensor:
    """Inputs as the network takes them. Bytes are pixels and become [-1, 1]; whole numbers are tokens; floats stay. Images are N H W C.

    The permuted view has torch's channels_last layout, in which convolution and pooling are fastest.
    """
    if inputs.dtype == torch.uint8:
        inputs = inputs.float().mul_(2 / 255).sub_(1)
    elif not inputs.is_floating_point():
        inputs = inputs.long()
    return inputs.permute(0, 3, 1, 2) if inputs.ndim == 4 else inputs


class Federation:
    """Every client's share of a data set.

    Examples:
        >>> import cwfed
        >>> cwfed.deal({"data": {"clients": 3, "partition": "iid"}}).histogram().shape
        (3, 10)
    """

    def __init__(
        self,
        data: Dataset,
        shards: Sequence[Shard] | Mapping[int, Shard],
        names: Sequence[str] = (),
        notes: Sequence[str] = (),
        shifts: Mapping[int, str] | None = None,
    ) -> None:
        self.data = data
        self.shards = dict(shards if isinstance(shards, Mapping) else enumerate(shards))
        """By client; a node of a real federation has only its own."""
        self.names = tuple(names)
        """The names of the clients, if the data or the split have names."""
        self.notes = tuple(notes)
        """Notes about which client holds what."""
        self.shifts = dict(shifts or {})
        """By client, the shift of its images in words."""
        self._counts: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def shape(self) -> InputShape:
        """The shape of one sample as the network sees it."""
        dims = self.data.inputs.shape[1:]
        if len(dims) == 3:
            dims = (dims[2], dims[0], dims[1])
        return InputShape(tuple(dims), len(self.data.words))

    def with_holdout(self, share: float, seed: int) -> Federation:
        """The same with part of every client's training data held out for the algorithm."""
        shards = {}
        for client, shard in self.shards.items():
            order = stream(seed, "holdout", client=client).permutation(shard.train)
            count = max(2, round(len(order) * share))
            if count >= len(order):
                raise ConfigError(
                    f"client {client} has only {len(order)} training samples: the algorithm holds out {share:.0%} of them, "
                    "which must be at least two and leave some; use fewer clients or more samples"
                )
            shards[client] = replace(shard, train=np.sort(order[count:]), holdout=np.sort(order[:count]))
        return Federation(self.data, shards, self.names, self.notes, self.shifts)

    def class_counts(self, client: int) -> NDArray[np.int64]:
        """n_ij: the training samples of a client by class; the array must not be changed."""
        if client not in self._counts:
            self._counts[client] = np.bincount(
                self.data.labels[self.shards[client].train], minlength=self.data.classes
            )
        return self._counts[client]

    def histogram(self) -> NDArray[np.int64]:
        """All samples of each client by class (clients x classes), as in the paper's heat maps."""
        rows = [np.concatenate([s.train, s.holdout, s.validation, s.test]) for s in self.shards.values()]
        return np.stack([np.bincount(self.data.labels[row], minlength=self.data.classes) for row in rows])

    def digest(self) -> str:
        """A hash of which client holds what, for the manifest."""
        return _hash(part for s in self.shards.values() for part in (s.train, s.validation, s.test, s.holdout))

    def dealt(self) -> str:
        """A hash that is the same for all methods on one split: data that a method holds out count as training data."""
        shards = self.shards.values()
        return _hash(
            part for s in shards for part in (np.sort(np.concatenate([s.train, s.holdout])), s.validation, s.test)
        )


def _hash(parts: Iterable[Indices]) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part.astype("<i8").tobytes())
    return sha.hexdigest()


def fixed_shard(client: int, parts: Sequence[Indices], seed: int, validation: float) -> Shard:
    """The shard of a client whose data are split already, as (train, test) or (train, validation, test)."""
    train, *held_out, test = parts
    if held_out:
        return Shard(train, held_out[0], test)
    order = stream(seed, "split", client=client).permutation(train)
    keep = max(1, len(order) - round(len(order) * validation))
    return Shard(np.sort(order[:keep]), np.sort(order[keep:]), test)


def of_client(federation: Federation, client: int) -> Dataset:
    """A client's own samples as a data set with its split, as its node in a real federation has them."""
    shard = federation.shards[client]
    own = np.sort(np.concatenate([shard.train, shard.holdout, shard.validation, shard.test]))
    train = np.sort(
        np.concatenate([shard.train, shard.holdout])
    )  # the algorithm will hold out the same samples again
    split = tuple(np.searchsorted(own, part) for part in (train, shard.validation, shard.test))
    whole = federation.data
    return Dataset(whole.name, whole.inputs[own], whole.labels[own], whole.class_names, whole.words, (split,))


def export(federation: Federation, folder: Path) -> list[Path]:
    """Write every client's data to a folder of its own; returns the folders."""
    folders = {client: folder / f"client-{client:03d}" for client in federation.shards}
    if others := sorted(set(folder.glob("client-*")) - set(folders.values())):
        raise DataError(f"{others[0]} is of another split: empty {folder} or choose another folder")
    for client, own in folders.items():
        try:
            write(of_client(federation, client), own)
        except OSError as error:
            raise DataError(f"{own} cannot be written: {error.strerror or error}") from None
    return list(folders.values())


def share_out(data: Dataset, spec: PartitionSpec, seed: int, validation: float, samples: int = 0) -> Federation:
    """Deal a data set out to clients, or take its own split if it has one."""
    if data.fixed_split is not None or spec.kind == "file":
        if samples:
            raise ConfigError(
                f"data.samples = {samples} cannot be taken from {data.name}, which has a split of its own"
            )
        if data.fixed_split is not None:
            return _as_it_comes(data, data.fixed_split, data.owner_names, seed, validation)
        return _from_file(data, spec, seed, validation)
    pick = np.arange(len(data.labels))
    if samples:
        if samples > len(pick):
            raise ConfigError(f"data.samples = {samples}, but {data.name} has only {len(pick)}")
        # A fixed subset: the same one for every seed, so that seeds differ in the split alone.
        pick = np.sort(stream(0, "subset").choice(len(pick), samples, replace=False))
    if spec.kind == "column":
        return _by_column(data, spec, seed, validation, pick)
    shares = partition(data.labels[pick], spec, seed, data.classes)
    return Federation(data, [Shard(*split(pick[s], seed, i, validation)) for i, s in enumerate(shares)])


def _as_it_comes(
    data: Dataset, parts: Sequence[Sequence[Indices]], names: Sequence[str], seed: int, validation: float
) -> Federation:
    split = [[np.asarray(part, dtype=np.int64) for part in own] for own in parts]
    shards = [fixed_shard(client, own, seed, validation) for client, own in enumerate(split)]
    return Federation(data, shards, names)


def _from_file(data: Dataset, spec: PartitionSpec, seed: int, validation: float) -> Federation:
    """The split in a file."""
    if not spec.file:
        raise ConfigError('data.partition = "file" needs data.split_file')
    found = split_file.read(Path(spec.file), len(data.labels))
    if found.parts:
        return _as_it_comes(data, found.parts, found.names, seed, validation)
    shards = [Shard(*split(share, seed, i, validation)) for i, share in enumerate(found.shares)]
    return Federation(data, shards, found.names)


def _by_column(data: Dataset, spec: PartitionSpec, seed: int, validation: float, pick: Indices) -> Federation:
    """Natural clients: those that a column names."""
    if data.owners is None:
        raise ConfigError(
            f'data.partition = "column" needs clients in the data, and {data.name} has none: name their column as '
            "data.client_column (hub, csv), or give them in Python as Dataset.from_arrays(clients=...)"
        )
    owners = data.owners[pick]
    chosen = natural(owners, spec, seed)
    there = len(np.unique(owners))
    left = (
        f"{len(chosen)} of the {there} clients in the column {spec.column!r} take part" if len(chosen) < there else ""
    )
    notes = [f"{left} (data.clients = {spec.clients}, data.least_samples = {spec.least_samples})"] if left else []
    shards = [Shard(*split(pick[owners == owner], seed, i, validation)) for i, owner in enumerate(chosen)]
    return Federation(data, shards, [data.owner_names[owner] for owner in chosen], notes)
