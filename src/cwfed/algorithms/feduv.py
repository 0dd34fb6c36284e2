"""FedUV. Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, 2024.

FedAvg, and the client's loss gains two terms that imitate what a batch of all classes would look like:

    mu     * mean_j relu(1 / sqrt(K) - std_j)              std_j: batch standard deviation of softmax output j
    lambda * mean_{a != b} exp(-||h_a - h_b||^2 / s)       h: penultimate features, s: median of the non-zero
                                                           squared distances of the batch

The gradient flows through s, so the second term is invariant to the scale of h: it spreads directions, not norms.

Limiting case: mu = lambda = 0 is FedAvg.

Reported after local training: the paper of cwFedAvg gives about 88 % on pathological CIFAR-10, where one global
model cannot pass about 60 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import losses
from cwfed.core.errors import ConfigError
from cwfed.core.types import Output, Params, Phase, Start


@dataclass(frozen=True)
class FedUV(FedAvg):
    """FedAvg with penalties for classifier variance and feature uniformity."""

    name: ClassVar[str] = "feduv"
    phase: ClassVar[Phase] = "trained"
    keeps_model: ClassVar[bool] = True
    work: ClassVar[str] = "client: distances of all pairs of a batch; server: as FedAvg"

    mu: float = 2.5
    """Weight of the classifier variance term."""
    lambda_: float = 0.5
    """Weight of the hyperspherical uniformity term."""

    def __post_init__(self) -> None:
        if self.mu < 0 or self.lambda_ < 0:
            raise ConfigError("feduv: mu and lambda must not be negative")

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        penalty = output.logits.new_zeros(())
        if self.mu:
            penalty = penalty + self.mu * losses.variance(output.logits.softmax(1))
        if self.lambda_:
            penalty = penalty + self.lambda_ * losses.uniformity(output.features)
        return penalty
