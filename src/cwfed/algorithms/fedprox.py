"""FedProx. Li et al., Federated Optimization in Heterogeneous Networks, 2020.

    FedAvg, and the client's loss gains mu/2 * ||w - w_received||^2.

mu = 0 is FedAvg. (The norm is squared: a well-known docstring forgets that, and another implementation
has a term that is always zero because it compares the model with itself.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import losses
from cwfed.core.errors import ConfigError
from cwfed.core.types import Download, Output, Params, Start


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term that keeps clients near what they received."""

    name: ClassVar[str] = "fedprox"
    work: ClassVar[str] = "client: the distance to the received model; server: as FedAvg"

    mu: float = 0.001
    """Weight of the proximal term."""

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ConfigError(f"fedprox: mu must not be negative, it is {self.mu}")

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        received = self.personal(got, own, data)
        return Start(params=received, anchor=received)

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        return self.mu / 2 * losses.proximal(params, start.anchor)
