"""FedALA. Zhang et al., Adaptive Local Aggregation for Personalized Federated Learning, 2023.

On receipt of the global model, the client mixes it with its own trained model, number by number, in the top layers:

    theta^ = theta_i + (theta - theta_i) * omega_i            top layers; the lower ones are the received theta
    omega  <- clip(omega - eta d CE(theta^) / d omega, 0, 1)  learnt on a share of the training data, all else fixed

Not in a client's first round; in its second, epochs until the losses stand still; from then on one epoch, from the omega of last time. Then it trains
everything from theta^ as in FedAvg. The server is FedAvg's.

The row form (`rows`, ours) has one omega per class for the weights and the bias of its output row: K numbers, less to overfit, and readable: which classes
this client takes from others. As a plug-in (`+ala`) it mixes what any method hands out, such as cwFedAvg's output layers; the lower layers, the training and the server
are that method's. A client keeps its own top layers and omega.

Limiting cases: eta = 0 or no top layer is FedAvg, or what is beneath it (omega is 1, and torch.lerp(a, b, 1) is b bit for bit); omega = 0 is FedPer. A test does not move
omega: what was measured after a round is what the next one starts from. (In public code `layer_idx = 0` takes *all* layers, and
`layer_idx` counts tensors, so that 1 is the output bias alone.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Loss, Network, Output, Params, Pass, Start, Task, When
from cwfed.models import attach, holder, task_of

OMEGA = "omega."
"""Before the names of the tensors that are mixed: their weights."""
TIMES = "times"
"""What a client remembers: how often it took part."""


@dataclass(frozen=True)
class FedALA(FedAvg):
    """FedAvg whose clients take from the global model, number by number, what lowers their own loss."""

    name: ClassVar[str] = "fedala"
    plugin: ClassVar[str] = "ala"
    work: ClassVar[str] = (
        "client: an epoch on a share of its data on receipt; keeps its top layers and the weights omega"
    )
    not_over: ClassVar[Mapping[str, str]] = {
        "fedcac": "its masks are of every parameter, and what this plug-in keeps at the client never reaches the server",
        "personal": "it mixes the one model that is sent with the client's own, and this one makes its model on receipt itself",
        "adapt": "it mixes the network's own layers, and this one has changed its network",
        "fedamp": "its clients start from their own model, with which there is nothing to mix",
        "loss": "it mixes the one model that is trained, and this one has a loss of its own, of more than that",
    }

    top_layers: int = 1
    """p, top layers that are mixed; the others are taken as received."""
    rows: bool = False
    """One omega per class, for the output layer's rows, in place of one for every number."""
    rate: float = 1.0
    """eta, the learning rate of omega; 0 is FedAvg."""
    share: float = 0.8
    """s, share of the training data that omega is learnt on, drawn anew in every round."""
    still: float = 0.1
    """A client's first omega is learnt until the losses of ten epochs have a standard deviation below this ..."""
    most_epochs: int = 50
    """... or for so many epochs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_layers < 0 or self.rate < 0 or not 0 < self.share <= 1 or self.still < 0 or self.most_epochs < 1:
            raise ConfigError(
                "fedala: top_layers, rate and still must not be negative, share above 0 and at most 1, most_epochs at least 1"
            )
        if self.rows and self.top_layers != 1:
            raise ConfigError("fedala: rows belong to the output layer: with them, top_layers must be 1")

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        network = super().adapt(model, output)
        weights, task = dict(network.named_parameters()), task_of(network, 1, 1)
        omega = {name: torch.ones_like(weights[name]) for name in self.mixes(task)}
        if self.top_layers and not omega:
            raise ConfigError(
                f"ala: the top layers of {self.name} never leave their client, so there is nothing to mix"
            )
        if self.rows:
            omega = {output: torch.ones(len(weights[task.output_weight]))}
        return attach(network, OMEGA.removesuffix("."), holder(omega).requires_grad_(False))

    def mixes(self, task: Task) -> tuple[str, ...]:
        """The tensors that are mixed: those of the top layers that travel."""
        travels = self.uploaded(task.parameters, task)
        return tuple(name for name in task.select(self.top_layers) if name in travels)

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in super().uploaded(names, task) if not name.startswith(OMEGA))

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        kept = {*super().keeps(names, task), *self.mixes(task)}
        return tuple(name for name in names if name in kept or name.startswith(OMEGA))

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        start, own = super().begin(got, own, data), own or {}
        times = own.get(TIMES, torch.zeros(()))
        anchor: Params = {}
        if times:
            for omega in (name.removeprefix(OMEGA) for name in own if name.startswith(OMEGA)):
                for name in (
                    omega,
                    f"{omega}.weight",
                    f"{omega}.bias",
                ):  # a tensor, or those of a layer that is mixed by rows
                    if name in own:
                        anchor |= {f"own.{name}": own[name], f"got.{name}": start.params[name]}
        return replace(start, anchor=start.anchor | anchor, notes=start.notes | {TIMES: times})

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        beneath, times = super().passes(when, task, start), start.notes.get(TIMES, 0)
        if when != "receipt" or not (self.rate and self.top_layers and times):
            return beneath
        omega = (OMEGA + task.output,) if self.rows else tuple(OMEGA + name for name in self.mixes(task))
        learn = Pass(omega, 1, rate=self.rate, share=self.share, incomplete=True, low=0.0, high=1.0, stage="omega")
        return (*beneath, replace(learn, epochs=self.most_epochs, until=(10, self.still)) if times == 1 else learn)

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        if stage != "omega":
            return super().loss(network, params, batch, start, stage)

        def mixing(params: Params, inputs: Tensor, statistics: str | None = "") -> Output:
            return network(
                params | self.mixed(params, start), inputs, None
            )  # all but omega is fixed, running statistics included

        found = super().loss(mixing, params, batch, start, "")
        return Loss(found.loss, torch.zeros_like(found.loss))

    def settle(self, params: Params, start: Start) -> Params:
        return super().settle(params, start) | self.mixed(params, start)

    def mixed(self, params: Params, start: Start) -> Params:
        """theta^ of the top layers."""
        mixed: Params = {}
        for name in (name.removeprefix("got.") for name in start.anchor if name.startswith("got.")):
            own, got = start.anchor[f"own.{name}"], start.anchor[f"got.{name}"]
            omega = params.get(OMEGA + name)
            if omega is None:  # one for each row of its layer
                omega = params[OMEGA + name.rpartition(".")[0]].reshape(-1, *[1] * (own.dim() - 1))
            mixed[name] = torch.lerp(own, got, omega)
        return mixed

    def remember(self, start: Start) -> Params:
        return super().remember(start) | {TIMES: start.notes.get(TIMES, torch.zeros(())) + 1}
