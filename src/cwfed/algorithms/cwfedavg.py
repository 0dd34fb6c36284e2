"""cwFedAvg with WDR. Lee and Choi, Class-Wise Federated Averaging for Efficient Personalization, ICCV 2025.

Server, from the uploaded models w_i alone:

    p~_ij = ||output row j of w_i|| / sum_k ||output row k of w_i||       (1/K before the first upload)
    q_ij  = p_i p~_ij / sum_i p_i p~_ij                                   who makes class model j
    w^G_j = sum_i q_ij w_i                                                class-wise local aggregation
    w_i   = sum_j p~_ij w^G_j                                             class-wise global aggregation

Client: loss + wdr * ||p_i - p~_i||_2, so that the row norms follow the client's class distribution p_i
and the server can read it off the weights.

Limiting cases: all clients with the same p~ are FedAvg; `layers = "none"` with wdr = 0 is FedAvg bit for
bit; each client with a class of its own gets back what it sent.

The lean form. Both aggregations are linear, so client i's model is sum_c a_ic w_c with a_i = p~_i Q^T over
the participants c. The K class models need never exist: the state keeps the smaller of the two factors,
K class models or the participants' models, and a recipe that makes a client's model from it.

Defences against clients that mean harm (ours; not in the paper; off by default, see docs/security.md). p~ is a claim:
whoever makes an output row long takes the class. `class_cap` bounds every q_ij; `robust` makes class models by a weighted
median or trimmed mean of every coordinate, which is not linear: then the state keeps the K class models.

Differences to the authors' code: theirs halves the coefficient (our `wdr` is the equation's, the paper's
lambda = 10 is `wdr = 5`); theirs crashes when a client sits out (here it keeps its last p~).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core import losses, mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import Cost, Download, ExtraSpec, Output, Params, Sizes, Start, Task, Uploads


class ClassWise(TypedDict):
    """The server's state: K numbers per client, and min(K, participants) copies of class-wise layers."""

    shared: Params
    """Layers that are not class-wise: one FedAvg model."""
    basis: Params
    """Class-wise layers as a stack: class models or participants' models, whichever are fewer."""
    recipe: Tensor
    """Class model j = sum_s recipe[j, s] basis[s]."""
    prior: Tensor
    """p~, one row a client."""
    output: str
    """Name of the output layer's weight matrix."""


@dataclass(frozen=True)
class CwFedAvg(FedAvg):
    """Averages once per class, then mixes the class models by each client's class distribution.

    Examples:
        >>> import cwfed
        >>> cwfed.CwFedAvg(wdr=2.0).layers  # for cwfed.run(algorithm=...)
        'output'
    """

    name: ClassVar[str] = "cwfedavg"
    work: ClassVar[str] = (
        "client: K row norms a batch; server: one matrix product, keeps min(K, participants) class-wise copies"
    )

    layers: str | int | tuple[str, ...] = "output"
    """Which layers are class-wise: "output", "all", "none", the last n, or layer names. The rest is FedAvg."""
    distribution: Literal["estimated", "empirical"] = "estimated"
    """p~ read from the weights, or the true p that the clients then have to send (the ablation)."""
    wdr: float = 5.0
    """Coefficient of the weight distribution regulariser; 0 turns it off."""
    class_cap: float = field(default=1.0, metadata={"before": 1.0})
    """Most that one participant may have of a class model (its q_ij); 1 is no cap."""
    robust: Literal["mean", "median", "trimmed"] = field(default="mean", metadata={"before": "mean"})
    """How class models are made of the uploads, weighted by q_ij: their mean, or coordinate by coordinate robustly."""
    trim: float = field(default=0.1, metadata={"before": 0.1})
    """With "trimmed": share of the weight that is cut off at both ends of each coordinate."""
    objective: FedAvg = field(default_factory=FedAvg)
    """The local objective that class-wise aggregation is combined with, such as FedProx's."""

    def __post_init__(self) -> None:
        if self.wdr < 0:
            raise ConfigError(f"cwfedavg: wdr must not be negative, it is {self.wdr}")
        if not 0 < self.class_cap <= 1:
            raise ConfigError(f"cwfedavg: class_cap must be above 0 and at most 1, it is {self.class_cap}")
        if not 0 <= self.trim < 0.5:
            raise ConfigError(f"cwfedavg: trim must be at least 0 and below 0.5, it is {self.trim}")
        server = ("adapt", "init", "send", "uploaded", "keeps", "aggregate", "personal", "passes", "loss", "shown")
        own = [name for name in server if getattr(type(self.objective), name) is not getattr(FedAvg, name)]
        if own:
            raise ConfigError(
                f"cwfedavg replaces FedAvg's aggregation under a local objective; {type(self.objective).__name__} "
                f"is more than a local objective: it has its own {', '.join(own)}"
            )

    def costs(self, sizes: Sizes) -> list[Cost]:
        model, head, once = sizes.travelling, sizes.head, sizes.participants * sizes.travelling
        copies, distributions = min(sizes.classes, sizes.participants), sizes.clients * sizes.classes
        lean_all, lean_output = copies * model, model - head + copies * head
        bound = f"min(K, participants) = {copies} copies"
        return [
            Cost(f"{self.name} (output), lean", lean_output + distributions, once, once, f"{copies} output layers"),
            Cost(f"{self.name} (all), lean", lean_all + distributions, once, once, bound),
            Cost(
                f"{self.name} (output), as published", model + sizes.classes * head, once, once, "and K output layers"
            ),
            Cost(f"{self.name} (all), as published", sizes.classes * model, once, once, "K class models"),
        ]

    # server

    def init(self, fresh: Callable[[int], Params], task: Task) -> ClassWise:
        model = self.travelling(fresh(0), task)
        class_wise = set(task.select(self.layers))
        return ClassWise(
            shared={name: w for name, w in model.items() if name not in class_wise},
            basis={name: w[None] for name, w in model.items() if name in class_wise},
            recipe=torch.ones(task.classes, 1, dtype=torch.float64),
            prior=torch.full((task.clients, task.classes), 1 / task.classes, dtype=torch.float64),
            output=task.output_weight,
        )

    def send(self, state: Any, client: int) -> Download:
        return Download((self.personal_model(state, state["prior"][client]),))

    def send_each(self, state: Any, clients: Sequence[int]) -> list[Download]:
        if type(self).personal_model is not CwFedAvg.personal_model:
            return [self.send(state, client) for client in clients]
        return [Download((model,)) for model in self._personal_models(state, state["prior"][list(clients)])]

    def extras_spec(self, model: Params, task: Task) -> dict[str, ExtraSpec]:
        sent = self.objective.extras_spec(model, task)
        if self.distribution == "empirical":
            sent = sent | {"class_counts": ExtraSpec(torch.float32, (task.classes,), 0, counts_samples=True)}
        return sent

    def aggregate(self, state: Any, up: Uploads) -> ClassWise:
        clients = list(up.clients)
        prior = state["prior"].clone()  # a client that sat out keeps its last p~
        prior[clients] = self._distributions(state, up)

        shares = mixing.sample_weights(up.counts)
        weights = mixing.capped(mixing.class_weights(shares, prior[clients]), self.class_cap)
        recipe = weights.T  # K x participants: class models from uploads
        basis = {name: up.models[name] for name in state["basis"]}
        if self.robust != "mean" or len(recipe) < len(clients):
            basis, recipe = self._class_models(recipe, basis), torch.eye(len(recipe), dtype=recipe.dtype)
        return ClassWise(
            shared=mixing.average({name: up.models[name] for name in state["shared"]}, shares),
            basis=basis,
            recipe=recipe,
            prior=prior,
            output=state["output"],
        )

    def _class_models(self, weights: Tensor, uploads: Params) -> Params:
        """w^G_j for all classes, as a stack: the only place where `robust` matters."""
        if self.robust == "mean":
            return mixing.mix(weights, uploads)
        return mixing.trimmed(weights, uploads, mixing.MEDIAN if self.robust == "median" else self.trim)

    def _distributions(self, state: Any, up: Uploads) -> Tensor:
        if self.distribution == "empirical":
            counts = up.extras["class_counts"].double()
            return counts / counts.sum(1, keepdim=True)
        return mixing.norm_distribution(up.models[state["output"]].double())

    def personal_model(self, state: Any, distribution: Tensor) -> Params:
        """sum_j p~_j w^G_j: the model for any class distribution."""
        (model,) = self._personal_models(state, distribution[None])
        return model

    def _personal_models(self, state: Any, distributions: Tensor) -> list[Params]:
        shared: Params = state["shared"]
        if not len(distributions):
            return []
        weights = torch.stack([self.weights(state, distribution) for distribution in distributions])
        return [shared | own for own in mixing.averages(state["basis"], weights)]

    def weights(self, state: Any, distribution: Tensor) -> Tensor:
        """a: how much of each model of the basis is in the model for a class distribution."""
        found: Tensor = distribution @ state["recipe"]
        return found

    def newcomer(self, state: Any, class_counts: Sequence[float] | None = None) -> Params:
        """A model for a client that never took part: from its label histogram, or 1/K without one."""
        classes = state["prior"].shape[1]
        counts = mixing.histogram([1.0] * classes if class_counts is None else class_counts, classes)
        return self.personal_model(state, counts / counts.sum())

    def class_models(self, state: Any) -> Params:
        """The K class models w^G_j of the class-wise layers, as a stack (for pictures and tests)."""
        return mixing.mix(state["recipe"], state["basis"])

    # client

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        start = super().begin(got, own, data)
        pull = self.objective.begin(Download((start.params,)), None, data)
        notes = start.notes | pull.notes
        if self.wdr:
            notes = notes | {"class_prior": data.class_counts / data.class_counts.sum()}
        return Start(start.params, start.anchor | pull.anchor, notes)

    def penalty(self, params: Params, output: Output, labels: Tensor, start: Start) -> Tensor:
        penalty = self.objective.penalty(params, output, labels, start)
        if self.wdr:
            penalty = penalty + self.wdr * losses.wdr(output.weight, start.notes["class_prior"])
        return penalty

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        extras = self.objective.finish(params, start, data)
        if self.distribution == "empirical":
            extras = extras | {"class_counts": data.class_counts}
        return extras
