"""MOON. Li et al., Model-Contrastive Federated Learning, 2021.

FedAvg, and the client's loss gains, of the features z of a sample (what the output layer sees), with those of the same sample under the received model and under
the client's own model of its last round, both fixed:

    mu * mean over the batch of  -log  e^(cos(z, z_received) / tau) / (e^(cos(z, z_received) / tau) + e^(cos(z, z_previous) / tau))

Limiting cases: mu = 0 is FedAvg bit for bit. In a client's first round its previous model is the initial one; where that is what it received, the term is mu log 2 and has no
gradient, so round 1 is FedAvg but for rounding.

The original puts a projection of two layers between features and output layer; here, as in other comparisons, all methods have the same network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Loss, Network, Params, Start

RECEIVED, PREVIOUS = "received.", "previous."


@dataclass(frozen=True)
class Moon(FedAvg):
    """FedAvg whose clients' features are drawn to the received model's and away from their own last model's."""

    name: ClassVar[str] = "moon"
    keeps_model: ClassVar[bool] = True
    work: ClassVar[str] = "client: two more forward passes a batch, keeps its last model; server: as FedAvg"

    mu: float = 1.0
    """Weight of the contrastive term; the authors choose among 0.1, 1, 5 and 10."""
    temperature: float = 0.5
    """tau, by which the cosines are divided."""

    def __post_init__(self) -> None:
        if self.mu < 0 or self.temperature <= 0:
            raise ConfigError(
                f"moon: mu must not be negative and temperature must be above 0, they are {self.mu} and {self.temperature}"
            )

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        start, own = super().begin(got, own, data), own or got.model
        names = [name for name in data.parameters if name in own]
        received = {RECEIVED + name: start.params[name] for name in names}
        return replace(start, anchor=received | {PREVIOUS + name: own[name] for name in names})

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        output = network(params, batch.inputs)
        loss = batch.cross_entropy(output.logits)
        if not self.mu:
            return Loss(loss, loss.new_zeros(()))

        def likeness(prefix: str) -> Tensor:
            there = {name: start.anchor[prefix + name] for name in params}
            return F.cosine_similarity(output.features, network(there, batch.inputs, None).features)

        # not softplus: its last bits depend on where in a stack of clients a number stands, so the batched engine's would on who else trains
        pairs = torch.stack([likeness(RECEIVED), likeness(PREVIOUS)], dim=-1) / self.temperature
        return Loss(loss, -self.mu * F.log_softmax(pairs, dim=-1)[..., 0].mean())
