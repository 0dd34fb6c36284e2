"""One process of either program, cwfed or PFLlib: carried out, and what it printed read."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cwfed.benchmark import measured
from cwfed.core.errors import RunError
from cwfed.core.events import Round
from cwfed.federation.config import Config
from cwfed.runs.folder import RunFolder

WRITTEN_FOR = "d832e76 of November 2025"
"""The commit of PFLlib with which this was tried."""


@dataclass(frozen=True)
class Run:
    """What one process took, and how good its models were."""

    seconds: list[float]
    """Seconds of each round but the first."""
    accuracy: float
    """Accuracy after the last round."""
    peak_memory_bytes: int
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def round(self) -> float:
        """Seconds of a round."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        return f"{self.round:.3g} s a round, {self.peak_memory_bytes / 1e6:,.0f} MB, {self.accuracy:.2%}"


@dataclass(frozen=True)
class Expected:
    """What a run of PFLlib must have printed."""

    evaluates: str
    rounds: int
    layers: list[str]


def run_ours(config: Config, folder: Path, log: Path, data_dir: str | None) -> Run:
    """`cwfed run` with this config."""
    file = folder.with_suffix(".toml")
    file.write_text(config.to_toml())
    command = [sys.executable, "-m", "cwfed", "run", str(file), "--out", str(folder), "--quiet", "--json"]
    _, peak = _carry_out(command + (["--data-dir", data_dir] if data_dir else []), log, "our own run")
    run = RunFolder(folder)
    summary, events = run.result()
    accuracy = summary.accuracy.of(summary.reported.phase).last
    assert accuracy is not None, "the last round is always evaluated"
    seconds = [sum(event.seconds.values()) for event in events if isinstance(event, Round)]
    return Run(seconds[1:], accuracy, peak, {"engine": run.facts().engine.name})


def run_theirs(
    command: list[str], where: Path, log: Path, expected: Expected, tell: Callable[[str], None] = lambda _: None
) -> Run:
    """PFLlib's main.py with these flags; RunError if it does not print what is expected."""
    lines, peak = _carry_out(command, log, "PFLlib", where, tell)
    changed = f"this was written for commit {WRITTEN_FOR}, and all it printed is in {log}"
    seconds: list[float] = []
    accuracies: list[float] = []
    layers: list[str] = []
    evaluated = ""
    for line in lines:
        if found := re.match(r"Evaluate (\w+) model", line):
            evaluated = found[1]
        elif found := re.match(r"Averaged Test Accuracy: ([\d.]+)$", line):
            accuracies += [float(found[1])] if evaluated == expected.evaluates else []
        elif found := re.match(r"-+ time cost -+ ([\d.e+-]+)$", line):
            seconds.append(float(found[1]))
        elif found := re.search(r"\b(?:Conv2d|Linear)\(.*\)$", line):
            layers.append(found[0])
    if not len(seconds) == len(accuracies) == expected.rounds + 1:
        raise RunError(
            f"PFLlib has changed: it printed the times of {len(seconds)} rounds and {len(accuracies)} accuracies of "
            f"{expected.evaluates} models where {expected.rounds + 1} were expected; {changed}"
        )
    if layers != expected.layers:
        raise RunError(f"PFLlib has changed: its CNN has other layers than ours; {changed}")
    return Run(seconds[1:], accuracies[-1], peak, {"accuracies": accuracies})


def _carry_out(
    command: list[str], log: Path, who: str, where: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> tuple[list[str], int]:
    """The lines that a process prints, which also go into a log, and its peak memory; `tell` is called with the heading of each round."""
    lines = []
    with (
        log.open("w", buffering=1) as kept,  # so that it can be watched
        subprocess.Popen(
            [sys.executable, "-I", "-S", measured.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            cwd=where,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,  # Ctrl-C reaches this process only; the other ends when its input is closed
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for line in process.stdout:
                kept.write(line)
                lines.append(line.strip())
                if found := re.match(r"-+(Round number: \d+)-+$", lines[-1]):
                    tell(found[1])
        finally:
            process.stdin.close()
    try:
        needed = json.loads(lines[-1])
    except (ValueError, IndexError):
        raise RunError(f"{who} was killed; all it printed is in {log}") from None
    if needed["exit_code"]:
        raise RunError(_why(lines[:-1], log, who, command[0]))
    return lines[:-1], needed["peak_memory_bytes"]


def _why(lines: list[str], log: Path, who: str, python: str) -> str:
    """Why a process failed, from the last line that it printed."""
    last = next((line for line in reversed(lines) if line), "it said nothing")
    if found := re.search(r"No module named '([\w.]+)'", last):
        return (
            f"{who} needs the package {found[1]}, which {python} does not have: install it there, or name the Python that has what "
            "PFLlib needs: --python PATH"
        )
    return f"{who} has failed: {last.removeprefix('error: ')}; all it printed is in {log}"
