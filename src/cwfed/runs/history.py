"""A run as tables, computed from its events alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from cwfed.core.errors import CwfedError, RunError, did_you_mean
from cwfed.core.events import Event, PhaseResult, Round, Started
from cwfed.core.types import PHASES, Phase

if TYPE_CHECKING:
    import pandas

SHOWN = 10
"""The number of rows that are printed of a table: the first and the last ones."""


class _Row(Protocol):
    @property
    def metrics(self) -> dict[str, float | None]: ...


@dataclass(frozen=True)
class HistoryRow:
    """A round in one phase. Accuracy and the other metrics are None in a round that was not evaluated.

    Examples:
        >>> import cwfed
        >>> result = cwfed.run({"train": {"rounds": 2, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> [(row.round, row.phase) for row in result.history]
        [(1, 'received'), (1, 'trained'), (2, 'received'), (2, 'trained')]
    """

    round: int
    phase: Phase
    """received: the models as the server hands them out; trained: after local training."""
    accuracy: float | None
    """Right test answers / test samples, over all evaluated clients."""
    validation: float | None
    """The same on held-out training data; None where nothing is held out."""
    loss: float | None
    """Mean test cross-entropy."""
    train_loss: float | None
    """Mean training cross-entropy of the participants; the same in both phases, as all that follows but the metrics."""
    penalty: float | None
    correlation: float | None
    """Of p~, read from the uploaded output layers, with the true class distributions."""
    participants: int
    dropped: int
    refused: int
    down: int
    """Bytes sent to clients."""
    up: int
    seconds: float
    metrics: dict[str, float | None] = field(default_factory=dict)
    """All other metrics by name; a column each in `to_dicts` and `to_pandas`."""


@dataclass(frozen=True)
class ClientRow:
    """A client in one phase of a round.

    Examples:
        >>> import cwfed
        >>> result = cwfed.run({"train": {"rounds": 2, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> [row.client for row in result.client_table().where(phase="received")]
        [0, 1, 2, 3, 4]
    """

    round: int
    phase: Phase
    client: int
    name: str
    """The client's name if the data have names, else its number."""
    samples: int
    """Test samples."""
    accuracy: float | None
    """None for a client without test samples."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """All other metrics by name; a column each in `to_dicts` and `to_pandas`."""


R = TypeVar("R", bound=_Row)


class Table(Sequence[R], Generic[R]):
    """Typed rows: `table[0].accuracy`, `table.column("accuracy")`, `table.to_pandas()`.

    Examples:
        >>> import cwfed
        >>> result = cwfed.run({"train": {"rounds": 2, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> len(result.history), len(result.history.where(phase="received").column("accuracy"))
        (4, 2)
    """

    def __init__(self, rows: Sequence[R]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, at: int) -> R: ...
    @overload
    def __getitem__(self, at: slice) -> Table[R]: ...
    def __getitem__(self, at: int | slice) -> R | Table[R]:
        return Table(self._rows[at]) if isinstance(at, slice) else self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[R]:
        return iter(self._rows)

    def where(self, **values: Any) -> Table[R]:
        """The rows that have these values, such as `history.where(phase="received")`."""
        for name in values:
            self._check(name)
        flat = zip(self._rows, self.to_dicts(), strict=True)
        return Table([row for row, table in flat if all(table[name] == value for name, value in values.items())])

    def column(self, name: str) -> list[Any]:
        """The values of one column, such as `history.where(phase="received").column("accuracy")`."""
        self._check(name)
        return [table[name] for table in self.to_dicts()]

    def columns(self) -> list[str]:
        """The names of the columns: the fields of a row, and the metrics."""
        metrics = dict.fromkeys(name for row in self._rows for name in row.metrics)
        own = [f.name for f in fields(self._rows[0])] if self._rows else []  # type: ignore[arg-type]
        return [*(name for name in own if name != "metrics"), *metrics]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Every row as a dict, with a column for each metric."""
        names = self.columns()
        return [{name: getattr(row, name, row.metrics.get(name)) for name in names} for row in self._rows]

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a pandas.DataFrame; CwfedError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise CwfedError(
                "to_pandas() needs pandas: pip install pandas; to_dicts() gives the rows without it"
            ) from None
        return pandas.DataFrame(self.to_dicts(), columns=self.columns())

    def __repr__(self) -> str:
        lines = [self.columns(), *([_shown(value) for value in table.values()] for table in self.to_dicts())]
        left_out = len(lines) - 1 - SHOWN
        if left_out > 0:
            lines = [*lines[: 1 + SHOWN // 2], ["..."] * len(lines[0]), *lines[-SHOWN // 2 :]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        )
        return f"{text}\n{len(self)} rows"

    def _check(self, name: str) -> None:
        if self._rows and name not in self.columns():
            raise CwfedError(f"the table has no column {name!r}: {did_you_mean(name, self.columns())}")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def history(events: Sequence[Event]) -> Table[HistoryRow]:
    """One row per round and phase."""
    return Table([_row(event, phase) for event in events if isinstance(event, Round) for phase in PHASES])


def _row(event: Round, phase: Phase) -> HistoryRow:
    result: PhaseResult | None = getattr(event, phase)
    held_out = {f"validation_{name}": value for name, value in result.validation_metrics.items()} if result else {}
    return HistoryRow(
        round=event.round,
        phase=phase,
        accuracy=result.accuracy if result else None,
        validation=result.validation if result else None,
        loss=result.loss if result else None,
        train_loss=event.loss,
        penalty=event.penalty,
        correlation=event.correlation,
        participants=len(event.participants),
        dropped=len(event.dropped),
        refused=len(event.refused),
        down=event.down,
        up=event.up,
        seconds=sum(event.seconds.values()),
        metrics={**result.metrics, **held_out} if result else {},
    )


def clients(events: Sequence[Event], number: int) -> Table[ClientRow]:
    """One row per evaluated client and phase of a round."""
    started = next(event for event in events if isinstance(event, Started))
    evaluated = {e.round: e for e in events if isinstance(e, Round) and (e.received or e.trained)}
    if number not in evaluated:
        known = ", ".join(map(str, list(evaluated)[-20:]))
        raise RunError(f"round {number} was not evaluated; the last evaluated ones: {known}")
    rows: list[ClientRow] = []
    for phase in PHASES:
        result: PhaseResult | None = getattr(evaluated[number], phase)
        if result is None:
            continue
        whose = started.evaluated if result.clients is None else result.clients
        samples = started.test_samples if result.samples is None else result.samples
        for i, (client, right, n) in enumerate(zip(whose, result.right, samples, strict=True)):
            name = started.names[i] if started.names and result.clients is None else str(client)
            others = {metric: values[i] for metric, values in result.client_metrics.items()}
            rows.append(ClientRow(number, phase, client, name, n, right / n if n else None, others))
    return Table(rows)
