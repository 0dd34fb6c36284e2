"""GPFL. Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information, 2023.

Beside the network there are K class embeddings e (K x d, from N(0, 1)) and a conditional valve T, whose gamma and beta are
Linear(d, d), ReLU, LayerNorm each:

    T(f; c) = ReLU((gamma(c) + 1) * f + beta(c))
    g = (1/K) sum_k e_k,   t_i = sum_k p_ik e_k       from the received e, fixed for the round

    client i  trains (phi, h_i, e, T) on CE(h_i(T(f; t_i)), y) + CE(cos(T(f; g), e_k) over k, y) + lambda ||T(f; g) - E_y||
              with weight decay mu on e and T only; E is e as received, the norm is over the whole batch (Frobenius)
              sends phi, e, T; keeps h_i
    server    the mean of each by samples

The personal model is h_i(T(f; t_i)).

Limiting cases: T the identity, without the second and third loss, is FedPer, bit for bit; a client with uniform classes has
t_i = g. The cosines have no temperature: their cross-entropy is never below log(1 + (K - 1) e^-2), 2.67 for 100 classes.

Public code makes g and t_i from the client's own embeddings of its last round, before it takes over the received ones, and
p_ik from a loader that drops the last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Loss, Network, Params, Start, Task, Uploads

EMBEDDINGS = "class_embeddings"
"""The name of e in the head."""


def valve(features: Tensor, context: Tensor, tensors: Params) -> Tensor:
    """T(f; c), of a head's tensors by their names in it."""

    def conditioned(name: str) -> Tensor:
        hidden = F.relu(F.linear(context, tensors[f"{name}.0.weight"], tensors[f"{name}.0.bias"]))
        return F.layer_norm(hidden, hidden.shape[-1:], tensors[f"{name}.2.weight"], tensors[f"{name}.2.bias"])

    return F.relu((conditioned("gamma") + 1) * features + conditioned("beta"))


def mean_embedding(embeddings: Tensor, counts: Tensor | None = None) -> Tensor:
    """sum_k p_k e_k, p the shares of these counts; without them, or where they are none, all the same."""
    if counts is None or not counts.any():
        counts = embeddings.new_ones(len(embeddings))
    return (counts / counts.sum()).to(embeddings.dtype) @ embeddings


class ValveHead(nn.Linear):
    """h_i behind the valve, in place of the output layer: its own weight and bias are h_i."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        width = layer.in_features
        self.class_embeddings = nn.Parameter(torch.randn(layer.out_features, width))
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width)) for _ in range(2)
        )
        self.context = nn.Parameter(mean_embedding(self.class_embeddings.detach()), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(valve(features, self.context, dict(self.named_parameters())))


@dataclass(frozen=True)
class GPFL(FedAvg):
    """A body that learns common classes by their embeddings, and each client's own classes by its head, at the same time."""

    name: ClassVar[str] = "gpfl"
    travels: ClassVar[str] = (
        "2 models a participant less the head, with K d embeddings and the valve's 2 d^2 + 6 d numbers"
    )
    work: ClassVar[str] = "client: two passes through the valve a batch; keeps its head"

    lambda_: float = 0.01
    """Weight of the distance to the class embeddings; the authors take 0.01 for CNN and MLP, 1e-4 for ResNet-18 and fastText."""
    mu: float = 0.1
    """Weight decay of embeddings and valve; the authors take 0.1 for CNN and MLP, 0 for ResNet-18 and fastText."""

    def __post_init__(self) -> None:
        if self.lambda_ < 0 or self.mu < 0:
            raise ConfigError("gpfl: lambda and mu must not be negative")

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        layer = model.get_submodule(output)
        assert isinstance(layer, nn.Linear), "the model's output layer was checked when it was built"
        model.set_submodule(output, ValveHead(layer))
        return model

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        return super().init(fresh, task) | {"output": task.output}

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if name in (task.output_weight, f"{task.output}.bias"))

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        own = (*self.keeps(names, task), f"{task.output}.context")
        return tuple(name for name in names if name not in own)

    def aggregate(self, state: Any, up: Uploads) -> Any:
        return state | super().aggregate(state, up)

    def newcomer(self, state: Any, class_counts: Sequence[float] | None = None) -> Params:
        counts = None if class_counts is None else torch.tensor(class_counts)
        return self.with_context(state["model"], state["output"], counts)

    def with_context(self, model: Params, output: str, counts: Tensor | None) -> Params:
        """A received model with t_i."""
        return model | {f"{output}.context": mean_embedding(model[f"{output}.{EMBEDDINGS}"], counts)}

    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        assert own is not None, "every client keeps its head"
        return own | self.with_context(got.model, data.output, data.class_counts)

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        received = got.model[f"{data.output}.{EMBEDDINGS}"]
        return Start(self.personal(got, own, data), notes={"received": received, "g": mean_embedding(received)})

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        output = network(params, batch.inputs)
        return Loss(batch.cross_entropy(output.logits), self.guidance(params, output.features, batch, start))

    def guidance(self, params: Params, features: Tensor, batch: Batch, start: Start) -> Tensor:
        """The second and third loss, and the weight decay as its penalty."""
        (prefix,) = (name.removesuffix(EMBEDDINGS) for name in params if name.endswith(f".{EMBEDDINGS}"))
        head = {name.removeprefix(prefix): w for name, w in params.items() if name.startswith(prefix)}
        guided = valve(features, start.notes["g"], head)
        cosines = F.normalize(guided, dim=1) @ F.normalize(head[EMBEDDINGS], dim=1).T
        distance: Tensor = torch.linalg.vector_norm(guided - start.notes["received"][batch.labels])
        decayed = [w for name, w in head.items() if name == EMBEDDINGS or name.startswith(("gamma.", "beta."))]
        decay = torch.stack([w.square().sum() for w in decayed]).sum()
        return batch.cross_entropy(cosines) + self.lambda_ * distance + self.mu / 2 * decay
