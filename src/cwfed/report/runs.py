"""Finished runs, read back for reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cwfed import events
from cwfed.errors import RunError
from cwfed.events import PhaseResult, Round, Started
from cwfed.folder import RunFolder
from cwfed.types import Phase


@dataclass(frozen=True)
class RunRecord:
    """What a report knows of a run: only what its folder says."""

    label: str
    path: Path
    started: Started
    rounds: list[Round]
    summary: dict[str, Any]
    manifest: dict[str, Any]

    def curve(self, phase: Phase) -> tuple[list[int], list[float]]:
        """Evaluated rounds and their accuracies."""
        found = [(r.round, getattr(r, phase)) for r in self.rounds]
        known: list[tuple[int, PhaseResult]] = [(number, result) for number, result in found if result]
        return [number for number, _ in known], [result.accuracy for _, result in known]


def read_run(path: str | Path, label: str = "") -> RunRecord:
    """A finished run; RunError for anything else."""
    folder = RunFolder(path)
    summary = folder.read_json("summary.json", "rounds", "per_client")
    happened = events.read(folder.path / "events.jsonl")
    started = next((e for e in happened if isinstance(e, Started)), None)
    rounds = [e for e in happened if isinstance(e, Round)]
    if started is None or not rounds or rounds[-1].round != summary["rounds"]:
        raise RunError(f"{folder.path} is damaged: its events do not match its summary")
    name = label or f"{started.algorithm}, seed {started.seed}"
    return RunRecord(name, folder.path, started, rounds, summary, folder.read_json("manifest.json", "data", "split"))
