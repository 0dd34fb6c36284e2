"""Ditto. Li et al., Fair and Robust Federated Learning Through Personalization, 2021.

    w_i : cross-entropy from the received w, sent up and averaged as in FedAvg
    v_i : cross-entropy + lambda/2 ||v - w||^2, w the received model, fixed; v_i stays with the client

Both are one SGD step on CE(w_i) + CE(v_i) + lambda/2 ||v_i - w||^2 over the joint tensors, on the same batch (as the authors do).

Limiting cases: lambda = 0 makes v_i Local's model; the w_i are FedAvg's whatever lambda is; both bit for bit. Where lr lambda = 1, a step is
v' = w - lr grad CE(v). Needs lr lambda < 2, or v runs away from w. (`train.clip` bounds both gradients together, and dropout draws for one model after the
other: with these the streams are no longer those of FedAvg and Local.)

Phase `received` is the global model w, as in FedAvg; phase `trained`, on which the method is reported, is v_i, which receipt does not touch.
(A widely used library reports the better of both.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.algorithms.twin import OWN, of_network, of_twin, with_twin
from cwfed.core import losses
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Loss, Network, Params, Phase, Start, Task


@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg, and beside it a personal model that is pulled towards what the client received."""

    name: ClassVar[str] = "ditto"
    phase: ClassVar[Phase] = "trained"
    work: ClassVar[str] = "client: twice the training, keeps a second model; server: as FedAvg"

    lambda_: float = 0.1
    """Weight of the pull towards the received model; the authors choose among 0.1, 1 and 2."""

    def __post_init__(self) -> None:
        if self.lambda_ < 0:
            raise ConfigError(f"ditto: lambda must not be negative, it is {self.lambda_}")

    def check(self, task: Task) -> None:
        if task.training.is_plain and task.training.lr * self.lambda_ >= 2:
            raise ConfigError(
                f"ditto: train.lr times lambda must be below 2, or v diverges from w; it is {task.training.lr:g} * "
                f"{self.lambda_:g}: lower one of them"
            )

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        return with_twin(model)

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if not name.startswith(OWN))

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if name.startswith(OWN))

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        return Start(params=self.personal(got, own, data), anchor=got.model)

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        common, personal = of_network(params), of_twin(params)
        loss = batch.cross_entropy(network(params, batch.inputs).logits)
        own = batch.cross_entropy(network(personal, batch.inputs, OWN).logits)
        anchor = {name: start.anchor[name] for name in common}
        return Loss(loss, own + self.lambda_ / 2 * losses.proximal(personal, anchor))

    def shown(self, params: Params) -> Params:
        return params | of_twin(params)
