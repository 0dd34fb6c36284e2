"""What an engine is, and the messages between it and the rounds: plain data, so that a worker may be another process.

An engine does two things: `visit` lets participants begin, train and finish; `measure` says how good models are on clients' data.
`Loop` is the plainest one and the reference: every other engine must give the same results.
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
    """Whether an algorithm overrides one of these methods of `FedAvg`; if not, engines may take a shorter way."""
    return any(getattr(type(algorithm), name) is not getattr(FedAvg, name) for name in methods)


def sends_each(algorithm: FedAvg) -> bool:
    """Whether `send_each` says what `send` does: not where a class has overridden `send` alone."""
    classes = type(algorithm).__mro__
    send, send_each = (next(i for i, c in enumerate(classes) if name in vars(c)) for name in ("send", "send_each"))
    return send_each <= send


@dataclass(frozen=True)
class Visit:
    """A client's part in a round, as a worker is told it."""

    client: int
    own: Params | None = None
    """The tensors that the client kept since its last round, and what its algorithm remembers besides."""
    statistics: Params = field(default_factory=dict)
    """Running statistics that stay with the client."""
    optimizer: Params = field(default_factory=dict)
    """Its optimiser's state, if it keeps one between rounds."""
    got: Download | None = None
    """What it was sent. None: the worker makes it from the server's state, so that a personal model exists only while its client is
    visited."""


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
    """What it keeps besides its model's tensors and running statistics."""


class Trained(NamedTuple):
    """The outcome of a participant's training, besides its model."""

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
    """For a model on receipt: whether the client first makes its passes before the test."""


@dataclass(frozen=True)
class Score:
    """How good a model is on one client: the counts on its test data and on its held-out data."""

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
    """Scores from tables of sums (test, held-out, test, held-out, ... client by client) and each client's summed test loss."""
    rights = tables[:, RIGHT].sum(1).astype(int).tolist()
    held_out = tables[1::2, LOSS].sum(1).tolist()
    found = []
    for i, (loss, held_out_loss) in enumerate(zip(losses, held_out, strict=True)):
        test, validation = ({PER_CLASS: tables[at]} | own.of(at) for at in (2 * i, 2 * i + 1))
        found.append(Score(Tally(rights[2 * i], loss, test), Tally(rights[2 * i + 1], held_out_loss, validation)))
    return found


@dataclass(frozen=True)
class Job:
    """Everything that an engine must know about an experiment."""

    algorithm: FedAvg
    model: nn.Module
    task: Task
    federation: Federation
    samples: Samples
    how: LocalTraining
    metrics: Sequence[Own] = ()
    """The user's own metrics."""


@dataclass(frozen=True)
class Call:
    """A task for the workers of an engine, sent to each worker once; its items (such as visits) follow one by one."""

    task: Literal["try_training", "rehearse", "make", "visit", "personal", "measure"]
    """A method of `ClientTasks`."""
    round: int = 0
    state: Any = None
    """The server's state, from which a worker makes what a client is sent."""
    out: Params = field(default_factory=dict)
    """For visits: the stack of trained models, one row per item. A worker process has a stack of one row, and sends that row."""


class Engine(Protocol):
    """Trains and measures clients. Results are the same to the bit however the work is spread; only `vmap` rounds differently."""

    name: str
    workers: int
    why: str
    """Why "auto" chose this engine."""
    compile: bool
    """Whether its step is compiled, which changes rounding."""
    note: str
    """What the user should know about how it works on this machine; "" if nothing."""
    job: Job

    def try_training(self) -> None:
        """One batch forward and backward; ConfigError if the model cannot train in this precision."""

    def rehearse(self, state: Any, visit: Visit) -> None:
        """Before the first round: ConfigError for impossible passes and losses, and for what differential privacy does not cover."""

    def download(self, state: Any, visit: Visit) -> Download:
        """What a client is sent."""

    def visit(self, round_: int, state: Any, visits: Sequence[Visit], out: Params) -> list[Visited]:
        """Train the participants; the model of the i-th goes into row i of `out`."""

    def measure(self, candidates: Sequence[Candidate], round_: int = 0, state: Any = None) -> list[Score]:
        """The score of each candidate. A candidate without a model has the one that its client receives before this round."""

    def personal(self, round_: int, state: Any, visits: Sequence[Visit], is_tuned: bool = False) -> list[Params]:
        """The models that clients have on receipt, before this round."""

    def close(self) -> None:
        """Stop training that is under way, and free the networks and the data."""
