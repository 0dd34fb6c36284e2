"""What carries an experiment out: the simulator, or a federation. `session.py` records either in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from cwfed.core.events import Event, Newcomers, Started
from cwfed.federation.config import Config
from cwfed.federation.rounds import FinalModels, Progress
from cwfed.runs.result import Result


class Runner(Protocol):
    """Carries an experiment out."""

    config: Config
    notes: list[str]
    """What the user should know before the first round."""

    def start(self) -> Progress:
        """Before round 1."""

    def started(self) -> Started:
        """The first event of the run."""

    def manifest(self) -> dict[str, Any]:
        """Under what circumstances the run is made."""

    def check_progress(self, progress: Progress) -> None:
        """RunError for progress that cannot be continued from."""

    def rounds(self, progress: Progress) -> Iterator[tuple[Progress, Event]]:
        """Carry out the rounds that are left; yields the progress with every event."""

    def complete(self, progress: Progress) -> Progress:
        """Progress with everything that the clients keep, if it is available here; their models are made from it."""

    def welcome(self, progress: Progress) -> Newcomers | None:
        """Measure the models of clients that never took part; the progress is complete."""

    def final_models(self, progress: Progress) -> FinalModels | None:
        """Every client's personal model, from complete progress; None if only the clients have them."""

    def close(self) -> None:
        """End workers and free the data."""


Backend = Callable[[Config, Path | None, Callable[[Runner], Result]], Result]
"""Makes the runner for a config and a run folder (None: in memory), and gives it to a function that carries the run out."""
