"""Reads finished runs for reports: only complete ones, and only from their folders."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cwfed import __version__
from cwfed.core.errors import CwfedError, RunError
from cwfed.core.events import PhaseResult, Portrait, Round, Started
from cwfed.core.files import sha256
from cwfed.core.metrics import is_share
from cwfed.core.types import PHASES, Phase
from cwfed.data import missing_classes
from cwfed.federation.config import FREE_TO_CHANGE, Config
from cwfed.federation.settings import flat
from cwfed.runs import archive
from cwfed.runs.folder import RunFolder
from cwfed.runs.summary import Summary

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
UNITS: dict[Horizontal, str] = {"round": "round", "bytes": "data sent", "seconds": "seconds"}
PHASE_WORDS: dict[Phase, str] = {"received": "as received", "trained": "after local training"}
RUN_FILES = ("config.toml", "events.jsonl")
"""Either makes a folder a run's."""


def is_of_reported_phase(y: Vertical | str) -> bool:
    """Whether a curve shows each method in the phase on which it is reported, which is not the same for all methods."""
    return not y.startswith(PHASES) and y not in ("training loss", "correlation", "distance")


def release(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version: what decides which runs are read, and whose results are the same."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.|$)", version, re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


THIS, FIRST_READ = release(__version__) or (0, 0), (0, 1)
"""Runs from the second to the first are read; those of other releases say so in a note."""


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
    sealed: bool = True
    """Whether all its files say their checksums; those of early versions do not."""

    @property
    def portrait(self) -> Portrait | None:
        """The portrait of the models at the end; None for runs of earlier versions."""
        return self.rounds[-1].portrait

    @property
    def class_names(self) -> list[str]:
        """The names of the classes in the data set."""
        return [str(name) for name in self.manifest["data"]["classes"]]

    @property
    def histogram(self) -> NDArray[np.int64]:
        """Samples of each client by class; empty if only the clients know them."""
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
        """The run's notes; for runs of earlier versions also that no client holds some classes."""
        found = list(self.summary.notes)
        if self.histogram.size:
            about, chosen = self.manifest["data"], self.config.data
            held = int(self.histogram.sum())
            samples = chosen.samples or int(about.get("samples", held))
            found += missing_classes(self.histogram, about["classes"], samples, chosen.room)
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
        """The x of each round: its number, or the bytes or seconds up to its end."""
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

    The summary is computed anew from the events and must be the one that was written. The path may be an archive (`archive`).
    """
    with archive.readable(path) as readable:
        return replace(_read(RunFolder(readable), label), path=Path(path))


def _read(folder: RunFolder, label: str) -> RunRecord:
    summary, happened = folder.result()
    manifest = _read_manifest(folder)
    config = folder.config_of_result()
    started = next(event for event in happened if isinstance(event, Started))
    rounds = [event for event in happened if isinstance(event, Round)]
    _check_together(folder, config, manifest, started, rounds)
    label = label or f"{started.algorithm}, seed {started.seed}"
    return RunRecord(label, folder.path, config, started, rounds, summary, manifest, folder.is_sealed())


def _read_manifest(folder: RunFolder) -> dict[str, Any]:
    manifest, facts = folder.read_json("manifest.json"), folder.facts()
    if any(len(row) != len(facts.data.classes) for row in facts.split.histogram):
        raise RunError(
            f"{folder.path / 'manifest.json'} is damaged: its histogram does not have one column per class"
        )
    made = facts.versions.get("cwfed", "an unknown version")
    if (when := release(made)) is None or when < FIRST_READ:
        raise RunError(f"{folder.path} was made by cwfed {made}, which this version, {__version__}, cannot read")
    if when > THIS:
        raise RunError(f"{folder.path} was made by cwfed {made}, this is {__version__}: read it with that version")
    return manifest


def _check_together(
    folder: RunFolder, config: Config, manifest: dict[str, Any], started: Started, rounds: Sequence[Round]
) -> None:
    """RunError unless config, manifest and events belong to one run."""
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
    """Run folders and archives among and below the given paths, each once; a folder that has lost a file still counts."""
    seen = set()
    for path in map(Path, paths):
        if not path.is_dir() and not archive.is_archive(path):
            raise RunError(
                f"{path} is neither a folder nor an archive: give a run's folder, one with runs below it, or what cwfed export made"
            )
        below = {file.parent for name in RUN_FILES for file in path.rglob(name)}
        below |= set(filter(archive.is_archive, path.rglob(f"*{archive.ENDING}")))
        is_run = archive.is_archive(path) or any((path / name).exists() for name in RUN_FILES)
        found = [path] if is_run else sorted(below)
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
            left_out.append(LeftOut(path, why_left_out(path, error)))
            continue
        key = json.dumps([record.settings(), record.started.seed, record.manifest["data"]["digest"]], sort_keys=True)
        if key in known:
            left_out.append(LeftOut(path, f"the same experiment and seed as {known[key]}"))
            continue
        known[key] = path
        records.append(record)
    return records, left_out


def why_left_out(path: Path, error: CwfedError) -> str:
    """A sentence about what is wrong with a run that cannot be read."""
    folder = RunFolder(path)
    if folder.finished or archive.is_archive(path):
        return str(error)
    try:
        folder.config()
    except CwfedError as damage:
        return str(damage)
    return f"not finished; {go_on(path)} resumes it"


def go_on(path: Path) -> str:
    """The command that resumes a run."""
    return f"cwfed run --resume --out {shlex.quote(str(path))}"
