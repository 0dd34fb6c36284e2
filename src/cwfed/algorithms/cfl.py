"""CFL. Sattler et al., Clustered Federated Learning, 2020.

FedAvg inside each cluster, starting from one. After a round, for every cluster with more than two participants
and dW_i = w_i - (the model client i was sent):

    if ||mean_i dW_i|| < eps1 and max_i ||dW_i|| > eps2:
        split in two, by complete-linkage clustering of the cosine similarities of the dW_i

No cluster splits in the first `warm_up` rounds, as in the authors' code: the updates of an untrained model are large
and disagree at every client, which says nothing about clusters.

Limiting case: a run that never splits is FedAvg (eps1 = 0, or warm_up = all rounds).

A client that did not take part keeps its cluster. Clusters are kept as one number a client, so they always
partition the clients; two published versions lose the mapping from positions to clients at the second split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, Download, Params, Sizes, Task, Uploads


@dataclass(frozen=True)
class CFL(FedAvg):
    """FedAvg in clusters that split when their clients pull in different directions."""

    name: ClassVar[str] = "cfl"
    travels: ClassVar[str] = "2 models a participant, as FedAvg"
    work: ClassVar[str] = (
        "server: one Gram matrix of a cluster's updates, hierarchical clustering at a split; keeps a model a cluster"
    )

    eps1: float = 0.4
    """A cluster may split when the norm of its mean update is below this."""
    eps2: float = 0.9
    """A cluster may split when the norm of its largest update is above this."""
    warm_up: int = 20
    """Rounds at the start in which no cluster splits."""

    def __post_init__(self) -> None:
        if self.eps1 < 0 or self.eps2 < 0 or self.warm_up < 0:
            raise ConfigError("cfl: eps1, eps2 and warm_up must not be negative")

    def costs(self, sizes: Sizes) -> list[Cost]:
        once = sizes.participants * sizes.travelling
        return [Cost(self.name, sizes.travelling, once, once, "one model per cluster: up to M after splits")]

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        return {
            "models": [self.travelling(fresh(0), task)],
            "cluster": torch.zeros(task.clients, dtype=torch.int64),
            "parameters": list(self.uploaded(task.parameters, task)),
            "round": 0,
        }

    def send(self, state: Any, client: int) -> Download:
        return Download((state["models"][int(state["cluster"][client])],))

    def aggregate(self, state: Any, up: Uploads) -> Any:
        cluster, models = state["cluster"].clone(), list(state["models"])
        done = state.get("round", self.warm_up)  # states of version 0.1 do not count their rounds
        for number in range(len(state["models"])):
            rows = [row for row, client in enumerate(up.clients) if state["cluster"][client] == number]
            if not rows:
                continue
            groups = [rows]
            if len(rows) > 2 and done >= self.warm_up:
                updates = {n: up.models[n][rows] - state["models"][number][n] for n in state["parameters"]}
                side = self.split(mixing.gram(updates))
                if side is not None:
                    groups = [[r for r, s in zip(rows, side, strict=True) if s == which] for which in (0, 1)]
            for position, group in enumerate(groups):
                stack = {n: w[group] for n, w in up.models.items()}
                model = mixing.average(stack, mixing.sample_weights(up.counts[group]))
                if position == 0:
                    models[number] = model
                else:  # the second half becomes a cluster of its own; whoever was absent stays in the first
                    cluster[[up.clients[row] for row in group]] = len(models)
                    models.append(model)
        return state | {"models": models, "cluster": cluster, "round": done + 1}

    def split(self, gram: Tensor) -> list[int] | None:
        """Which half each participant goes to, the first one to half 0; None where the cluster stays whole.

        `gram` holds the inner products of the updates: all that is needed are norms and cosines.
        """
        norms = gram.diagonal().clamp_min(0).sqrt()
        if not (gram.mean().clamp_min(0).sqrt() < self.eps1 and norms.max() > self.eps2):
            return None
        from sklearn.cluster import AgglomerativeClustering

        cosines = gram / (norms[:, None] * norms[None, :]).clamp_min(torch.finfo(gram.dtype).tiny)
        clustering = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete")
        labels = clustering.fit_predict((1 - cosines).numpy())
        return [int(label != labels[0]) for label in labels]

    def newcomer(self, state: Any, class_counts: Any = None) -> Params:
        """The model of the largest cluster: nothing is known about the newcomer."""
        counts = torch.bincount(state["cluster"], minlength=len(state["models"]))
        model: Params = state["models"][int(counts.argmax())]
        return model
