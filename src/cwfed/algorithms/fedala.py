"""FedALA. Zhang et al., Adaptive Local Aggregation for Personalized Federated Learning, 2023.

On receipt of the global model, the client mixes it with its own trained model, number by number, in the top layers:

    theta^ = theta_i + (theta - theta_i) * omega_i            top layers; the lower ones are the received theta
    omega  <- clip(omega - eta d CE(theta^) / d omega, 0, 1)  learnt on a share of the training data, all else fixed

Not in a client's first round; in its second, epochs until the losses stand still; from then on one epoch, from the omega of last time. Then it trains
everything from theta^ as in FedAvg. The server is FedAvg's.

Limiting cases: eta = 0 or no top layer is FedAvg (omega is 1, and torch.lerp(a, b, 1) is b bit for bit); omega = 0 is FedPer. A test does not move
omega: what was measured after a round is what the next one starts from. (In public code `layer_idx = 0` takes *all* layers, and
`layer_idx` counts tensors, so that 1 is the output bias alone.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Loss, Network, Params, Pass, Start, Task, When
from cwfed.models import attach, holder, task_of

OMEGA = "omega."
"""Before the names of the tensors that are mixed: their weights."""
TIMES = "times"
"""What a client remembers: how often it took part."""


@dataclass(frozen=True)
class FedALA(FedAvg):
    """FedAvg whose clients take from the global model, number by number, what lowers their own loss."""

    name: ClassVar[str] = "fedala"
    keeps_model: ClassVar[bool] = True
    work: ClassVar[str] = "client: an epoch on a share of its data on receipt; keeps its model and the weights omega"

    layers: int = 1
    """p, top layers that are mixed; the others are taken as received."""
    rate: float = 1.0
    """eta, the learning rate of omega; 0 is FedAvg."""
    share: float = 0.8
    """s, share of the training data that omega is learnt on, drawn anew in every round."""
    still: float = 0.1
    """A client's first omega is learnt until the losses of ten epochs have a standard deviation below this ..."""
    most_epochs: int = 50
    """... or for so many epochs."""

    def __post_init__(self) -> None:
        if self.layers < 0 or self.rate < 0 or not 0 < self.share <= 1 or self.still < 0 or self.most_epochs < 1:
            raise ConfigError(
                "fedala: layers, rate and still must not be negative, share above 0 and at most 1, most_epochs at least 1"
            )

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        top, weights = task_of(model, 1, 1).select(self.layers), dict(model.named_parameters())
        return attach(model, OMEGA.removesuffix("."), holder({name: torch.ones_like(weights[name]) for name in top}))

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if not name.startswith(OMEGA))

    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        assert own is not None, "a client of a method that keeps models always has one"
        return got.model | {name: w for name, w in own.items() if name.startswith(OMEGA)}

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        assert own is not None, "a client of a method that keeps models always has one"
        times = own.get(TIMES, torch.zeros(()))
        anchor: Params = {}
        if times:
            for name in (name.removeprefix(OMEGA) for name in own if name.startswith(OMEGA)):
                anchor |= {f"own.{name}": own[name], f"got.{name}": got.model[name]}
        return Start(self.personal(got, own, data), anchor, {TIMES: times})

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        if when == "training":
            return (Pass(trained=task.parameters),)
        times = start.notes.get(TIMES, 0)
        if when == "test" or not (self.rate and self.layers and times):
            return ()
        omega = tuple(OMEGA + name for name in task.select(self.layers))
        learn = Pass(omega, 1, rate=self.rate, share=self.share, incomplete=True, low=0.0, high=1.0, stage="omega")
        return (replace(learn, epochs=self.most_epochs, until=(10, self.still)) if times == 1 else learn,)

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        learns_omega = stage == "omega"  # everything else is fixed then, running statistics included
        at = params | self.mixed(params, start) if learns_omega else params
        loss = batch.cross_entropy(network(at, batch.inputs, None if learns_omega else "").logits)
        return Loss(loss, torch.zeros_like(loss))

    def settle(self, params: Params, start: Start) -> Params:
        return params | self.mixed(params, start)

    def mixed(self, params: Params, start: Start) -> Params:
        """theta^ of the top layers."""
        omega = {name.removeprefix(OMEGA): w for name, w in params.items() if name.startswith(OMEGA)}
        return {n: torch.lerp(start.anchor[f"own.{n}"], start.anchor[f"got.{n}"], w) for n, w in omega.items()}

    def remember(self, start: Start) -> Params:
        return {TIMES: start.notes.get(TIMES, torch.zeros(())) + 1}
