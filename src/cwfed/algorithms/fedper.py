"""FedPer. Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

    phi = sum_i p_i phi_i over the participants       the body (all but the personal layers) is FedAvg's
    client i trains (phi, h_i) at once, sends phi_i up and keeps h_i

Limiting cases: no personal layer is FedAvg, all personal is Local, both bit for bit. Everybody's h_i starts as the common
initial head; a client that never trains keeps that one. A client that sits out meets a newer body with an old head.

Beside it FedRep (Collins et al., Exploiting Shared Representations, 2021): the same parts, trained one after the other. First h_i for
`head_epochs` with the received phi fixed, then phi for `train.epochs` with the new h_i fixed, each on batches of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Pass, Start, Task, When


@dataclass(frozen=True)
class FedPer(FedAvg):
    """A common body, and layers that never leave their client."""

    name: ClassVar[str] = "fedper"
    travels: ClassVar[str] = "the body both ways: 2 models less the personal layers"
    work: ClassVar[str] = "as FedAvg; every client keeps its personal layers"

    personal_layers: str | int | tuple[str, ...] = "output"
    """The layers that stay with the client: "output", "all", "none", the last n, or layer names."""

    def keeps(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        return task.tensors(self.personal_layers, names)

    def uploaded(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        kept = set(FedPer.keeps(self, names, task))  # its own: a plug-in may keep a copy of what travels
        return tuple(name for name in names if name not in kept)


@dataclass(frozen=True)
class FedRep(FedPer):
    """FedPer whose clients fit their head to the received body first, then the body to the head."""

    name: ClassVar[str] = "fedrep"
    work: ClassVar[str] = "client: head_epochs more passes, through the output layer only; keeps its personal layers"

    head_epochs: int = 1
    """Epochs on the personal layers before `train.epochs` on the body; the authors take 10."""

    def __post_init__(self) -> None:
        if self.head_epochs < 0:
            raise ConfigError(f"fedrep: head_epochs must not be negative, it is {self.head_epochs}")

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        if when != "training":
            return ()
        head = task.select(self.personal_layers)
        body = tuple(name for name in task.parameters if name not in head)
        return tuple(
            one
            for one in (Pass(trained=head, epochs=self.head_epochs), Pass(trained=body))
            if one.trained and one.epochs != 0
        )
