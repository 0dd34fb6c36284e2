"""FedCP. Zhang et al., Separating Feature Information for Personalized Federated Learning via Conditional Policy, 2023.

Two heads answer, and a policy network A: R^d -> R^2d (Linear, LayerNorm, ReLU) divides the features between them:

    v = sum over the rows of P_i's weight on receipt,  u = v / ||v||
    (r, s) = softmax over the two halves of A(f * u),  so that r + s = 1 in every coordinate
    logits = P_i(r * f) + G(s * f)                     P_i the client's own head, G the received one

    client i  trains (phi_i, P_i, A_i) on CE + lambda MMD^2(f(x; phi_i), f(x; phi)); G and the received phi are fixed
              sends phi_i, A_i and the head (P_i + G) / 2; keeps P_i
    server    the mean of each by samples, which is the next (phi, A, G)

P_i and G start as the common initial head. MMD^2 is `losses.mmd`, over a batch.

Limiting cases: r = 1, s = 0 and lambda = 0 is FedPer, bit for bit (where the output layer has no bias: there are two); at
the first batch MMD^2 is 0.

In the authors' code the policy is a Gumbel softmax also at the test: the same model has another accuracy each time. And who
sits out gets the new body with its old G and A; here all three are sent together. Who knows G can compute P_i from
(P_i + G) / 2: it stays, but it is no secret.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import losses, mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Cost, Download, Form, Loss, Network, Params, Sizes, Start, Task, Uploads


def generic(names: Iterable[str], output: str) -> list[str]:
    """The names of G's tensors among these."""
    return [name for name in names if name.startswith(f"{output}.generic.")]


def context_of(weight: Tensor) -> Tensor:
    """u: the direction of the sum of a head's rows."""
    return F.normalize(weight.sum(0), dim=0)


class PolicyHead(nn.Linear):
    """Two heads in place of the output layer: its own tensors are P_i."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.generic = copy.deepcopy(layer).requires_grad_(False)
        width = 2 * layer.in_features
        self.policy = nn.Sequential(nn.Linear(layer.in_features, width), nn.LayerNorm(width), nn.ReLU())
        self.context = nn.Parameter(context_of(layer.weight.detach()), requires_grad=False)

    def shares(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(r, s): which share of each feature goes to P_i and to G."""
        r, s = self.policy(features * self.context).unflatten(1, (2, -1)).softmax(1).unbind(1)
        return r, s

    def forward(self, features: Tensor) -> Tensor:
        r, s = self.shares(features)
        logits: Tensor = super().forward(r * features) + self.generic(s * features)
        return logits


@dataclass(frozen=True)
class FedCP(FedAvg):
    """A common body, a common and a personal head, and a policy that shares out the features between them."""

    name: ClassVar[str] = "fedcp"
    travels: ClassVar[str] = (
        "2 models a participant with the policy's 2 d^2 + 6 d numbers: body, policy and head each way"
    )
    work: ClassVar[str] = (
        "client: a second forward pass through the received body, B^2 kernels a batch; keeps its head"
    )

    lambda_: float = 5.0
    """Weight of MMD^2 between the features of the trained and of the received body; 5 is the authors' for MNIST."""

    def __post_init__(self) -> None:
        if self.lambda_ < 0:
            raise ConfigError(f"fedcp: lambda must not be negative, it is {self.lambda_}")

    def costs(self, sizes: Sizes) -> list[Cost]:
        travelling = sizes.model - sizes.kept
        once = sizes.participants * travelling
        return [Cost(self.name, travelling, once, once, f"every client keeps {sizes.kept:,}")]

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        layer = model.get_submodule(output)
        assert isinstance(layer, nn.Linear), "the model's output layer was checked when it was built"
        model.set_submodule(output, PolicyHead(layer))
        return model

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        model = fresh(0)
        own = self.keeps(tuple(model), task)
        return {"model": {name: w for name, w in model.items() if name not in own}}

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        """P_i and the context that is made from it."""
        return tuple(name for name in names if name in task.layers[task.output])

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        own = (*self.keeps(names, task), *generic(names, task.output))
        return tuple(name for name in names if name not in own)

    def beside(self, model: Params, task: Task) -> dict[str, Form]:
        return {name: Form(model[name].dtype, tuple(model[name].shape)) for name in generic(model, task.output)}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        return {"model": mixing.average(up.models | up.extras, mixing.sample_weights(up.counts))}

    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        assert own is not None, "every client keeps its head"
        return got.model | own | {f"{data.output}.context": context_of(own[f"{data.output}.weight"])}

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        body = {name: w for name, w in got.model.items() if not name.startswith(f"{data.output}.")}
        return Start(self.personal(got, own, data), anchor=body)

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        output = network(params, batch.inputs)
        loss = batch.cross_entropy(output.logits)
        if self.lambda_ == 0:
            return Loss(loss, torch.zeros_like(loss))
        received = network(params | start.anchor, batch.inputs, None)
        return Loss(loss, self.lambda_ * losses.mmd(output.features, received.features))

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        own = {name: f"{data.output}.{name.rpartition('.')[2]}" for name in generic(params, data.output)}
        return {name: (params[own[name]] + params[name]) / 2 for name in own}
