"""Finished runs, read back for reports: only whole ones, and only what their folders say."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cwfed import __version__
from cwfed.core.errors import CwfedError, RunError
from cwfed.core.events import PhaseResult, Portrait, Round, Started
from cwfed.core.files import sha256
from cwfed.core.metrics import BUILT_IN, is_share
from cwfed.core.types import Phase
from cwfed.data import classes_held_by_nobody
from cwfed.federation.config import FREE_TO_CHANGE, Config
from cwfed.federation.settings import flat
from cwfed.runs.folder import RunFolder
from cwfed.runs.summary import Summary, aggregate

Horizontal = Literal["round", "bytes", "seconds"]
Vertical = Literal[
    "accuracy",
    "received",
    "trained",
    "balanced_accuracy",
    "macro_f1",
    "received loss",
    "trained loss",
    "training loss",
    "correlation",
    "distance",
]
MEANINGS: dict[Vertical, str] = {
    "accuracy": "test accuracy, %",
    "received": "test accuracy on receipt, %",
    "trained": "test accuracy after local training, %",
    "balanced_accuracy": "balanced accuracy, %",
    "macro_f1": "macro F1, %",
    "received loss": "test loss on receipt",
    "trained loss": "test loss after local training",
    "training loss": "training loss",
    "correlation": "correlation of p~ with p",
    "distance": "||p - p~||",
}
UNITS: dict[Horizontal, str] = {"round": "round", "bytes": "bytes sent", "seconds": "seconds"}
APART = "Runs that differ in more than algorithm and seed are experiments of their own, and are not ranked together:"
RUN_FILES = ("config.toml", "events.jsonl")
"""Either makes a folder a run's."""


def release(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version: what decides which runs are read, and whose results are the same."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.|$)", version, re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


THIS, FIRST_READ = release(__version__) or (0, 0), (0, 1)
"""Runs from the second to the first are read; those of other releases say so in a note."""


class Series(NamedTuple):
    """A curve over the rounds: the mean over seeds, and their standard deviation where there are several."""

    x: list[float]
    y: list[float]
    std: list[float] | None = None


@dataclass(frozen=True)
class RunRecord:
    """What a report knows of a run."""

    label: str
    path: Path
    config: Config
    started: Started
    rounds: list[Round]
    summary: Summary
    manifest: dict[str, Any]

    @property
    def portrait(self) -> Portrait | None:
        """The models at the end; runs of earlier versions have none."""
        return self.rounds[-1].portrait

    @property
    def histogram(self) -> NDArray[np.int64]:
        """Samples of each client by class; empty where only the clients know it."""
        return np.asarray(self.manifest["split"]["histogram"])

    @cached_property
    def split(self) -> str:
        """Equal for runs whose clients hold the same classes and are tested on as many samples.

        Not the manifest's hash: that differs for algorithms that hold out a part of the training data.
        """
        return json.dumps(
            [self.config.split_seed, self.started.evaluated, self.started.test_samples, self.histogram.tolist()]
        )

    @property
    def notes(self) -> list[str]:
        """What a reader of its numbers should know; runs of earlier versions did not say which classes nobody holds."""
        found = list(self.summary.notes)
        if self.histogram.size:
            about, chosen = self.manifest["data"], self.config.data
            held = int(self.histogram.sum())
            samples = chosen.samples or int(about.get("samples", held))
            found += classes_held_by_nobody(self.histogram, about["classes"], samples, chosen.room)
        if release(made := self.manifest["versions"]["cwfed"]) != THIS:
            found.append(
                f"made by cwfed {made}, this is {__version__}: where a method was corrected, results differ (CHANGELOG.md)"
            )
        return list(dict.fromkeys(found))

    def points(self, y: Vertical | str) -> list[tuple[int, float]]:
        """Positions in `rounds` and values; rounds without one are left out."""
        found = ((i, self._value(round_, y)) for i, round_ in enumerate(self.rounds))
        return [(i, value) for i, value in found if value is not None]

    def _value(self, round_: Round, y: Vertical | str) -> float | None:
        if y == "training loss":
            return round_.loss
        if y in ("correlation", "distance"):
            read: float | None = getattr(round_, y)
            return read
        phase: Phase = (
            "trained" if y.startswith("trained") else "received" if y.startswith("received") else self.started.phase
        )
        result: PhaseResult | None = getattr(round_, phase)
        if result is None:
            return None
        name = "loss" if y.endswith("loss") else "accuracy" if y == phase else y
        value = result.value(name)
        return 100 * value if value is not None and is_share(name) else value

    def along(self, x: Horizontal) -> list[float]:
        """Where each round ends: its number, or the bytes or seconds up to there."""
        if x == "round":
            return [float(r.round) for r in self.rounds]
        if x == "bytes":
            return list(accumulate(float(r.down + r.up) for r in self.rounds))
        return list(accumulate(sum(r.seconds.values()) for r in self.rounds))

    def client_accuracies(self) -> dict[int, float]:
        """Test accuracy of each client in the best round, of the reported phase."""
        return {int(client): value for client, value in self.summary.per_client.accuracies.items()}

    def settings(self) -> dict[str, Any]:
        """All settings that decide the results, flat; the seed is not among them."""
        table = flat(self.config.model_dump())
        code = self.manifest.get("code") or {}  # the user's own: another one is another experiment
        mark = {"code": sha256(json.dumps(code, sort_keys=True).encode())[:8]} if code else {}
        return {key: value for key, value in table.items() if key not in FREE_TO_CHANGE | {"run.seed"}} | mark


def read_run(path: str | Path, label: str = "") -> RunRecord:
    """A finished run whose files belong together; RunError for anything else.

    The summary is computed anew from the events and must be the one that was written.
    """
    folder = RunFolder(path)
    summary, happened = folder.result()
    manifest = _read_manifest(folder)
    config = folder.config_of_result()
    started = next(event for event in happened if isinstance(event, Started))
    rounds = [event for event in happened if isinstance(event, Round)]
    _check_together(folder, config, manifest, started, rounds)
    return RunRecord(
        label or f"{started.algorithm}, seed {started.seed}", folder.path, config, started, rounds, summary, manifest
    )


def _read_manifest(folder: RunFolder) -> dict[str, Any]:
    manifest, facts = folder.read_json("manifest.json"), folder.facts()
    if any(len(row) != len(facts.data.classes) for row in facts.split.histogram):
        raise RunError(f"{folder.path / 'manifest.json'} is damaged: its histogram does not have a column a class")
    made = facts.versions.get("cwfed", "an unknown version")
    if (when := release(made)) is None or when < FIRST_READ:
        raise RunError(f"{folder.path} was made by cwfed {made}, which this version, {__version__}, cannot read")
    if when > THIS:
        raise RunError(f"{folder.path} was made by cwfed {made}, this is {__version__}: read it with that version")
    return manifest


def _check_together(
    folder: RunFolder, config: Config, manifest: dict[str, Any], started: Started, rounds: Sequence[Round]
) -> None:
    """Config, manifest and events must be of one run."""
    facts = [
        (config.algorithm_name, config.run.seed),
        (manifest["algorithm"], manifest["seed"]),
        (started.algorithm, started.seed),
    ]
    # the server of a real federation does not know who holds what
    holders = len(manifest["split"]["histogram"]) or started.clients
    shape = (holders, len(manifest["data"]["classes"]))
    other = manifest.get("experiment", "") not in ("", config.fingerprint)
    if len(set(facts)) > 1 or shape != (started.clients, started.classes) or other:
        raise RunError(f"{folder.path} is mixed up: its config, manifest and events are of different runs")
    last = rounds[-1].round if rounds[-1].stopped else config.train.rounds
    # the number first: what a foreign config says is no length of a list
    is_whole = len(rounds) == last and all(r.round == number for number, r in enumerate(rounds, start=1))
    if not is_whole or last > config.train.rounds:
        raise RunError(f"{folder.path} is damaged: its events do not have the rounds 1 to {last}")


@dataclass(frozen=True)
class LeftOut:
    """A folder that is not in the report, and why."""

    path: Path
    why: str


def folders(paths: Iterable[str | Path]) -> Iterator[Path]:
    """Run folders among and below the given folders, each once; one that lost a file is still one."""
    seen = set()
    for path in map(Path, paths):
        if not path.is_dir():
            raise RunError(f"{path} is not a folder: give a run's folder, or one with run folders below it")
        below = (file.parent for name in RUN_FILES for file in path.rglob(name))
        found = [path] if any((path / name).exists() for name in RUN_FILES) else sorted(set(below))
        if not found:
            raise RunError(f"{path} holds no run of cwfed, nor does a folder below it: cwfed run makes one")
        for folder in found:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def collect(paths: Iterable[str | Path]) -> tuple[list[RunRecord], list[LeftOut]]:
    """All whole runs in these folders, and what was left out."""
    records: list[RunRecord] = []
    left_out: list[LeftOut] = []
    known: dict[str, Path] = {}
    for path in folders(paths):
        try:
            record = read_run(path)
        except CwfedError as error:
            left_out.append(LeftOut(path, _why(path, error)))
            continue
        key = json.dumps([record.settings(), record.started.seed, record.manifest["data"]["digest"]], sort_keys=True)
        if key in known:
            left_out.append(LeftOut(path, f"the same experiment and seed as {known[key]}"))
            continue
        known[key] = path
        records.append(record)
    return records, left_out


def _why(path: Path, error: CwfedError) -> str:
    folder = RunFolder(path)
    if folder.finished:
        return str(error)
    try:
        folder.config()
    except CwfedError as damage:
        return str(damage)
    return f"not finished; {go_on(path)} resumes it"


def go_on(path: Path) -> str:
    """The command that resumes a run."""
    return f"cwfed run --resume --out {shlex.quote(str(path))}"


@dataclass(frozen=True)
class Method:
    """One row of a comparison: the runs of an algorithm with its settings, one a seed."""

    label: str
    records: list[RunRecord]
    row: dict[str, Any] = field(init=False)
    """Mean and standard deviation of what the table shows."""

    def __post_init__(self) -> None:
        summaries = [replace(record.summary, notes=record.notes) for record in self.records]
        object.__setattr__(self, "row", aggregate(self.label, summaries))

    @property
    def first(self) -> RunRecord:
        """The run of the smallest seed."""
        return self.records[0]

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
    """Runs that can be ranked: they differ in algorithm and seed, and in nothing else that decides the results."""

    title: str
    methods: list[Method]

    @property
    def records(self) -> list[RunRecord]:
        """One run of each method: of the split that most methods have, so that clients can be compared."""
        shared = self.aligned()
        return [shared.get(i, method.first) for i, method in enumerate(self.methods)]

    def aligned(self) -> dict[int, RunRecord]:
        """By method, its run on the one split that most methods have: there client 3 is the same client."""
        by_split: dict[str, dict[int, RunRecord]] = {}
        for i, method in enumerate(self.methods):
            for record in method.records:
                by_split.setdefault(record.split, {}).setdefault(i, record)
        return max(by_split.values(), key=len)

    def own_metrics(self) -> list[str]:
        """The users' own that any of the methods was measured by."""
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
        """By client, the points of accuracy it has more under `other` than under `base`; none if they cannot be compared."""
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
    """Runs by algorithm and settings, with labels that tell them apart; seeds of the same belong together."""
    by_settings: dict[str, list[RunRecord]] = {}
    for record in records:
        same = [record.settings(), record.manifest["data"]["digest"]]
        by_settings.setdefault(json.dumps(same, sort_keys=True), []).append(record)
    runs = [sorted(same, key=lambda r: r.started.seed) for same in by_settings.values()]
    return [Method(label, same) for label, same in zip(_labels(runs), runs, strict=True)]


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
    return f"{record.started.dataset}{some}, {data.how_split()}, {record.started.clients} clients, {model}"


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


def _labels(runs: Sequence[Sequence[RunRecord]]) -> list[str]:
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
