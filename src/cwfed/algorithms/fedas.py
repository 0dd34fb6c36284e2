"""FedAS. Yang et al., FedAS: Bridging Inconsistency in Personalized Federated Learning, 2024.

FedPer with two additions. On receipt of the body phi, a client brings it into line with its own old model, whose class means
of features are c_j, by an epoch of SGD on the body alone:

    sum over the classes j of the batch of the mean, over its samples of class j and coordinates, of (f(x; phi) - c_j)^2

and trains body and head from there. Beside the body goes up how much its data still say about its model:

    F_i = sum over batches of ||gradient of the batch's mean cross-entropy||^2     (called a Fisher trace; not per sample)
    phi = sum_i F_i phi_i / sum_i F_i                                              where all F_i are 0: by samples

Limiting cases: no alignment and `weights = "samples"` is FedPer bit for bit; "equal" is FedPer with a plain mean. Before a
client's first round its old model is the initial one. With one sample per class, a body has no gradient towards its own
class means. Reported is what a client trained last (phase `trained`), as the authors do; phase `received` is after the
alignment.

(In the authors' code the server hands out its own model, so that a client gets a body that those before it have aligned.
Another public version aligns means of a batch, not samples, and lets the server overwrite the head.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import OneModel
from cwfed.algorithms.fedper import FedPer
from cwfed.core import mixing
from cwfed.core.errors import ConfigError
from cwfed.core.types import (
    Batch,
    Cost,
    Download,
    ExtraSpec,
    Loss,
    Network,
    Params,
    Pass,
    Phase,
    Sizes,
    Start,
    Task,
    Uploads,
    When,
)

PROTOTYPES = "prototypes"
"""The note with c_j."""


@dataclass(frozen=True)
class FedAS(FedPer):
    """FedPer whose clients fit the received body to their own features first, weighted by what their data still teach."""

    name: ClassVar[str] = "fedas"
    phase: ClassVar[Phase] = "trained"
    keeps_model: ClassVar[bool] = True
    travels: ClassVar[str] = "the body both ways, 2 models less the personal layers, and one number up"
    work: ClassVar[str] = "client: class means, an epoch on receipt and a gradient of all data; keeps its whole model"

    align_epochs: int = 1
    """Epochs on receipt that bring the body into line; 0 is none."""
    rate: float = 0.01
    """Learning rate of the alignment."""
    batch_size: int = 16
    """Of the alignment, and of the batches of F."""
    weights: Literal["fisher", "samples", "equal"] = "fisher"
    """What bodies are averaged by."""

    def __post_init__(self) -> None:
        if self.align_epochs < 0 or self.rate < 0 or self.batch_size < 1:
            raise ConfigError("fedas: align_epochs and rate must not be negative, batch_size at least 1")

    def costs(self, sizes: Sizes) -> list[Cost]:
        (row,) = super().costs(sizes)
        return [replace(row, up=row.up + sizes.participants * (self.weights == "fisher"))]

    def check(self, task: Task) -> None:
        if self.align_epochs and not self.uploaded(task.parameters, task):
            raise ConfigError(
                "fedas: no layer of this model is shared, so there is nothing to align: choose other "
                "personal_layers or another model"
            )

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return names

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        personal = set(super().keeps(names, task))
        return tuple(name for name in names if name not in personal)

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        assert own is not None, "a client keeps its model"
        notes = {PROTOTYPES: data.class_moments(own)[0]} if self.align_epochs else {}
        return Start(self.personal(got, own, data), notes=notes)

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        if when == "training":
            return (Pass(),)
        if when == "test" or not self.align_epochs:
            return ()
        head, size = task.select(self.personal_layers), self.batch_size
        return (Pass(fixed=head, epochs=self.align_epochs, rate=self.rate, batch_size=size, stage="align"),)

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        if stage != "align":
            return super().loss(network, params, batch, start, stage)
        distance = apart(network(params, batch.inputs).features, batch.labels, start.notes[PROTOTYPES])
        return Loss(distance, torch.zeros_like(distance))

    def extras_spec(self, model: Params, task: Task) -> dict[str, ExtraSpec]:
        return {"fisher": ExtraSpec(torch.float32, (), low=0.0)} if self.weights == "fisher" else {}

    def finish(self, params: Params, start: Start, data: ClientData) -> Params:
        if self.weights != "fisher":
            return {}
        return {"fisher": data.squared_gradients(params, self.batch_size).sum().float()}

    def aggregate(self, state: Any, up: Uploads) -> Any:
        weights = mixing.sample_weights(up.counts)
        if self.weights == "equal":
            weights = torch.full_like(weights, 1 / len(weights))
        elif self.weights == "fisher" and up.extras["fisher"].sum() > 0:
            weights = mixing.sample_weights(up.extras["fisher"])
        return OneModel(model=mixing.average(up.models, weights))


def apart(features: Tensor, labels: Tensor, prototypes: Tensor) -> Tensor:
    """The sum over the classes of a batch of the mean squared distance, per coordinate, of their samples from c_j."""
    alike = (labels[:, None] == labels).sum(1)  # samples of the same class: each class counts once
    return ((features - prototypes[labels]).square().mean(1) / alike).sum()
