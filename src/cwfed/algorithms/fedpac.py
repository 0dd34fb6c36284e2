"""FedPAC. Xu et al., Personalized Federated Learning with Feature Alignment and Classifier Collaboration, 2023.

On receipt, with the received body phi, the features of class j have the mean mu_ij and the mean squared norm s_ij;
p_ij = n_ij / n_i.

    client i  H_i has the rows p_ij mu_ij;  V_i = (1 / n_i) sum_j (p_ij s_ij - p_ij^2 ||mu_ij||^2)
              trains the head on CE, then the body on CE + lambda * mean over batch and coordinates of (f - C_y)^2
              c_ij = mean feature of its samples of class j, with the trained body
    server    phi = sum_i p_i phi_i;   C_j = sum_i n_ij c_ij / sum_i n_ij;   client i gets the head sum_j a_ij h_j with
              a_i = argmin over the simplex of ||H_i - sum_j a_j H_j||^2 + sum_j a_j^2 V_j

The programme is over the participants: the mixture nearest to the origin of the points (H_i - H_j, sqrt(V_j) e_j), whose
inner products are S_ii - S_ij - S_ik + S_jk (and V_j where j = k), S those of the H. It is convex, so that no eigenvalue
has to be changed. Weights below 1e-3 are cut off, the others sum to 1.

Where C_y is missing, the pull is to the client's own class mean on receipt; in round 1 there is none. Who sits out keeps
its last head, which the server has, over the new phi. The counts n_ij go up in the clear.

Limiting cases: lambda = 0 and a_i = e_i is FedRep with head_epochs = 1, bit for bit; equal H and V give a_i = 1/|C|;
V -> 0 with linearly independent H gives a_i = e_i. A widely used library lists heads in another order than H and V, so
that its weights meet the wrong clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.algorithms.fedproto import LARGEST_FEATURE, moved_prototypes, no_prototypes, prototype_forms
from cwfed.core import losses, mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import (
    Batch,
    Cost,
    Download,
    Form,
    Loss,
    Network,
    Params,
    Pass,
    Sizes,
    Start,
    Task,
    Uploads,
    When,
)

LEAST = 1e-3
"""Smaller weights of a mix are cut off."""


@dataclass(frozen=True)
class FedPAC(FedAvg):
    """A common body whose features are pulled to common class means, and for every client a mix of the heads that serve it."""

    name: ClassVar[str] = "fedpac"
    travels: ClassVar[str] = (
        "2 models a participant, K x (d + 1) numbers beside the one down, 2 K x d + K + 1 beside the one up"
    )
    work: ClassVar[str] = (
        "client: head_epochs through the output layer, two passes for class means; server: a quadratic programme a participant"
    )

    lambda_: float = 1.0
    """Weight of the pull of features towards the class means."""
    head_epochs: int = 1
    """Epochs on the head before `train.epochs` on the body."""
    head_lr: float = 1.0
    """Factor of the learning rate in these; the authors take 5 to 10."""

    def __post_init__(self) -> None:
        if self.lambda_ < 0 or self.head_epochs < 0 or self.head_lr <= 0:
            raise ConfigError("fedpac: lambda and head_epochs must not be negative, head_lr must be positive")

    def costs(self, sizes: Sizes) -> list[Cost]:
        prototypes = sizes.classes * sizes.features + sizes.classes
        server = sizes.model + sizes.clients * sizes.head + prototypes
        up = sizes.participants * (prototypes + sizes.classes * sizes.features + 1)
        return [
            Cost(
                self.name, server, sizes.once + sizes.participants * prototypes, sizes.once + up, "a head per client"
            )
        ]

    def init(self, fresh: Callable[[int], Params], task: Task) -> Any:
        model = self.travelling(fresh(0), task)
        names = [name for name in task.layers[task.output] if name in model]
        heads = {name: torch.stack([model[name]] * task.clients) for name in names}
        return {"model": model, "heads": heads} | no_prototypes(task, model)

    def send(self, state: Any, client: int) -> Download:
        head = {name: stack[client] for name, stack in state["heads"].items()}
        return Download((state["model"] | head,), {"prototypes": state["prototypes"], "known": state["known"]})

    def beside(self, model: Params, task: Task) -> dict[str, Form]:
        forms = prototype_forms(task, model)
        return forms | {"H": forms["prototypes"], "V": Form(torch.float32, (), 0, LARGEST_FEATURE**2)}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        weights = self.weights(up.extras["H"], up.extras["V"])
        mixed = mixing.mix(weights, {name: up.models[name] for name in state["heads"]})
        clients = torch.tensor(up.clients)
        heads = {name: stack.index_copy(0, clients, mixed[name]) for name, stack in state["heads"].items()}
        after: dict[str, Any] = super().aggregate(state, up)
        return after | {"heads": heads} | moved_prototypes(state, up, up.extras["class_counts"])

    def weights(self, statistics: Tensor, variances: Tensor) -> Tensor:
        """a: row i says of whose heads the i-th participant's is mixed."""
        centred = statistics.double() - statistics.double().mean(0)  # only differences count: they keep their digits
        s, v = mixing.gram({"H": centred}), torch.diag(variances.double())
        rows = [mixing.nearest_to_origin(s[i, i] - s[i][:, None] - s[i][None, :] + s + v) for i in range(len(s))]
        return mixing.cut(torch.stack(rows), LEAST)

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        means, squares, counts = data.class_moments(got.model)
        shares = counts / counts.sum()
        h = shares[:, None] * means
        v = (shares * squares - h.square().sum(1)).sum().clamp_min(0) / counts.sum()
        known = got.notes["known"]
        targets = torch.where(known[:, None] > 0, got.notes["prototypes"], means)
        return Start(got.model, notes={"H": h, "V": v, "targets": targets, "known": known.amax().expand(len(known))})

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        if when != "training":
            return ()
        head = task.layers[task.output]
        first = Pass(head, epochs=self.head_epochs, lr=self.head_lr, stage="head")
        body = Pass(tuple(name for name in task.parameters if name not in head), stage="body")
        return tuple(one for one in (first, body) if one.trained and one.epochs != 0)

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        output, notes = network(params, batch.inputs), start.notes
        loss = batch.cross_entropy(output.logits)
        if stage == "head":
            return Loss(loss, torch.zeros_like(loss))
        pull = losses.pull(output.features, notes["targets"], batch.labels, notes["known"])
        return Loss(loss, self.lambda_ * pull)

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        means, _, counts = data.class_moments(params)
        return {"prototypes": means, "class_counts": counts, "H": start.notes["H"], "V": start.notes["V"]}
