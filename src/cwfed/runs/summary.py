"""A run in numbers, computed from its events alone: always both phases and all three pickings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from cwfed.core import metrics
from cwfed.core.errors import RunError
from cwfed.core.events import Event, Newcomers, Note, PhaseResult, Round, Spent, Started
from cwfed.core.types import PHASES, Phase

PICKINGS = ("best", "validated", "last")

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class ByPicking(Generic[T]):
    """A value for each way of picking a round; None if no round can be picked that way."""

    best: T | None
    """On test data, as papers report it."""
    validated: T | None
    """On held-out data."""
    last: T | None

    def map(self, change: Callable[[T], U | None]) -> ByPicking[U]:
        """The same with a function applied to each value."""
        found = (None if one is None else change(one) for one in (self.best, self.validated, self.last))
        return ByPicking(*found)


@dataclass(frozen=True)
class ByPhase(Generic[T]):
    """A value for the models as clients receive them, and one for those after local training."""

    received: T
    trained: T

    def of(self, phase: Phase) -> T:
        """The value of a phase."""
        return self.trained if phase == "trained" else self.received


@dataclass(frozen=True)
class Reported:
    """The number that stands for the run: of the algorithm's own phase, in the round that is best on test data."""

    accuracy: float
    phase: Phase
    picking: str
    round: int
    metric: str = ""
    """The metric by which rounds are picked, if it is not the accuracy."""
    value: float | None = field(default=None, metadata={"together_with": "metric"})
    """The value of that metric."""


@dataclass(frozen=True)
class OverClients:
    """A metric over the clients, which all count the same; None if no client has a value."""

    mean: float | None
    std: float | None
    worst_decile: float | None
    """The mean of the worst tenth of the clients."""
    values: dict[str, float]
    """By client."""


@dataclass(frozen=True)
class PerClient:
    """The accuracy over the clients in the reported round; all clients count the same."""

    mean: float
    std: float
    worst_decile: float
    """The mean of the worst tenth of the clients."""
    accuracies: dict[str, float]
    """By client."""
    metrics: dict[str, OverClients] = field(default_factory=dict)
    """The other metrics by name."""


@dataclass(frozen=True)
class ClassResults:
    """The classes in the reported round, one value per class; None for a class without test samples."""

    samples: list[int]
    recall: list[float | None]
    precision: list[float | None]
    f1: list[float | None]
    loss: list[float | None]


@dataclass(frozen=True)
class NewcomerResults:
    """Accuracy of the models of clients that never took part."""

    clients: list[int]
    histogram: float
    uniform: float


@dataclass(frozen=True)
class Traffic:
    """Bytes sent to clients and by clients."""

    down: int
    up: int


@dataclass(frozen=True)
class PrivacySpent:
    """What differential privacy has cost."""

    epsilon: float | None
    """The largest of any client, which is the guarantee; None: without bound."""
    delta: float
    histogram_epsilon: float
    per_client: dict[str, float | None]
    known: str = ""
    """Where the noise comes from and who kept the account."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Summary(Mapping[str, Any]):
    """A run in numbers: `summary.accuracy.received.best`, or as in summary.json, `summary["accuracy"]["received"]["best"]`.

    Examples:
        >>> import cwfed
        >>> result = cwfed.run({"train": {"rounds": 2, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> result.summary["accuracy"]["received"]["best"] == result.accuracy.received.best
        True
    """

    privacy: PrivacySpent | None = None
    algorithm: str
    dataset: str
    seed: int
    rounds: int
    """The number of rounds that were carried out."""
    clients: int
    parameters: int
    """Numbers in one model."""
    accuracy: ByPhase[ByPicking[float]]
    picked_rounds: ByPhase[ByPicking[int]]
    reported: Reported
    per_client: PerClient
    metrics: ByPhase[dict[str, ByPicking[float]]] | None = None
    """All metrics besides the accuracy; None for runs of early versions."""
    per_class: ClassResults | None = None
    newcomers: NewcomerResults | None
    correlation: float | None
    """Of p~ (read from the uploaded output layers) with the true class distributions, in the last round."""
    loss: float | None
    """Mean training cross-entropy in the last round."""
    traffic: Traffic
    seconds: dict[str, float]
    """By step, and in `total`."""
    notes: list[str]
    """What a reader of the numbers should know."""
    stopped: str = ""
    """Why the run ended before all rounds were done."""
    refused: dict[str, int] = field(default_factory=dict)
    """Updates of each client that the guard left out."""
    skipped: list[int] = field(default_factory=list)
    """Rounds that were skipped because too few updates were good."""
    peak_memory_bytes: int | None = None
    """For a run with a folder."""
    peak_memory_of: str = ""
    """Whether that is the peak of the run ("run") or of the process that made it ("process")."""

    def to_dict(self) -> dict[str, Any]:
        """The contents of summary.json, as a copy that may be changed."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(Summary) if _is_said(f, self)}

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @cached_property
    def _table(self) -> dict[str, Any]:
        return self.to_dict()

    def __getitem__(self, key: str) -> Any:
        return self._table[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def _plain(value: Any) -> Any:
    """A record as dicts, lists, numbers and texts; fields that may be empty are left out if they are."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if _is_said(f, value)}
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _is_said(f: Field[Any], record: Any) -> bool:
    may_be_empty = f.default is not MISSING or f.default_factory is not MISSING
    return not may_be_empty or getattr(record, f.metadata.get("together_with", f.name)) not in (None, "", [], {})


Picks = ByPicking[tuple[int, PhaseResult]]


def pick(rounds: Sequence[Round], phase: Phase, started: Started) -> Picks:
    """The round and result that each picking chooses, by the metric of the run; the first one where several are equal."""
    name, worth = started.pick, started.worth
    results = [(r.round, getattr(r, phase)) for r in rounds if getattr(r, phase) is not None]
    validated = [found for found in results if found[1].held_out(name) is not None]
    return ByPicking(
        best=max(results, key=lambda found: worth(found[1].value(name)), default=None),
        validated=max(validated, key=lambda found: worth(found[1].held_out(name)), default=None),
        last=results[-1] if results else None,
    )


def summarise(events: Sequence[Event]) -> Summary:
    """The summary of a run from its events."""
    started = next((e for e in events if isinstance(e, Started)), None)
    rounds = [e for e in events if isinstance(e, Round)]
    if started is None or not rounds:
        raise RunError("the run has no finished round to summarise")
    picks = ByPhase(*(pick(rounds, phase, started) for phase in PHASES))
    best = picks.of(started.phase).best
    if best is None:
        raise RunError("the run has no evaluated round to summarise")
    joined = next((e for e in reversed(events) if isinstance(e, Newcomers)), None)
    seconds: Counter[str] = Counter()
    for r in rounds:
        seconds.update(r.seconds)
    refused = Counter(client for r in rounds for client in r.refused)
    spent = rounds[-1].spent
    return Summary(
        privacy=_spent(spent) if spent else None,
        algorithm=started.algorithm,
        dataset=started.dataset,
        seed=started.seed,
        rounds=rounds[-1].round,
        clients=started.clients,
        parameters=started.parameters,
        accuracy=ByPhase(*(picks.of(phase).map(lambda found: found[1].accuracy) for phase in PHASES)),
        picked_rounds=ByPhase(*(picks.of(phase).map(lambda found: found[0]) for phase in PHASES)),
        reported=_reported(best, started),
        per_client=per_client(best[1], started),
        metrics=_metrics(picks, best[1]),
        per_class=_per_class(best[1]),
        newcomers=NewcomerResults(joined.clients, joined.histogram, joined.uniform) if joined else None,
        correlation=rounds[-1].correlation,
        loss=rounds[-1].loss,
        traffic=Traffic(sum(r.down for r in rounds), sum(r.up for r in rounds)),
        seconds={**{k: round(v, 3) for k, v in seconds.items()}, "total": round(sum(seconds.values()), 3)},
        notes=[e.message for e in events if isinstance(e, Note)],
        stopped=rounds[-1].stopped,
        refused=dict(refused),
        skipped=[r.round for r in rounds if r.refused and r.skipped],
    )


def _reported(best: tuple[int, PhaseResult], started: Started) -> Reported:
    number, result = best
    reported = Reported(result.accuracy, started.phase, "best", number)
    if started.pick == "accuracy":
        return reported
    return replace(reported, metric=started.pick, value=result.value(started.pick))


def _metrics(picks: ByPhase[Picks], best: PhaseResult) -> ByPhase[dict[str, ByPicking[float]]] | None:
    """All metrics beside the accuracy; runs of earlier versions have none."""
    if not best.metrics:
        return None

    def of(found: Picks) -> dict[str, ByPicking[float]]:
        def value(metric: str) -> ByPicking[float]:
            return found.map(lambda one: one[1].value(metric))

        return {metric: value(metric) for metric in (*best.metrics, "loss")}

    return ByPhase(of(picks.received), of(picks.trained))


def _per_class(best: PhaseResult) -> ClassResults | None:
    """Each class in the round that is reported."""
    if not best.classes:
        return None
    table = best.classes.table()
    kinds = (metrics.recall, metrics.precision, metrics.f1, metrics.class_loss)
    found = ([metrics.finite(value) for value in kind(table).tolist()] for kind in kinds)
    return ClassResults(best.classes.samples, *found)


def _spent(spent: Spent) -> PrivacySpent:
    known = [e for e in spent.epsilon.values() if e is not None]
    largest = max(known) if len(known) == len(spent.epsilon) and known else None
    return PrivacySpent(largest, spent.delta, spent.histogram, spent.epsilon, spent.known)


def per_client(result: PhaseResult, started: Started) -> PerClient:
    """Accuracy and metrics over the clients, which all count the same."""
    clients = started.evaluated if result.clients is None else result.clients
    samples = started.test_samples if result.samples is None else result.samples
    pairs = [(c, r / n) for c, r, n in zip(clients, result.right, samples, strict=True) if n]
    others = {
        name: {str(c): value for c, value in zip(clients, values, strict=True) if value is not None}
        for name, values in result.client_metrics.items()
    }
    return PerClient(
        *_over_clients([accuracy for _, accuracy in pairs]),
        {str(client): accuracy for client, accuracy in pairs},
        {name: _of_clients(name, values, started) for name, values in others.items()},
    )


def _of_clients(name: str, values: dict[str, float], started: Started) -> OverClients:
    if not values:
        return OverClients(None, None, None, values)
    return OverClients(*_over_clients(list(values.values()), name in started.lower_is_better), values)


def _over_clients(values: Sequence[float], lower_is_better: bool = False) -> tuple[float, float, float]:
    """Mean, standard deviation, mean of the worst tenth."""
    ordered = np.sort(values)
    count = max(1, len(values) // 10)
    tenth = ordered[-count:] if lower_is_better else ordered[:count]
    return float(ordered.mean()), float(ordered.std()), float(tenth.mean())


def aggregate(label: str, summaries: Sequence[Summary]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of everything the table shows, and all notes of the runs."""
    reported = summaries[0].reported
    others = [s.metrics.of(reported.phase) if s.metrics else {} for s in summaries]
    return {
        "label": label,
        "algorithm": summaries[0].algorithm,
        "accuracy": {
            phase: {name: spread([getattr(s.accuracy.of(phase), name) for s in summaries]) for name in PICKINGS}
            for phase in PHASES
        },
        "reported": {
            "phase": reported.phase,
            "picking": reported.picking,
            **spread([s.reported.accuracy for s in summaries]),
        },
        "pick": reported.metric or "accuracy",
        "metrics": {  # of the reported phase, in its best round
            name: spread([found[name].best for found in others])
            for name in others[0]
            if all(name in found for found in others)
        },
        "worst_decile": spread([s.per_client.worst_decile for s in summaries]),
        "correlation": spread([s.correlation for s in summaries]),
        "traffic": spread([s.traffic.down + s.traffic.up for s in summaries]),
        "seconds": spread([s.seconds["total"] for s in summaries]),
        "memory": spread([s.peak_memory_bytes for s in summaries]),
        "notes": list(dict.fromkeys(note for s in summaries for note in s.notes)),
    }


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample standard deviation; the latter needs two values."""
    known = [v for v in values if v is not None]
    if len(known) < len(values) or not known:
        return {"mean": None, "std": None}
    return {"mean": float(np.mean(known)), "std": float(np.std(known, ddof=1)) if len(known) > 1 else None}
