"""Head first, then body: the order of FedRep in methods that upload both.

    1. (W, b)  head_epochs epochs, body fixed at the received one: CE + the method's penalty
    2. phi     train.epochs epochs, head fixed: the same loss, of which penalties on the head alone, such as WDR, have no gradient here

All heads of a round are then fitted to the same body, so that a mean of them is one of classifiers of one feature space. Each pass has batches of its own.

Limiting cases: head_epochs = 0 never trains the head: FedRep without head epochs, or FedBABU before its fine-tuning. cwFedAvg whose clients have a class of their own each (empirical,
wdr = 0) hands everybody its own head back: FedRep bit for bit. Over FedPer it is FedRep.

The server is sent what it was sent before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Pass, Start, Task, When


@dataclass(frozen=True)
class HeadFirst(FedAvg):
    """Clients fit the output layer to the received body first, then the body to the output layer."""

    plugin: ClassVar[str] = "head_first"
    work: ClassVar[str] = "client: head_epochs more passes, through the output layer only"
    not_over: ClassVar[Mapping[str, str]] = {
        "passes": "it splits FedAvg's one pass in two, and this one has passes of its own",
        "loss": "it trains one network in two passes, and this one has a loss of its own, of more than that",
        "adapt": "it trains one network in two passes, and this one has changed its network",
    }

    head_epochs: int = 1
    """Epochs on the output layer before `train.epochs` on the rest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_epochs < 0:
            raise ConfigError(f"head_first: head_epochs must not be negative, it is {self.head_epochs}")

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        beneath = super().passes(when, task, start)
        if when != "training":
            return beneath
        head = task.select("output")
        body = tuple(name for name in task.parameters if name not in head)
        first = [replace(one, trained=head, epochs=self.head_epochs) for one in beneath if self.head_epochs]
        return (*first, *(replace(one, trained=body) for one in beneath))
