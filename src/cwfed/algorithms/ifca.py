"""IFCA. Ghosh et al., An Efficient Framework for Clustered Federated Learning, 2020.

k models with different random initialisations. A client downloads all k, takes the one with the lowest loss on
its training data, trains it and uploads it with its index. The server averages per cluster, weighted by n_i; a
cluster that nobody chose keeps its model.

Limiting case: k = 1 is FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import torch

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, Download, ExtraSpec, Params, Sizes, Start, Task, Uploads


@dataclass(frozen=True)
class IFCA(FedAvg):
    """k models; every client takes the one that fits its data best."""

    name: ClassVar[str] = "ifca"
    travels: ClassVar[str] = "1 + k models a participant: all k down, one up with its index"
    work: ClassVar[str] = "client: k passes over its training data without gradients; server: keeps k models"

    k: int = 2
    """Number of clusters; the paper takes 2 for MNIST and CIFAR-10, 8 for CIFAR-100 and Tiny ImageNet."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"ifca: k must be at least 1, it is {self.k}")

    def costs(self, sizes: Sizes) -> list[Cost]:
        k = min(self.k, sizes.clients)
        return [Cost(f"{self.name}, k = {k}", k * sizes.model, k * sizes.once, sizes.once, "k models")]

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        if self.k > task.clients:
            raise ConfigError(f"ifca: k = {self.k} clusters, but there are only {task.clients} clients")
        return {"models": [fresh(c) for c in range(self.k)], "sizes": torch.zeros(self.k)}

    def send(self, state: Any, client: int) -> Download:
        return Download(tuple(state["models"]))

    def extras_spec(self, model: Params, task: Task) -> dict[str, ExtraSpec]:
        return {"cluster": ExtraSpec(torch.int64, (), 0, self.k - 1)}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        chosen = up.extras["cluster"]
        models = list(state["models"])
        for c in range(len(models)):
            rows = torch.nonzero(chosen == c).flatten()
            if len(rows):
                stack = {n: w[rows] for n, w in up.models.items()}
                models[c] = mixing.average(stack, mixing.sample_weights(up.counts[rows]))
        return {"models": models, "sizes": torch.bincount(chosen, minlength=len(models)).float()}

    def newcomer(self, state: Any, class_counts: Any = None) -> Params:
        """The model most clients chose last: this newcomer has no data to choose by."""
        model: Params = state["models"][int(state["sizes"].argmax())]
        return model

    def choose(self, got: Download, data: ClientData) -> int:
        """The model with the lowest loss on the client's training data, the first where several are equal. One whose answers are
        no numbers has a loss beyond all bounds: `argmin` alone would take it for the lowest.
        """
        if len(got.models) == 1:
            return 0
        return int(data.losses(got.models, "train").nan_to_num(inf, posinf=inf).argmin())

    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        return got.models[self.choose(got, data)]

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        index = self.choose(got, data)
        return Start(params=got.models[index], notes={"cluster": torch.tensor(index)})

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        return {"cluster": start.notes["cluster"]}
