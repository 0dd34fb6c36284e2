"""FedProx. Li et al., Federated Optimization in Heterogeneous Networks, 2020.

    FedAvg, and the client's loss gains mu/2 * ||w - w_received||^2.

mu = 0 is FedAvg. (The norm is squared: a well-known docstring forgets that, and another implementation
has a term that is always zero because it compares the model with itself.)

As a plug-in (`+prox`) it is a local objective over other methods, such as FedPer: a client is held where its training starts, layers of its own included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    plugin: ClassVar[str] = "prox"
    work: ClassVar[str] = "client: the distance to the received model; server: as FedAvg"

    not_over: ClassVar[Mapping[str, str]] = {
        "loss": "its term is added to FedAvg's loss, and this one has a loss of its own",
        "fedamp": "its clients have a pull of their own, towards another model",
        "local": "its clients receive no model that they could be held near",
        "scaffold": "its number of steps is a tensor of the network, which the term would hold back",
        "fedproto": "its clients receive no model that they could be held near",
    }

    mu: float = 0.001
    """Weight of the proximal term."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu < 0:
            raise ConfigError(f"fedprox: mu must not be negative, it is {self.mu}")

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        start = super().begin(got, own, data)
        return replace(start, anchor=start.anchor | start.params)

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        penalty = self.mu / 2 * losses.proximal(params, start.anchor)
        return super().penalty(params, output, labels, start) + penalty
