"""What `cwfed.run` returns: the summary of a run, its history, its clients and their models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from cwfed.core.errors import RunError
from cwfed.core.events import Event
from cwfed.runs import history
from cwfed.runs.history import ClientRow, HistoryRow, Table
from cwfed.runs.predict import PersonalModel
from cwfed.runs.saved_models import Pick
from cwfed.runs.summary import Summary

ModelOf = Callable[[int | None, Sequence[float] | None, Pick | None], PersonalModel]
"""Makes or loads the model of a client, or of a newcomer with a label histogram, of the round that is picked."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result(Summary):
    """A run's summary (`result.accuracy.received.best`) with its `history`, its `client_table()` and `models`.

    It is a `cwfed.Summary`: `result["accuracy"]`, `result.to_dict()` and `result.to_json()` have the contents of summary.json. A run without a
    folder keeps its events, and what its models are made from, in memory for as long as the result exists.

    Examples:
        >>> import cwfed
        >>> result = cwfed.run({"train": {"rounds": 2, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> result.algorithm, result.rounds, result.models[3].class_names[:2]
        ('cwfedavg', 2, ('0', '1'))
    """

    folder: Path | None = None
    """The run's folder; None if it has none."""
    happened: Callable[[], Sequence[Event]]
    model_of: ModelOf

    @classmethod
    def of(
        cls, summary: Summary, happened: Callable[[], Sequence[Event]], model_of: ModelOf, folder: Path | None = None
    ) -> Result:
        """A result from a summary and what belongs to it."""
        known = {f.name: getattr(summary, f.name) for f in fields(Summary)}
        return cls(**known, happened=happened, model_of=model_of, folder=folder)

    @property
    def summary(self) -> Summary:
        """The numbers alone, which can be sent to another process."""
        return Summary(**{f.name: getattr(self, f.name) for f in fields(Summary)})

    @cached_property
    def events(self) -> Sequence[Event]:
        """All events, as in `events.jsonl`."""
        return self.happened()

    @cached_property
    def history(self) -> Table[HistoryRow]:
        """One row per round and phase: `result.history.to_pandas()`, `result.history[-1].accuracy`."""
        return history.history(self.events)

    def client_table(self, round_: int | None = None) -> Table[ClientRow]:
        """One row per evaluated client and phase of an evaluated round. Default: the round that is reported.

        Errors:
            CwfedError, one sentence: the round was not evaluated.
        """
        return history.clients(self.events, self.reported.round if round_ is None else round_)

    def model(
        self, client: int | None = None, *, class_counts: Sequence[float] | None = None, pick: Pick | None = None
    ) -> PersonalModel:
        """The personal model of a client, or the one of a newcomer.

        Arguments:
            client: its number. Default: a newcomer, who never took part.
            class_counts: the newcomer's label histogram. Default: it tells nothing about itself.
            pick: the round: "validated", the best on held-out data (the default where there is one), or "last".

        Returns:
            The model: `predict(inputs)`, `probabilities(inputs)`, `network`.

        Errors:
            CwfedError, one sentence: no such client, models that were not kept.
        """
        if client is not None and class_counts is not None:
            raise RunError("give a client or a label histogram, not both")
        return self.model_of(client, class_counts, pick)

    @property
    def models(self) -> Mapping[int, PersonalModel]:
        """The personal models by client, each made or loaded on demand: `result.models[3]`."""
        return _Models(self.clients, self.model)

    def __repr__(self) -> str:
        where = f" in {self.folder}" if self.folder else ""
        best = ", ".join(
            f"{phase} {accuracy:.2%}"
            for phase, accuracy in (
                ("received", self.accuracy.received.best),
                ("trained", self.accuracy.trained.best),
            )
            if accuracy is not None
        )
        return f"<Result of {self.algorithm} on {self.dataset}, {self.rounds} rounds, seed {self.seed}{where}: best {best}>"


class _Models(Mapping[int, PersonalModel]):
    def __init__(self, clients: int, model: Callable[[int], PersonalModel]) -> None:
        self._clients, self._model = clients, model

    def __getitem__(self, client: int) -> PersonalModel:
        if client not in range(self._clients):
            raise KeyError(client)
        return self._model(client)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._clients))

    def __len__(self) -> int:
        return self._clients
