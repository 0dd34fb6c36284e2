"""FedBN. Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, 2021.

    all but the norm layers:  w = sum_i p_i w_i over the participants, as in FedAvg
    norm layers:              gamma, beta, running mean and variance stay with their client, which trains everything at once

Limiting cases: a network without BatchNorm is FedAvg, bit for bit (the 4-layer CNN is one); a single client is Local. Where only the running statistics
stay and gamma and beta are averaged, it is FedAvg with `train.batch_norm = "local"`; that setting changes nothing here.

As a plug-in (`+bn`) the norm layers stay with the client, and the rest is what the method beneath makes of it: `cwfedavg+bn` has class-wise output layers over a common body with norm
layers of the client's own.

A client that sits out keeps its norm layers, however old; one that never took part has the initial ones (the paper does not say).

Public versions look for "bn" in a name: a ResNet's shortcuts have norm layers of other names (`downsample.1`), which then are shared. One that goes by type
loses the path of nested modules, so that no inner norm layer stays. Here it is the module's type and its full name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.types import Norm, Task


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg whose clients keep their norm layers."""

    name: ClassVar[str] = "fedbn"
    plugin: ClassVar[str] = "bn"
    travels: ClassVar[str] = "2 models a participant less the norm layers"
    work: ClassVar[str] = "as FedAvg; every client keeps its norm layers"

    not_over: ClassVar[Mapping[str, str]] = {
        "fedcac": "its masks are of every parameter, and what this plug-in keeps at the client never reaches the server",
        "fedpac": "its statistics are those of the received model as it is, and that would have no norm layers",
        "fedamp": "its clients have whole models of their own, norm layers among them",
        "adapt": "it keeps norm layers of the network, and this one has changed its network",
        "personal": "this one makes its clients' models on receipt itself, of whole models",
    }

    norms: tuple[Norm, ...] = ("batch",)
    """The kinds of norm layers that stay: "batch", "group", "layer", "instance". The paper: "batch"."""

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        kept = super().keeps(names, task)
        return tuple(name for name in names if name in kept or self.is_norm(name, task))

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in super().uploaded(names, task) if not self.is_norm(name, task))

    def is_norm(self, name: str, task: Task) -> bool:
        """Whether a tensor belongs to a norm layer that stays: a parameter or a running statistic of it."""
        return task.norms.get(name.rpartition(".")[0]) in self.norms
