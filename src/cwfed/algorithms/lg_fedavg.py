"""LG-FedAvg. Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020.

FedPer's mirror image: the top layers are common, the lower ones never leave their client.

    h = sum_i p_i h_i over the participants           the shared layers (by default the output layer) are FedAvg's
    client i trains (phi_i, h) at once, sends h_i up and keeps phi_i

Limiting cases: all layers shared is FedAvg, none shared is Local, both bit for bit; with the same split the uploads of LG-FedAvg and FedPer have no
tensor in common and make up the model. Everybody's phi_i starts as the common initial body (the authors start from a model that FedAvg has trained).

Public versions: one shares the *first* layers, which is FedPer with nearly everything personal; the authors' builds the models that it reports from
each client's best on its *test* data, and averages without sample weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.types import Task


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """Common top layers over a body that never leaves its client."""

    name: ClassVar[str] = "lg-fedavg"
    travels: ClassVar[str] = "the shared top layers both ways"
    work: ClassVar[str] = "as FedAvg; every client keeps its lower layers"

    shared_layers: str | int | tuple[str, ...] = "output"
    """The layers that travel: "output", "all", "none", the last n, or layer names. The authors: the last 3 of an MLP, 2 of a CNN."""

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return task.tensors(self.shared_layers, names)

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        travels = set(self.uploaded(names, task))
        return tuple(name for name in names if name not in travels)
