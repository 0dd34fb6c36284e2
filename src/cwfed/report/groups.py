"""Groups of finished runs, for reports: the runs of a method, and the methods that can be ranked together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cwfed import algorithms
from cwfed.core.metrics import BUILT_IN, words
from cwfed.core.types import Phase
from cwfed.report.finished import MEANINGS, PHASE_WORDS, Horizontal, RunRecord, Vertical, is_of_reported_phase
from cwfed.report.style import Look, looks, looks_of_settings
from cwfed.runs.summary import aggregate, spread

APART = "Runs that differ in more than algorithm and seed are experiments of their own, and are not ranked together:"


class Series(NamedTuple):
    """A curve over the rounds: the mean over seeds, and for several seeds their standard deviation."""

    x: list[float]
    y: list[float]
    std: list[float] | None = None


@dataclass(frozen=True)
class Method:
    """One row of a comparison: the runs of an algorithm with its settings, one a seed."""

    label: str
    records: list[RunRecord]
    row: dict[str, Any] = field(init=False)
    """Mean and standard deviation of what the table shows."""

    def __post_init__(self) -> None:
        summaries = [replace(record.summary, notes=record.notes) for record in self.records]
        more = {
            "distance": spread([record.rounds[-1].distance for record in self.records]),
            "n": len(self.records),
            "one_split": self.first.config.data.split_seed >= 0,
        }
        object.__setattr__(self, "row", aggregate(self.label, summaries) | more)

    @property
    def first(self) -> RunRecord:
        """The run of the smallest seed."""
        return self.records[0]

    @property
    def phase(self) -> Phase:
        """The phase on which it is reported."""
        return self.first.started.phase

    @property
    def unlike(self) -> tuple[int, str]:
        """A key that sorts variants of an algorithm by how far their settings are from the defaults, the same everywhere."""
        given = self.first.config.algorithm
        usual = (
            {} if algorithms.foreign(given) else algorithms.describe(algorithms.build(given["name"]), given["name"])
        )
        return sum(usual.get(key) != value for key, value in given.items()), json.dumps(given, sort_keys=True)

    def series(self, y: Vertical | str, x: Horizontal = "round") -> Series:
        """A curve, averaged over the seeds."""
        curves = [dict(record.points(y)) for record in self.records]
        shared = sorted(set(curves[0]).intersection(*curves[1:]))
        values = np.array([[curve[i] for i in shared] for curve in curves])
        along = [record.along(x) for record in self.records]
        ends = np.array([[a[i] for i in shared] for a in along])
        std = values.std(0, ddof=1).tolist() if len(curves) > 1 else None
        return Series(ends.mean(0).tolist(), values.mean(0).tolist(), std)


@dataclass(frozen=True)
class Group:
    """Runs that can be ranked together: they differ in algorithm and seed, but in nothing else that results depend on."""

    title: str
    methods: list[Method]
    is_ranked_by_test: bool = True
    """As papers do; otherwise the methods are in their order already, such as that of held-out data in a sweep."""
    of_settings: bool = False
    """All are settings of one method, as in a sweep: colours tell these apart."""

    def ranked(self) -> list[int]:
        """The methods, the best first."""
        numbers = range(len(self.methods))
        if not self.is_ranked_by_test:
            return list(numbers)
        return sorted(numbers, key=lambda i: -self.methods[i].row["reported"]["mean"])

    @property
    def records(self) -> list[RunRecord]:
        """One run of each method: of the split that most methods have, so that clients can be compared."""
        shared = self.aligned()
        return [shared.get(i, method.first) for i, method in enumerate(self.methods)]

    def aligned(self) -> dict[int, RunRecord]:
        """By method, its run on the split that most methods share, so that client 3 is the same client for all."""
        by_split: dict[str, dict[int, RunRecord]] = {}
        for i, method in enumerate(self.methods):
            for record in method.records:
                by_split.setdefault(record.split, {}).setdefault(i, record)
        return max(by_split.values(), key=len)

    @cached_property
    def looks(self) -> list[Look]:
        """How each method is drawn; the plainest of several variants of an algorithm has the algorithm's own look."""
        if self.of_settings:
            return looks_of_settings(len(self.methods))
        order = sorted(range(len(self.methods)), key=lambda i: self.methods[i].unlike)
        drawn = looks([self.methods[i].first.started.algorithm for i in order])
        return [drawn[order.index(i)] for i in range(len(order))]

    @property
    def mixes_phases(self) -> bool:
        """Whether some methods are reported as received and others after local training."""
        return len({method.phase for method in self.methods}) > 1

    def labels(self, y: Vertical | str = "accuracy") -> list[str]:
        """The name of each method in a picture of `y`, with its phase unless that is the same for all."""
        says_phase = self.mixes_phases and is_of_reported_phase(y)
        return [f"{m.label}, {m.phase}" if says_phase else m.label for m in self.methods]

    def meaning(self, y: Vertical | str) -> str:
        """The label of the axis of `y`, with the phase if it is the same for all methods."""
        known = {str(name): meaning for name, meaning in MEANINGS.items()}
        says_phase = not self.mixes_phases and is_of_reported_phase(y)
        return known.get(y, words(y)) + (f" ({PHASE_WORDS[self.methods[0].phase]})" if says_phase else "")

    def own_metrics(self) -> list[str]:
        """The user's own metrics that any of the methods has."""
        names = dict.fromkeys(name for method in self.methods for name in method.row["metrics"])
        return [name for name in names if name not in BUILT_IN]

    def differing(self) -> dict[str, list[Any]]:
        """Settings in which the methods differ, one value a method."""
        tables = [method.first.settings() for method in self.methods]
        keys = dict.fromkeys(key for table in tables for key in table)
        found = {key: [table.get(key) for table in tables] for key in keys}
        return {key: values for key, values in found.items() if any(value != values[0] for value in values)}

    def baselines(self) -> list[int]:
        """The methods that others are compared with, client by client: Local and FedAvg, or the first one."""
        shared = self.aligned()
        wanted = [i for name in ("local", "fedavg") for i in shared if shared[i].started.algorithm == name]
        return wanted or [min(shared)]

    def gains(self, base: int, other: int) -> dict[int, float]:
        """By client, how many points its accuracy is higher under `other` than under `base`; empty if they cannot be compared."""
        shared = self.aligned()
        if base == other or base not in shared or other not in shared:
            return {}
        there, here = shared[base].client_accuracies(), shared[other].client_accuracies()
        return {client: 100 * (here[client] - there[client]) for client in there if client in here}


def group(records: Sequence[RunRecord]) -> list[Group]:
    """Runs by experiment: all settings but the algorithm's are the same, and so are data and network."""
    experiments: dict[str, list[RunRecord]] = {}
    for record in records:
        # not by the number of parameters: an algorithm may change the head
        same = [_surroundings(record), record.manifest["data"]["digest"], record.manifest["model"]["name"]]
        experiments.setdefault(json.dumps(same, sort_keys=True), []).append(record)
    members = list(experiments.values())
    titles = _titles([same[0] for same in members])
    return [Group(title, methods(same)) for title, same in zip(titles, members, strict=True)]


def methods(records: Sequence[RunRecord]) -> list[Method]:
    """Runs grouped by algorithm and settings, with labels that differ; the seeds of one method are together."""
    by_settings: dict[str, list[RunRecord]] = {}
    for record in records:
        same = [record.settings(), record.manifest["data"]["digest"]]
        by_settings.setdefault(json.dumps(same, sort_keys=True), []).append(record)
    runs = [sorted(same, key=lambda r: r.started.seed) for same in by_settings.values()]
    return [Method(label, same) for label, same in zip(labels(runs), runs, strict=True)]


def _surroundings(record: RunRecord) -> dict[str, Any]:
    """All settings but those of the method: its hyper-parameters, and the code of the user's own."""
    settings = record.settings()
    return {key: value for key, value in settings.items() if key != "code" and not key.startswith("algorithm.")}


def describe(record: RunRecord) -> str:
    """The experiment in a few words."""
    data, model = record.config.data, record.manifest["model"]["name"]
    if "federation" in record.manifest:  # what its nodes hold is theirs
        shape = "x".join(map(str, record.manifest["data"].get("shape", [])))
        return f"federation, samples of {shape or 'unknown shape'}, {record.started.classes} classes, {model}"
    some = f", {data.samples:,} samples" if data.samples else ""
    return f"{record.started.dataset}{some}, {data.how_split()}, {record.started.clients:,} clients, {model}"


def _titles(firsts: Sequence[RunRecord]) -> list[str]:
    """The experiments in a few words, with the settings that tell them from others of the same words."""
    plain = [describe(record) for record in firsts]
    titles = []
    for title, record in zip(plain, firsts, strict=True):
        namesakes = [other for other, words in zip(firsts, plain, strict=True) if words == title]
        told = _told_apart(_surroundings(record), [_surroundings(other) for other in namesakes])
        if len({other.manifest["data"]["digest"] for other in namesakes}) > 1:
            told = [*told, f"data {record.manifest['data']['digest'][:8]}"]
        titles.append("; ".join([title, *([", ".join(told)] if told else [])]))
    return titles


def labels(runs: Sequence[Sequence[RunRecord]]) -> list[str]:
    """The algorithm's name, with the settings that tell it from others of the same name."""
    labels = []
    for same in runs:
        name = same[0].started.algorithm
        namesakes = [other[0].settings() for other in runs if other[0].started.algorithm == name]
        told = _told_apart(same[0].settings(), namesakes)
        labels.append(f"{name} ({', '.join(told)})" if told else name)
    return labels


def _told_apart(mine: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[str]:
    """The settings in which others differ from these, as key=value."""
    keys = [key for key, value in mine.items() if any(other.get(key) != value for other in others)]
    return [f"{key.removeprefix('algorithm.')}={_plain(mine[key])}" for key in keys]


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
