"""FedBABU. Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022.

The body is trained and averaged under a head that stays as it was drawn; a client makes the model its own only when it needs it:

    rounds:  phi_i = E epochs of cross-entropy from the received phi, h fixed at the common initial head;   phi = sum_i p_i phi_i
    test:    (phi, h) as received, tuned for tau epochs on the client's training data, measured, and thrown away

Phase `trained` is after that tuning, for every client, also one that never took part; `received` is before it. The head does not travel: it is
a function of the seed, and every client has it.

Limiting cases: tau = 0 is FedRep without head epochs, bit for bit; with `personal_layers = "none"` (nothing is fixed) the rounds are FedAvg's and tau = 1 is
`fedavg-ft`. Tuning leaves nothing behind: rounds are the same whether and how often they are measured.

Public versions: one tunes once, after the last round, and from the bodies that the clients had just *trained* instead of the averaged one, so that participants
are tuned for longer than others, and picks its best round without any tuning; another tunes the participants only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from cwfed.algorithms.fedper import FedPer
from cwfed.core.errors import ConfigError
from cwfed.core.types import Pass, Phase, Start, Task, When


@dataclass(frozen=True)
class FedBABU(FedPer):
    """A body that is learnt under a fixed random head; clients fine-tune before they use it."""

    name: ClassVar[str] = "fedbabu"
    phase: ClassVar[Phase] = "trained"
    travels: ClassVar[str] = "the body both ways: 2 models less the head, which is a function of the seed"
    work: ClassVar[str] = "client: no gradient of the head; before each test, tune_epochs over its training data"

    tune_epochs: int = 5
    """tau, epochs of tuning before a test."""
    tuned: Literal["all", "head", "body"] = "all"
    """What is tuned."""

    def __post_init__(self) -> None:
        if self.tune_epochs < 0:
            raise ConfigError(f"fedbabu: tune_epochs must not be negative, it is {self.tune_epochs}")

    def check(self, task: Task) -> None:
        head = task.select(self.personal_layers)
        if set(head) >= set(task.parameters):
            raise ConfigError(
                f"fedbabu: personal_layers = {self.personal_layers!r} leaves no body to train: the head is fixed in the rounds"
            )
        if self.tuned == "head" and self.tune_epochs and not head:
            raise ConfigError(
                f'fedbabu: tuned = "head", but with personal_layers = {self.personal_layers!r} there is no head'
            )

    def passes(self, when: When, task: Task, start: Start) -> tuple[Pass, ...]:
        head = task.select(self.personal_layers)
        if when == "training":
            return (Pass(fixed=head),)
        if when == "receipt":
            return ()
        tuning = {"all": Pass(), "head": Pass(trained=head), "body": Pass(fixed=head)}[self.tuned]
        return (replace(tuning, epochs=self.tune_epochs),)
