"""Lists of run folders, finished or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cwfed.core.errors import ConfigError, CwfedError, did_you_mean
from cwfed.federation.config import current_name, parse_value
from cwfed.federation.settings import flat
from cwfed.report.finished import folders, read_run
from cwfed.report.tables import duration, size
from cwfed.runs.archive import is_archive
from cwfed.runs.folder import RunFolder, on_disk

SORTABLE = ("folder", "accuracy", "rounds", "seconds", "started", "bytes")


@dataclass(frozen=True)
class Listed:
    """One run folder."""

    path: Path
    state: str
    """The state: finished, unfinished or damaged."""
    settings: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0
    accuracy: float | None = None
    seconds: float | None = None
    started: str = ""
    why: str = ""
    """What is wrong with it, if something is."""
    bytes: int = 0
    """Bytes on disk."""

    def cells(self) -> tuple[str, ...]:
        """As text, for a table."""
        return (
            str(self.path),
            str(self.settings.get("data.name", "–")),
            str(self.settings.get("algorithm.name", "–")),
            str(self.settings.get("run.seed", "–")),
            "–" if self.state == "damaged" else f"{self.rounds} of {self.settings['train.rounds']}",
            "–" if self.accuracy is None else f"{self.accuracy:.2%}",
            self.state,
            "–" if self.seconds is None else duration(self.seconds),
            size(self.bytes),
        )

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return dataclasses.asdict(self) | {"path": str(self.path)}


def look(paths: Iterable[Path]) -> list[Listed]:
    """All runs among and below these folders."""
    return [_look(path) for path in folders(paths)]


def _look(path: Path) -> Listed:
    folder, used = RunFolder(path), on_disk(path)
    settings: dict[str, Any] = {}
    try:
        if not is_archive(path):
            settings = flat(folder.config().model_dump())
            if not folder.finished:
                rounds = sum(1 for event in folder.events() if event.kind == "round") if _has_events(path) else 0
                return Listed(path, "unfinished", settings, rounds, bytes=used)
        run = read_run(path)
    except CwfedError as error:
        return Listed(path, "damaged", settings, why=str(error), bytes=used)
    reported, seconds = run.summary.reported.accuracy, run.summary.seconds["total"]
    settings, started = settings or flat(run.config.model_dump()), run.manifest.get("started", "")
    return Listed(path, "finished", settings, run.summary.rounds, reported, seconds, started, bytes=used)


def _has_events(path: Path) -> bool:
    return (path / "events.jsonl").exists()


def select(runs: Sequence[Listed], where: Sequence[str], sort: str) -> list[Listed]:
    """The runs that have all these settings, sorted."""
    known = {key for run in runs for key in run.settings}
    found = list(runs)
    for condition in where:
        key, equals, text = condition.partition("=")
        key = current_name(key)
        if not equals:
            raise ConfigError(f"--where {condition!r} must look like section.key=value")
        if key != "state" and key not in known:
            raise ConfigError(f"--where {condition!r}: no run has that setting, {did_you_mean(key, known)}")
        value = parse_value(text)
        found = [run for run in found if (run.state if key == "state" else run.settings.get(key)) == value]
    if sort not in SORTABLE and sort not in known:
        raise ConfigError(f"--sort {sort!r}: {did_you_mean(sort, (*SORTABLE, *known))}")

    def position(run: Listed) -> tuple[bool, bool, Any]:
        value: Any = run.settings.get(sort)
        if sort in SORTABLE:
            value = str(run.path) if sort == "folder" else getattr(run, sort)
        if sort == "accuracy" and value is not None:
            value = -value  # the best first
        is_number = isinstance(value, int | float)
        return value is None, not is_number, value if is_number else str(value)

    return sorted(found, key=position)


def differing(runs: Sequence[Listed]) -> list[str]:
    """For each run, the settings in which it differs from the others, besides those that every list shows."""
    shown = {"data.name", "algorithm.name", "run.seed", "train.rounds"}
    texts = []
    for run in runs:
        name = run.settings.get("algorithm.name")
        namesakes = [other for other in runs if other.settings.get("algorithm.name") == name]
        keys = [
            key
            for key, value in run.settings.items()
            if key not in shown
            and any(
                other.settings.get(key) != value for other in (namesakes if key.startswith("algorithm.") else runs)
            )
        ]
        texts.append(", ".join(f"{key.partition('.')[2]}={run.settings[key]}" for key in keys))
    return texts
