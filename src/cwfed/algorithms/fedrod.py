"""FedRoD. Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, 2022.

One body, two linear heads: a generic one G, which travels with the body, and a personal one P_i, which stays. A client predicts with G(f) + P_i(f). On
every batch, from one forward pass (f: features, sg: without gradient, n_ij: the client's training samples of class j):

    body, G :  -log( n_iy^gamma e^{g_y} / sum_k n_ik^gamma e^{g_k} ),  g = G(f)      the balanced softmax
    P_i     :  cross-entropy of sg(g) + P_i(sg(f))                                  nothing of it reaches body or G

    server  :  FedAvg on body and G

Limiting cases: gamma = 0 is FedAvg in body and G, bit for bit; so is, but for rounding, a client with equally many samples of every class. P_i = 0 makes
the personal answer the generic one. A class that a client lacks gives its row of G a gradient of exactly 0.

Public versions: one counts classes over batches that are shuffled and of which the last is dropped: a class in that batch has log 0 on its own label, an
infinite loss. Another lets the personal loss train the body, and predicts with P_i alone. Here n_ij is the client's whole training data.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cwfed.algorithms.base import ClientData
from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Download, Loss, Network, Params, Start, Task
from cwfed.models import Attached

PERSONAL = "personal_head"
"""What P is called in the output layer, whose own weight and bias are G's."""
PRIOR = "log_prior"
"""gamma log n_ij, a note of the client's to itself."""


def add_personal(layer: nn.Module, inputs: tuple[Tensor, ...], generic: Tensor) -> Tensor:
    """What the output layer says, a hook: G(f) + P(f) where the network is used, G(f) in training, where the loss adds P."""
    if layer.training:
        return generic
    return generic + F.linear(inputs[0], **dict(layer.get_submodule(PERSONAL).named_parameters()))


def personal_of(tensors: Params) -> Params:
    """P's weight and bias by these names, of a model's tensors."""
    return {name.rpartition(".")[2]: w for name, w in tensors.items() if f".{PERSONAL}." in name}


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """FedAvg of body and generic head under a balanced loss; a personal head beside it for the client's own classes."""

    name: ClassVar[str] = "fedrod"
    work: ClassVar[str] = "client: one more output layer a batch, which it keeps; server: as FedAvg"

    gamma: float = 1.0
    """Exponent of the class counts in the balanced softmax; 0 is the plain cross-entropy."""
    personal_start: Literal["copy", "zero"] = "copy"
    """P_i before a client's first round: a copy of the initial G (then the first personal logits are doubled), or zero."""

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ConfigError(f"fedrod: gamma must not be negative, it is {self.gamma}")

    def adapt(self, model: nn.Module, output: str) -> nn.Module:
        layer = model.get_submodule(output)
        personal = copy.deepcopy(layer)
        if self.personal_start == "zero":
            for w in personal.parameters():
                nn.init.zeros_(w)
        layer.add_module(PERSONAL, Attached(personal))
        layer.register_forward_hook(add_personal)
        return model

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return tuple(name for name in names if name.startswith(f"{task.output}.{PERSONAL}."))

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        kept = set(self.keeps(names, task))
        return tuple(name for name in names if name not in kept)

    def begin(self, got: Download, own: Params | None, data: ClientData) -> Start:
        counts = data.class_counts
        prior = self.gamma * counts.log() if self.gamma else torch.zeros_like(counts)  # 0 log 0 would be no number
        return replace(super().begin(got, own, data), notes={PRIOR: prior})

    def loss(self, network: Network, params: Params, batch: Batch, start: Start, stage: str) -> Loss:
        if self.gamma and batch.label_smoothing:
            raise ConfigError(
                "fedrod: a balanced softmax has no probability for classes that a client lacks, which label smoothing would "
                "ask for: set train.label_smoothing = 0, or algorithm.gamma = 0"
            )
        said = network(params, batch.inputs)
        personal = F.linear(said.features.detach(), **personal_of(params))
        balanced = batch.cross_entropy(said.logits + start.notes[PRIOR])
        return Loss(balanced, batch.cross_entropy(said.logits.detach() + personal))
