"""FedAMP. Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, 2021.

Server, for each client, attention to the others by the distance of their models:

    u_i   = xi_ii w_i + sum_{j != i} xi_ij w_j
    xi_ij = alpha A'(||w_i - w_j||^2),   A(x) = 1 - exp(-x / sigma),   xi_ii = 1 - sum_{j != i} xi_ij

Client: starts from its own model, loss + lambda / (2 alpha) * ||w - u_i||^2.

Limiting case: the attention vanishes with alpha, and without the pull (lambda = 0) it is local training.

The paper needs a convex combination: where the off-diagonal sum passes 1, the row is scaled down so that
xi_ii >= 0. A widely used library computes the pull from detached tensors, so that it has no gradient and the
method trains as plain local training; here a test fails without the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.algorithms.own_models import EVERY_MODEL, no_models, parameters_only, server_numbers, with_uploads
from cwfed.core import losses, mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, Download, Output, Params, Phase, Sizes, Start, Task, Uploads


@dataclass(frozen=True)
class FedAMP(FedAvg):
    """Every client is pulled towards a mix of the models that are like its own."""

    name: ClassVar[str] = "fedamp"
    phase: ClassVar[Phase] = "trained"
    keeps_model: ClassVar[bool] = True
    travels: ClassVar[str] = "2 models a participant: the mix u_i down, its own model up"
    work: ClassVar[str] = "server: one Gram matrix of all clients' models, M^2 numbers; keeps M models"

    alpha: float = 1000.0
    """Step size of the attention, alpha_k in the paper."""
    lambda_: float = 1.0
    """Weight of the pull towards u_i; its coefficient is lambda / (2 alpha)."""
    sigma: float = 0.1
    """Width of the attention: models much further apart than sqrt(sigma) do not see each other."""

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and self.sigma > 0 and self.lambda_ >= 0):
            raise ConfigError("fedamp: alpha and sigma must be positive, lambda must not be negative")

    def costs(self, sizes: Sizes) -> list[Cost]:
        return [Cost(self.name, server_numbers(sizes), sizes.once, sizes.once, EVERY_MODEL)]

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        return no_models(fresh(0), task) | {"attention": torch.eye(task.clients, dtype=torch.float64)}

    def send(self, state: Any, client: int) -> Download:
        if not state["known"][client]:
            return Download((state["initial"],))
        return Download((mixing.average(state["models"], state["attention"][client]),))

    def aggregate(self, state: Any, up: Uploads) -> Any:
        after = with_uploads(state, up)
        distances = mixing.squared_distances(parameters_only(after))
        return after | {"attention": self.attention(distances, after["known"])}

    def attention(self, squared_distances: Tensor, known: Tensor) -> Tensor:
        """xi: rows sum to 1, no entry is negative, clients that never uploaded have no part."""
        others = known[:, None] & known[None, :] & ~torch.eye(len(known), dtype=torch.bool)
        xi = self.alpha / self.sigma * torch.exp(-squared_distances / self.sigma) * others
        xi = xi / xi.sum(1, keepdim=True).clamp_min(1)
        return xi + torch.diag((1 - xi.sum(1)).clamp_min(0))

    def newcomer(self, state: Any, class_counts: Any = None) -> Params:
        initial: Params = state["initial"]
        return initial

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        assert own is not None, "a client of a method that keeps models always has one"
        return Start(params=own, anchor=got.model)

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        return self.lambda_ / (2 * self.alpha) * losses.proximal(params, start.anchor)
