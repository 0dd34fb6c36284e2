"""FedProto. Tan et al., Federated Prototype Learning across Heterogeneous Clients, 2022.

The whole model stays with its client; what travels is a prototype per class, the mean feature of its samples:

    client i  trains on CE + lambda * mean over batch and coordinates of (f - C_y)^2, C fixed; none without C_y
              c_ij = mean feature of its samples of class j, with the model that it keeps
    server    C_j = sum_i n_ij c_ij / sum_i n_ij over the participants that have class j; else C_j stays as it is

Phase `received`, on which it is reported: the client's own model with the nearest of the newest prototypes,
argmin_j ||f - C_j||, which is a linear head with rows 2 C_j and biases -||C_j||^2. Phase `trained`: with its own head.
Before there is any prototype, both are the own model.

Limiting cases: lambda = 0 trains as Local does, bit for bit; with one client C_j is its own class mean.

Public versions average the features of the training pass, while the weights move. The paper's formula divides once more
by the number of clients, so that its weights do not sum to 1. Some forget a class that no participant of a round has, or
pull classes without a prototype to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import losses, mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, Download, Form, Output, Params, Sizes, Start, Task, Uploads

LARGEST_FEATURE = 1e12
"""No honest mean feature is larger: its squared norm is still a float32 number."""
NEVER = -1e30
"""The logit of a class without a prototype: a finite number below all others."""


def no_prototypes(task: Task, model: Params) -> Params:
    """Before round 1: K rows of zeros, none of them known."""
    weight = model[task.output_weight]
    return {"prototypes": torch.zeros_like(weight), "known": weight.new_zeros(task.classes)}


def prototype_forms(task: Task, model: Params) -> dict[str, Form]:
    """What a client sends of its prototypes: a row per class, zero where it has no sample, and n_ij."""
    weight = model[task.output_weight]
    return {
        "prototypes": Form(weight.dtype, tuple(weight.shape), -LARGEST_FEATURE, LARGEST_FEATURE),
        "class_counts": Form(torch.float32, (task.classes,), 0, counts_samples=True),
    }


def moved_prototypes(state: Any, up: Uploads, weights: Tensor) -> Params:
    """The prototypes after a round, from weights n_ij or others (participants x K)."""
    prototypes = mixing.class_average(up.extras["prototypes"], weights, state["prototypes"])
    known = torch.maximum(state["known"], (weights.sum(0) > 0).to(state["known"].dtype))
    return {"prototypes": prototypes, "known": known}


@dataclass(frozen=True)
class FedProto(FedAvg):
    """Clients keep their models and agree on where each class lies in feature space."""

    name: ClassVar[str] = "fedproto"
    keeps_model: ClassVar[bool] = True
    travels: ClassVar[str] = "prototypes only: K x d numbers and K flags down, K x d and K counts up"
    work: ClassVar[str] = "client: one pass over its training data for the mean features; keeps its model"

    lambda_: float = 1.0
    """Weight of the pull towards the prototypes (mean squared error); 1 in the authors' code, others take 10."""
    weights: Literal["samples", "equal"] = "samples"
    """Whether the clients that have a class count by their samples of it, or all the same (as in the authors' code)."""
    predict: Literal["prototypes", "head"] = "prototypes"
    """Whether phase `received` asks for the nearest prototype or the client's own head."""

    def __post_init__(self) -> None:
        if self.lambda_ < 0:
            raise ConfigError(f"fedproto: lambda must not be negative, it is {self.lambda_}")

    def costs(self, sizes: Sizes) -> list[Cost]:
        numbers = sizes.classes * (sizes.features + 1)
        once = sizes.participants * numbers
        return [Cost(self.name, numbers, once, once, "every client keeps its own model")]

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        if self.predict == "prototypes" and model.get_submodule(output).bias is None:
            raise ConfigError(
                f"fedproto: the nearest prototype is a linear head with biases, and the output layer {output!r} has none: "
                'set algorithm.predict = "head", or give the layer a bias'
            )
        return model

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        return no_prototypes(task, fresh(0)) | {"output": task.output}

    def send(self, state: Any, client: int) -> Download:
        return Download((), {"prototypes": state["prototypes"], "known": state["known"]})

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return ()

    def beside(self, model: Params, task: Task) -> dict[str, Form]:
        return prototype_forms(task, model)

    def aggregate(self, state: Any, up: Uploads) -> Any:
        counts = up.extras["class_counts"]
        weights = counts if self.weights == "samples" else (counts > 0).to(counts.dtype)
        return state | moved_prototypes(state, up, weights)

    def newcomer(self, state: Any, class_counts: Any = None) -> Params:
        """The head of the prototypes, for the initial body: nobody else's is to be had."""
        return self.head(state["output"], state) if self.predict == "prototypes" else {}

    def head(self, output: str, got: Params) -> Params:
        """Logits 2 C_j f - ||C_j||^2, the largest of which is that of the nearest prototype; none before the first one."""
        if not got["known"].any():
            return {}
        c = got["prototypes"]
        bias = torch.where(got["known"] > 0, -c.square().sum(1), NEVER)
        return {f"{output}.weight": 2 * c, f"{output}.bias": bias}

    def personal(self, got: Download, own: Params | None, data: ClientData) -> Params:
        assert own is not None, "a client of a method that keeps models always has one"
        if self.predict == "head":
            return own
        return own | self.head(data.output, got.notes)

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        assert own is not None, "a client of a method that keeps models always has one"
        return Start(params=own, notes=got.notes)

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        return self.lambda_ * losses.pull(output.features, start.notes["prototypes"], labels, start.notes["known"])

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        means, _, counts = data.class_moments(params)
        return {"prototypes": means, "class_counts": counts}
