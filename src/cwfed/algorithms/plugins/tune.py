"""The output layer tuned on receipt.

    (W, b) <- (W, b) - lr grad (CE + the method's penalty)      tune_epochs epochs (or tune_steps batches), body fixed at the received one

before anything else: phase `received` is measured after it and training starts from it. So it uses the client's labels between receipt and test, as FedALA and FedBABU do
and FedAvg does not: compare with `fedavg+tune`.

Limiting case: tune_epochs = 0 is what is beneath it, bit for bit. A newcomer has no training here: it gets what the method beneath gives it.

The server is sent what it was sent before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError
from cwfed.core.types import Pass, Start, Task, When


@dataclass(frozen=True)
class Tune(FedAvg):
    """Clients tune the output layer to their data on receipt."""

    plugin: ClassVar[str] = "tune"
    work: ClassVar[str] = "client: tune_epochs passes through the output layer on receipt, also before every test"
    not_over: ClassVar[Mapping[str, str]] = {
        "ala": "both change the received output layer on receipt, and the mixture is made when all passes are over",
        "settle": "it tunes the output layer on receipt, and this one makes that layer anew when all passes are over",
        "loss": "it tunes the one network that is trained, and this one has a loss of its own, of more than that",
        "adapt": "it tunes the network's output layer, and this one has changed its network",
        "fedamp": "its clients start from their own model, not from what they receive",
    }

    tune_epochs: int = 1
    """S, epochs on the output layer on receipt; 0 is none."""
    tune_steps: int = 0
    """At most so many batches of them; 0 is all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune_epochs < 0 or self.tune_steps < 0:
            raise ConfigError("tune: tune_epochs and tune_steps must not be negative")

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        beneath = super().passes(when, task, start)
        if when != "receipt" or not self.tune_epochs:
            return beneath
        return (*beneath, Pass(task.select("output"), self.tune_epochs, self.tune_steps or None))
