"""Events: what happened in a run, one JSON line each. Reports are made from these alone."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from cwfed.core import files, metrics
from cwfed.core.errors import RunError, plain
from cwfed.core.types import Phase


@dataclass(frozen=True)
class PerClass:
    """The answers of all evaluated clients to the test samples of each class."""

    samples: list[int]
    right: list[int]
    predicted: list[int]
    """How often each class was predicted."""
    loss: list[float | None]
    """Summed cross-entropy of each class; None where it is not finite."""

    @classmethod
    def of(cls, table: metrics.Sums) -> PerClass:
        """From a table of sums."""
        samples, right, predicted = table[:3].astype(int).tolist()
        return cls(samples, right, predicted, [metrics.finite(value) for value in table[metrics.LOSS].tolist()])

    def table(self) -> metrics.Sums:
        """As a table of sums."""
        loss = [np.nan if value is None else value for value in self.loss]
        return np.array([self.samples, self.right, self.predicted, loss], dtype=float)


@dataclass(frozen=True)
class PhaseResult:
    """How good the clients' models are in one phase, over the evaluated clients.

    Examples:
        >>> import cwfed
        >>> result = cwfed.run({"train": {"rounds": 2, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> last = result.events[-1]  # a cwfed.Round
        >>> last.received.accuracy == sum(last.received.right) / sum(result.events[0].test_samples)
        True
    """

    accuracy: float
    """Right test answers / test samples, over all evaluated clients."""
    validation: float | None
    """The same on the held-out part of the training data; None where nothing is held out."""
    loss: float | None
    """Mean test cross-entropy; None if it is not finite."""
    right: list[int]
    """Right test answers of each evaluated client; `Started.test_samples` has their numbers of test samples."""
    clients: list[int] | None = None
    """In a real federation: the clients that were measured, which may differ from those in `Started`."""
    samples: list[int] | None = None
    """The number of test samples of each of these clients."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """All other metrics (`metrics.py`) over all test samples. Runs of earlier versions have neither these nor the fields below."""
    validation_metrics: dict[str, float | None] = field(default_factory=dict)
    """All but the accuracy on the held-out data."""
    client_metrics: dict[str, list[float | None]] = field(default_factory=dict)
    """All but the accuracy of each evaluated client; None for one without test samples."""
    classes: PerClass | None = None
    """None also if a client of a real federation does not send it."""

    def value(self, metric: str) -> float | None:
        """A metric over all test samples."""
        return {"accuracy": self.accuracy, "loss": self.loss}.get(metric, self.metrics.get(metric))

    def held_out(self, metric: str) -> float | None:
        """The same on the held-out data."""
        return self.validation if metric == "accuracy" else self.validation_metrics.get(metric)


@dataclass(frozen=True)
class Started:
    """A run begins; written once.

    Examples:
        >>> import cwfed
        >>> result = cwfed.run({"train": {"rounds": 2, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> result.events[0].clients, result.events[0].classes
        (5, 10)
    """

    kind: ClassVar[str] = "started"
    algorithm: str
    dataset: str
    seed: int
    rounds: int
    clients: int
    classes: int
    parameters: int
    """Numbers in one model."""
    phase: Phase
    """The phase on which this algorithm is reported."""
    evaluated: list[int]
    """The clients that are evaluated, in the order of every list of results."""
    test_samples: list[int]
    engine: str = ""
    """Which engine trains the clients, and why."""
    pick: str = "accuracy"
    """The metric that rounds are picked by."""
    lower_is_better: list[str] = field(default_factory=lambda: ["loss"])
    """The metrics for which a lower value is better."""
    names: list[str] = field(default_factory=list)
    """The names of the evaluated clients, if the data or the split have names."""

    def worth(self, value: float | None) -> float:
        """The number by which rounds are picked; more is better."""
        return metrics.worth(value, self.pick in self.lower_is_better)


@dataclass(frozen=True)
class Portrait:
    """The output layers of the models at the end of a run, for heat maps."""

    clients: list[int]
    """The clients of the rows: the evaluated ones, at most `portrait.PORTRAYED`."""
    distribution: list[list[float]]
    """p, their true class distributions (clients x classes, training data)."""
    received: list[list[float]]
    """Norms of the output layer's rows (clients x classes) of the models as the server hands them out next."""
    trained: list[list[float] | None]
    """The same of the models after the last local training; None for a client that did not take part and keeps no model."""
    mixture: list[list[float] | None] | None
    """The shares of the last uploads, in the order of `participants`, in the output layer that each client is handed out. A row is None if
    the layer is not a mixture of them; all is None if there are too few numbers or too many uploads to find out."""
    classes: list[list[float]] | None
    """Row norms of the class models (class models x classes), for algorithms that have them."""
    sent: list[list[float] | None] | None = None
    """Row norms as uploaded in the last round, which p~ is read from; None for a client that sat out. All is None where no output layer
    is uploaded, and in runs of earlier versions."""


@dataclass(frozen=True)
class Leak:
    """How close one estimate of the participants' class distributions, made from their uploads, is to the true ones."""

    error: list[float]
    """For each participant the total variation |p - p~|_1 / 2: the share of its samples that the estimate puts in a wrong class."""
    rank: list[float | None]
    """Spearman's rank correlation of p~ with p; None if either is constant."""
    auc: list[float | None]
    """The chance that a class it lacks has a smaller p~ than one it has; None for a client that has all."""
    samples: float
    """Samples in a wrong class, n_i * error: mean over the participants (n_i is sent anyway)."""
    found: float | None
    """Share of the absent classes, of all participants, that the rule p~_j < 1 / 2K calls absent."""
    mistaken: float | None
    """Share of the classes they have that the same rule calls absent."""


@dataclass(frozen=True)
class Spent:
    """What differential privacy has cost the clients so far."""

    delta: float
    epsilon: dict[str, float | None]
    """By client that took part; None: without bound."""
    histogram: float
    """The part of each epsilon that was spent on the class histogram."""
    known: str = ""
    """Where the noise comes from and who kept the account; empty in events of earlier versions."""


@dataclass(frozen=True)
class Round:
    """A round is over.

    Examples:
        >>> import cwfed
        >>> for event in cwfed.rounds({"train": {"rounds": 2, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}}):
        ...     print(event.round, event.participants, event.received is not None)
        1 [0, 1, 2, 3, 4] True
        2 [0, 1, 2, 3, 4] True
    """

    kind: ClassVar[str] = "round"
    round: int
    participants: list[int]
    """The clients whose models were aggregated."""
    dropped: list[int]
    """The clients that got a model and did not answer."""
    loss: float | None
    """Mean training cross-entropy of the participants; None in a round without participants."""
    penalty: float | None
    client_loss: list[float]
    """Training cross-entropy of each participant."""
    correlation: float | None
    """Pearson correlation of p~ (read from the uploaded output layers) with the true p."""
    distance: float | None
    """Mean ||p - p~||_2 of the participants."""
    received: PhaseResult | None
    """Phase results, in evaluated rounds: `received` is of the models as the server hands them out next."""
    trained: PhaseResult | None
    down: int
    """Bytes sent to clients."""
    up: int
    """Bytes sent by clients."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By step."""
    portrait: Portrait | None = None
    """In the last round."""
    refused: dict[str, str] = field(default_factory=dict)
    """By client, why its update was left out of the round; such a client is not among the participants."""
    skipped: str = ""
    """Why nothing was aggregated: too few updates were good. Then good ones were left out too."""
    scaled_back: list[int] = field(default_factory=list)
    """The clients whose update was longer than `guard.norm_bound` allows."""
    down_to_measure: int = 0
    """In a real federation: bytes sent to clients only to measure the models there."""
    leaks: dict[str, Leak] = field(default_factory=dict)
    """By estimate (`leak.py`), what the uploads reveal about the participants' classes; in the order of `participants`."""
    spent: Spent | None = None
    """In the last round, with differential privacy."""
    at: str = ""
    """In a real federation: when the round was over, in UTC."""
    stopped: str = ""
    """In the last round: why the run ends before `train.rounds` (`run.patience`)."""


@dataclass(frozen=True)
class Newcomers:
    """At the end: how good the models are for clients that never took part.

    Examples:
        >>> import cwfed
        >>> def listener(event):  # for cwfed.run({"data": {"newcomers": 5}}, on_event=listener)
        ...     if isinstance(event, cwfed.Newcomers):
        ...         print(event.histogram, event.uniform)
    """

    kind: ClassVar[str] = "newcomers"
    clients: list[int]
    histogram: float
    """Test accuracy with the model made from the client's label histogram."""
    uniform: float
    """The same if the client tells nothing about itself."""


@dataclass(frozen=True)
class Note:
    """Something that a reader of the results should know: a resume, another kind of CPU, a damaged checkpoint.

    Examples:
        >>> import cwfed
        >>> def listener(event):  # for cwfed.run(on_event=listener)
        ...     if isinstance(event, cwfed.Note):
        ...         print(event.message)
    """

    kind: ClassVar[str] = "note"
    message: str
    at: str = ""
    """In a real federation: the time in UTC."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", plain(self.message, MOST_NOTE))


MOST_NOTE = 4000
"""The most characters of a note, which may list many classes."""

Event = Started | Round | Newcomers | Note


def to_json(event: Event) -> str:
    """An event as one line of JSON."""
    fields = dataclasses.asdict(event)
    for key in (
        "at",
        "names",
    ):  # left out when empty: a simulation has no times, and few data have clients with names
        if not fields.get(key, "-"):
            del fields[key]
    return json.dumps({"event": event.kind, **fields}, allow_nan=False)


_KINDS: dict[str, type] = {cls.kind: cls for cls in (Started, Round, Newcomers, Note)}
_READERS: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(cls) for kind, cls in _KINDS.items()}


def from_json(line: str) -> Event:
    """The event in a line; ValueError for anything else."""
    try:
        fields: dict[str, Any] = json.loads(line, parse_constant=_refuse, parse_float=_finite)
        kind = fields.pop("event")
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an event of this version: {error}") from None
    if not isinstance(kind, str) or kind not in _READERS:
        raise ValueError(f"unknown event {kind!r}")
    if unknown := fields.keys() - {f.name for f in dataclasses.fields(_KINDS[kind])}:
        raise ValueError(f"not an event of this version: it has {min(unknown)!r}")
    try:
        event: Event = _READERS[kind].validate_json(
            line, strict=True
        )  # strict JSON: a JSON object may become a dataclass
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"not an event of this version: {where}: {first['msg']}") from None
    return event


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if isfinite(value) else _refuse(digits)


def read(path: Path) -> list[Event]:
    """All events of a run. An unfinished last line, left by a killed process, is skipped."""
    try:
        return parse(files.read_bytes(path), path)
    except OSError as error:
        raise RunError(f"the events of the run cannot be read from {path}: {error}") from None


def parse(content: bytes, path: Path) -> list[Event]:
    """The events in the content of the file `path`."""
    found: list[Event] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            found.append(from_json(line.decode()))
        except ValueError as error:
            raise RunError(f"{path}, line {number}, is damaged: {error}") from None
    return found
