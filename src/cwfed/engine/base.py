"""What an engine is, and the messages that it is told and tells: plain data, so that a worker may be anywhere.

An engine has two verbs. `visit` lets participants begin, train and finish; `measure` says how good given models are
on given clients' data. `Loop` is the obvious oracle; every other engine must give what it gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from torch import nn

from cwfed.algorithms import FedAvg
from cwfed.core.metrics import LOSS, PER_CLASS, RIGHT, Own, OwnSums, Sums, Tally
from cwfed.core.types import Download, Params, Task
from cwfed.data import Federation, Samples
from cwfed.engine.worker import LocalTraining


def overrides(algorithm: FedAvg, *methods: str) -> bool:
    """Whether an algorithm does one of these in a way of its own; where it does not, there are shorter ways."""
    return any(getattr(type(algorithm), name) is not getattr(FedAvg, name) for name in methods)


def sends_each(algorithm: FedAvg) -> bool:
    """Whether `send_each` says what `send` does: not where a class has overridden `send` alone."""
    classes = type(algorithm).__mro__
    send, send_each = (next(i for i, c in enumerate(classes) if name in vars(c)) for name in ("send", "send_each"))
    return send_each <= send


@dataclass(frozen=True)
class Visit:
    """A client, as the server sends it off: plain data, so that the worker may be anywhere."""

    client: int
    own: Params | None = None
    """The tensors that the client kept, and what it remembers beside them."""
    statistics: Params = field(default_factory=dict)
    """Running statistics that stay with the client."""
    optimizer: Params = field(default_factory=dict)
    """What it kept of its optimiser's state."""
    got: Download | None = None
    """What it was sent. None: the worker makes it from the server's state, so that personal models exist only while their
    client needs them."""


@dataclass(frozen=True)
class Visited:
    """A participant after its visit; its model is in its row of the stack."""

    client: int
    loss: float
    """Mean loss of its batches; not a finite number where the training diverged."""
    penalty: float
    downloaded: int
    head: tuple[Params, ...]
    """The output layers of the models that it was sent."""
    extras: Params
    statistics: Params
    remembered: Params
    """What it keeps beside the tensors of its model and its running statistics."""


class Trained(NamedTuple):
    """What is known of a participant's training beside its model."""

    loss: float
    penalty: float
    statistics: Params
    optimizer: Params


@dataclass(frozen=True)
class Candidate:
    """A model to be measured on a client's data."""

    visit: Visit
    model: Params | None = None
    """None: the model that the client has on receipt."""
    is_tuned: bool = False
    """Of a model on receipt: whether the client makes its passes before the test first."""


@dataclass(frozen=True)
class Score:
    """How good a model is on one client: what was counted on its test and on its held-out data."""

    test: Tally
    validation: Tally

    @property
    def test_right(self) -> int:
        """Right answers on the test data."""
        return self.test.right

    @property
    def test_loss(self) -> float:
        """Summed cross-entropy on the test data."""
        return self.test.loss

    @property
    def validation_right(self) -> int:
        """Right answers on the held-out data."""
        return self.validation.right


def scores_of(tables: Sums, losses: Sequence[float], own: OwnSums) -> list[Score]:
    """Scores from the tables of each client's test and held-out data, in turn, and its summed test loss."""
    rights = tables[:, RIGHT].sum(1).astype(int).tolist()
    held_out = tables[1::2, LOSS].sum(1).tolist()
    found = []
    for i, (loss, held_out_loss) in enumerate(zip(losses, held_out, strict=True)):
        test, validation = ({PER_CLASS: tables[at]} | own.of(at) for at in (2 * i, 2 * i + 1))
        found.append(Score(Tally(rights[2 * i], loss, test), Tally(rights[2 * i + 1], held_out_loss, validation)))
    return found


@dataclass(frozen=True)
class Job:
    """What an engine is to carry out: all that it must know of an experiment."""

    algorithm: FedAvg
    model: nn.Module
    task: Task
    federation: Federation
    samples: Samples
    how: LocalTraining
    metrics: Sequence[Own] = ()
    """What the user wants measured beside what always is."""


@dataclass(frozen=True)
class Call:
    """What the workers of an engine are asked together: plain data, told to each worker once. The items follow one by one."""

    task: Literal["try_training", "rehearse", "make", "visit", "personal", "measure"]
    """A method of `ClientTasks`."""
    round: int = 0
    state: Any = None
    """The server's state, from which a worker makes what a client is sent."""
    out: Params = field(default_factory=dict)
    """Of a visit: the stack for the trained models, item i has a row. A worker elsewhere fills a stack of its own and sends
    the row."""


class Engine(Protocol):
    """Trains and measures clients. How it spreads the work changes no bit of what comes out, but for `vmap`'s rounding."""

    name: str
    workers: int
    why: str
    """Why "auto" chose this engine."""
    compile: bool
    """Whether its step is compiled, which rounds in another way."""
    note: str
    """What the user should know of how it works here."""
    job: Job

    def try_training(self) -> None:
        """One batch forward and backward: a ConfigError for what does not work in this precision."""

    def rehearse(self, state: Any, visit: Visit) -> None:
        """Before the first round: a ConfigError for passes and objectives that cannot be, and for what differential privacy
        cannot be had for."""

    def download(self, state: Any, visit: Visit) -> Download:
        """What a client is sent."""

    def visit(self, round_: int, state: Any, visits: Sequence[Visit], out: Params) -> list[Visited]:
        """Train the participants; the model of the i-th goes into row i of `out`."""

    def measure(self, candidates: Sequence[Candidate], round_: int = 0, state: Any = None) -> list[Score]:
        """The score of each candidate, whose model is that of a client before a round where it does not bring one."""

    def personal(self, round_: int, state: Any, visits: Sequence[Visit], is_tuned: bool = False) -> list[Params]:
        """The models that clients have on receipt, as they would begin a round with them."""

    def close(self) -> None:
        """Stop whoever is still training, and let go of the networks and the data."""
