"""Clients that train together: their tensors, stacked."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import torch

from cwfed.core.types import Params, Start
from cwfed.engine.loaded_network import require_whole
from cwfed.engine.worker import ClientWorker


class Group(NamedTuple):
    """Clients that train together; every tensor has a leading axis of clients."""

    trained: Params
    fixed: Params
    """Parameters without a gradient."""
    buffers: Params
    anchor: Params
    notes: Params
    optimizer: Params

    @property
    def params(self) -> Params:
        """All parameters but embeddings that are looked up."""
        return self.trained | self.fixed

    def training(self, names: Iterable[str]) -> Group:
        """The same where these parameters are trained, and no others."""
        chosen = set(names)
        trained = {n: w for n, w in self.params.items() if n in chosen}
        return self._replace(trained=trained, fixed={n: w for n, w in self.params.items() if n not in chosen})

    def first(self, count: int) -> Group:
        """Views of the first so many clients."""
        return Group(*({name: tensor[:count] for name, tensor in kind.items()} for kind in self))


def stacked(
    worker: ClientWorker, starts: Sequence[Start], statistics: Sequence[Params], apart: Container[str]
) -> Group:
    """Clients' tensors stacked on the worker's device, but for embeddings that are looked up (`apart`)."""
    complete = [own | start.params for start, own in zip(starts, statistics, strict=True)]
    for model in complete:
        if worker.params.keys() - model.keys():
            require_whole(model, worker.params | {name: b for name, b in model.items() if name in worker.buffers})

    def stack(tensors: Sequence[Params], names: Iterable[str]) -> Params:
        return {n: torch.stack([tensor[n] for tensor in tensors]).to(worker.samples.device) for n in names}

    params = stack(complete, [name for name in worker.params if name not in apart])
    trained = {n: w for n, w in params.items() if worker.params[n].requires_grad}
    counts = {n: b.expand(len(starts), *b.shape).clone() for n, b in worker.initial_buffers.items()}
    return Group(
        trained=trained,
        fixed={n: w for n, w in params.items() if n not in trained},
        buffers=counts | stack(complete, [name for name in counts if name in complete[0]]),
        anchor=stack([start.anchor for start in starts], starts[0].anchor),
        notes=stack([start.notes for start in starts], starts[0].notes),
        optimizer={},
    )
