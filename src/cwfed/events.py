"""What happened, one JSON line each. Everything that a report shows is read from these."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from cwfed.errors import RunError
from cwfed.types import Phase


@dataclass(frozen=True)
class PhaseResult:
    """How good the clients' models are in one phase, over the evaluated clients."""

    accuracy: float
    """Right test answers / test samples, over all evaluated clients."""
    validation: float | None
    """The same on the held-out part of the training data; None where nothing is held out."""
    loss: float | None
    """Mean test cross-entropy; None where it is beyond all bounds."""
    right: list[int]
    """Right test answers of each evaluated client; `Started` has how many samples each has."""


@dataclass(frozen=True)
class Started:
    """A run begins; written once."""

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


@dataclass(frozen=True)
class Portrait:
    """The models at the end of a run, seen through their output layers: what heat maps show."""

    clients: list[int]
    """Whom the rows stand for: the evaluated clients, at most `simulation.PORTRAYED` of them."""
    distribution: list[list[float]]
    """p, their true class distributions (clients x classes, training data)."""
    received: list[list[float]]
    """Norms of the output layer's rows (clients x classes) of the models as the server hands them out next."""
    trained: list[list[float] | None]
    """The same after the last local training; None for a client that sat out and keeps no model."""
    mixture: list[list[float] | None] | None
    """Shares of the last uploads, in the order of `participants`, in each client's handed-out output layer; a row is
    None where the layer is no mixture of them, all is None where there are too few numbers or too many uploads to say."""
    classes: list[list[float]] | None
    """Row norms of the class models (class models x classes), for algorithms that have them."""


@dataclass(frozen=True)
class Round:
    """A round is over."""

    kind: ClassVar[str] = "round"
    round: int
    participants: list[int]
    """Whose model was aggregated."""
    dropped: list[int]
    """Who got a model and never answered."""
    loss: float | None
    """Mean training cross-entropy of the participants; None in a round without any."""
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
    """By client, why its update was left out of the round."""


@dataclass(frozen=True)
class Newcomers:
    """At the end: how good the models are that clients get which never took part."""

    kind: ClassVar[str] = "newcomers"
    clients: list[int]
    histogram: float
    """Test accuracy with the model made from the client's label histogram."""
    uniform: float
    """The same where the client says nothing about itself."""


@dataclass(frozen=True)
class Note:
    """Something a reader of the results should know: a resume, another kind of CPU, a damaged checkpoint."""

    kind: ClassVar[str] = "note"
    message: str


Event = Started | Round | Newcomers | Note


def to_json(event: Event) -> str:
    """One line."""
    return json.dumps({"event": event.kind, **dataclasses.asdict(event)}, allow_nan=False)


_KINDS: dict[str, type] = {cls.kind: cls for cls in (Started, Round, Newcomers, Note)}
_READERS: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(cls) for kind, cls in _KINDS.items()}


def from_json(line: str) -> Event:
    """The event of a line; raises ValueError for anything else."""
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
        event: Event = _READERS[kind].validate_json(line, strict=True)  # what is JSON may make a dataclass
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"not an event of this version: {where}: {first['msg']}") from None
    return event


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if isfinite(value) else _refuse(digits)


def read(path: Path) -> list[Event]:
    """All events of a run. An unfinished last line, left by a kill, is passed over."""
    try:
        return parse(path.read_bytes(), path)
    except OSError as error:
        raise RunError(f"the events of the run cannot be read from {path}: {error}") from None


def parse(content: bytes, path: Path) -> list[Event]:
    """The events in the content of this file."""
    found: list[Event] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            found.append(from_json(line.decode()))
        except ValueError as error:
            raise RunError(f"{path}, line {number}, is damaged: {error}") from None
    return found
