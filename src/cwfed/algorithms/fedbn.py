"""FedBN. Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, 2021.

    all but the norm layers:  w = sum_i p_i w_i over the participants, as in FedAvg
    norm layers:              gamma, beta, running mean and variance stay with their client, which trains everything at once

Limiting cases: a network without BatchNorm is FedAvg, bit for bit (the 4-layer CNN is one); a single client is Local. Where only the running statistics
stay and gamma and beta are averaged, it is FedAvg with `train.batch_norm = "local"`; that setting changes nothing here.

A client that sits out keeps its norm layers, however old; one that never took part has the initial ones (the paper does not say).

Public versions look for "bn" in a name: a ResNet's shortcuts have norm layers of other names (`downsample.1`), which then are shared. One that goes by type
loses the path of nested modules, so that no inner norm layer stays. Here it is the module's type and its full name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.types import Norm, Task


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg whose clients keep their norm layers."""

    name: ClassVar[str] = "fedbn"
    travels: ClassVar[str] = "2 models a participant less the norm layers"
    work: ClassVar[str] = "as FedAvg; every client keeps its norm layers"

    norms: tuple[Norm, ...] = ("batch",)
    """The kinds of norm layers that stay: "batch", "group", "layer", "instance". The paper: "batch"."""

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if task.norms.get(name.rpartition(".")[0]) in self.norms)

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        kept = set(FedBN.keeps(self, names, task))  # its own: a plug-in may keep a copy of what travels
        return tuple(name for name in names if name not in kept)
