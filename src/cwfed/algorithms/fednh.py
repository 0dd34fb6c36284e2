"""FedNH. Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, 2023.

Features are normalised; the head is K prototypes on the unit sphere, not trained by gradient; logits are
s * cosine, with s a trained scalar that travels with the body. The client uploads its body and, for every class it has, the normalised mean feature m_ij and n_ij.

    body        = plain mean of the participants' bodies
    prototype_j = normalise(rho * old_j + (1 - rho) * normalise(sum_i n_ij m_ij / sum_i n_ij))

A class that nobody has keeps its prototype. Prototypes start orthogonal; with more classes than features, where
that is impossible, they start uniform on the sphere.

Limiting case: rho = 1 keeps the prototypes as they were drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, Form, Params, Sizes, Start, Task, Uploads


class PrototypeHead(nn.Linear):
    """Logits s * cosine(feature, prototype) in place of the output layer; the prototypes get no gradient."""

    def __init__(self, features: int, classes: int, scale: float, learnable: bool) -> None:
        super().__init__(features, classes, bias=False)
        with torch.no_grad():
            if classes <= features:
                nn.init.orthogonal_(self.weight)
            else:
                self.weight.copy_(F.normalize(torch.randn(classes, features), dim=1))
        self.weight.requires_grad_(False)
        self.scale: float | Tensor = nn.Parameter(torch.tensor(scale)) if learnable else scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1))


@dataclass(frozen=True)
class FedNH(FedAvg):
    """A body trained against class prototypes that the server moves slowly."""

    name: ClassVar[str] = "fednh"
    travels: ClassVar[str] = "2 models a participant: body and prototypes each way, and K counts up"
    work: ClassVar[str] = "client: one pass over its training data for the mean features; server: as FedAvg"

    rho: float = 0.9
    """Smoothing of the prototypes: 1 never moves them."""
    scale: float = 1.0
    """s, the factor of the cosine, where training starts; the authors start from 1 for small CNNs, 20 for ResNet-18."""
    learn_scale: bool = True
    """Train s like the body, as the authors do. False fixes it: a large fixed s (30) fits each client sharply from the
    first round, which lifts early accuracy and is another method than the published one."""

    def __post_init__(self) -> None:
        if not (0 <= self.rho <= 1 and self.scale > 0):
            raise ConfigError("fednh: rho must lie from 0 to 1 and scale must be positive")

    def costs(self, sizes: Sizes) -> list[Cost]:
        counts = sizes.participants * sizes.classes
        return [Cost(self.name, sizes.model, sizes.once, sizes.once + counts, "and K counts up")]

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        layer = model.get_submodule(output)
        assert isinstance(layer, nn.Linear), "the model's output layer was checked when it was built"
        head = PrototypeHead(layer.in_features, layer.out_features, self.scale, self.learn_scale)
        parent, _, name = output.rpartition(".")
        setattr(model.get_submodule(parent), name, head)
        return model

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        return {"model": fresh(0), "output": task.output_weight}

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        """The client's mean features go up in place of the prototypes, which the server has."""
        return tuple(name for name in names if name != task.output_weight)

    def beside(self, model: Params, task: Task) -> dict[str, Form]:
        prototypes = model[task.output_weight]
        return {
            "prototypes": Form(prototypes.dtype, tuple(prototypes.shape), -1.001, 1.001),  # unit vectors, or zero
            "class_counts": Form(torch.float32, (task.classes,), 0, counts_samples=True),
        }

    def aggregate(self, state: Any, up: Uploads) -> Any:
        everybody = torch.full((len(up.clients),), 1 / len(up.clients), dtype=torch.float64)
        model = mixing.average(up.models, everybody)
        old = state["model"][state["output"]]
        model[state["output"]] = self.move(old, up.extras["prototypes"], up.extras["class_counts"])
        return state | {"model": model}

    def move(self, old: Tensor, prototypes: Tensor, counts: Tensor) -> Tensor:
        """The new prototypes (K x d) from the clients' (C x K x d) and their counts (C x K)."""
        weighted = torch.einsum("ck,ckd->kd", counts.to(prototypes.dtype), prototypes)
        moved = F.normalize(self.rho * old + (1 - self.rho) * F.normalize(weighted, dim=1), dim=1)
        return torch.where((counts.sum(0) > 0)[:, None], moved, old)

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        means = F.normalize(data.class_means(params), dim=1)  # zero rows, of classes it lacks, stay zero
        return {"prototypes": means, "class_counts": data.class_counts}
