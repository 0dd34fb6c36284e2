"""The server's side of a federation: a Flower ServerApp that runs a plan and leaves a run folder.

The folder has the metrics, the events and the checkpoints, but no data. The personal models are saved at the clients; but a checkpoint is what
the server makes them from, and anyone who can read it can make them too, so only its owner can read the folder. An interrupted server
continues with the next round when the app is started again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from cwfed.core.errors import CwfedError, RunError
from cwfed.core.events import Event, Newcomers, Note, Round, Started
from cwfed.federation import manifest
from cwfed.federation.config import Config
from cwfed.federation.rounds import FinalModels, Progress, one_compute_thread
from cwfed.federation.simulation import TRIED
from cwfed.flower import logs
from cwfed.flower.plan import Plan, names_in
from cwfed.flower.strategy import PersonalisedStrategy
from cwfed.flower.waits import ask_sooner
from cwfed.runs import session
from cwfed.runs.folder import RunFolder
from cwfed.runs.track import tracking

log = logging.getLogger("cwfed.flower")


class FederatedRun:
    """A federation as a `Runner`, for `session.record`."""

    def __init__(self, strategy: PersonalisedStrategy, grid: Grid) -> None:
        self.strategy, self.grid, self.config = strategy, grid, strategy.config
        self.notes: list[str] = []

    def start(self) -> Progress:
        """Before round 1."""
        return self.strategy.first()

    def started(self) -> Started:
        """The first event. The evaluated clients may change, so every round's result names them."""
        plan, blueprint = self.strategy.plan, self.strategy.blueprint
        return Started(
            algorithm=self.config.algorithm_name,
            dataset="federation",
            seed=self.config.run.seed,
            rounds=self.config.train.rounds,
            clients=plan.clients,
            classes=blueprint.classes,
            parameters=blueprint.parameters,
            phase=self.strategy.algorithm.phase,
            evaluated=[],
            test_samples=[],
            engine="flower",
            pick=self.config.run.pick,
            lower_is_better=blueprint.lower_is_better,
        )

    def manifest(self) -> dict[str, Any]:
        """The circumstances, as far as the server knows them; of the data only what the plan says."""
        plan, blueprint = self.strategy.plan, self.strategy.blueprint
        return manifest.manifest(
            seed=self.config.run.seed,
            algorithm=self.config.algorithm_name,
            model={"name": blueprint.model_name, "parameters": blueprint.parameters},
            data={
                "name": "federation",
                "digest": hashlib.sha256(json.dumps(plan.fingerprint).encode()).hexdigest(),
                "samples": 0,
                "shape": list(plan.shape.dims),
                "vocabulary": plan.shape.vocabulary,
                "classes": plan.federation.class_names or [str(k) for k in range(blueprint.classes)],
            },
            split={"digest": plan.fingerprint, "histogram": []},
            batch_norm=self.config.train.batch_norm,
            engine={"name": "flower", "precision": self.config.train.precision},
            federation=plan.federation.model_dump(),
        )

    def check_progress(self, progress: Progress) -> None:
        """RunError for a state from which the models of a few clients cannot be made."""
        blueprint = self.strategy.blueprint
        try:
            blueprint.try_state(progress.server, range(min(TRIED, blueprint.clients)))
        except Exception as error:  # whatever an algorithm says to a state that is none of its own
            raise RunError(
                f"the checkpoint of round {progress.round} does not fit the federation ({error!r})"
            ) from None

    def rounds(self, progress: Progress) -> Iterator[tuple[Progress, Event]]:
        """Carry out the rounds that are left, over the grid."""
        with one_compute_thread():
            for reached, event in self.strategy.rounds(self.grid, progress):
                yield reached, replace(event, at=logs.now()) if isinstance(event, Note | Round) else event

    def complete(self, progress: Progress) -> Progress:
        """The same: what clients keep stays with them."""
        return progress

    def welcome(self, progress: Progress) -> Newcomers | None:
        """None: clients that join late are members like others."""
        return None

    def final_models(self, progress: Progress) -> FinalModels | None:
        """None: the personal models are at the clients."""
        return None

    def close(self) -> None:
        """Nothing: Flower ends the connections."""


def run_federation(strategy: PersonalisedStrategy, grid: Grid, out: str | Path | None = None) -> Result:
    """Run a plan over a grid, or resume it, and return its metrics for Flower."""
    result = Result()

    def on_event(event: Event) -> None:
        if isinstance(event, Note):
            log.info("%s", event.message)
        elif isinstance(event, Round):
            log.info("%s", sentence(event, strategy.config.train.rounds))
            for client, reason in event.refused.items():
                log.warning("round %d: %s was refused: %s", event.round, called(client), reason)
            for number in event.dropped:
                log.warning("round %d: %s did not answer", event.round, called(number))
            if event.loss is not None:
                result.train_metrics_clientapp[event.round] = MetricRecord({"loss": event.loss})
            accuracies = {
                phase: found.accuracy
                for phase in ("received", "trained")
                if (found := getattr(event, phase)) is not None
            }
            if accuracies:
                result.evaluate_metrics_clientapp[event.round] = MetricRecord(accuracies)

    def called(client: int | str) -> str:
        return f"{strategy.members.names[int(client)]} (client {client})"

    strategy.summary()
    federation = strategy.plan.federation
    folder = RunFolder(Path(out or federation.out).expanduser(), federation.checkpoints)
    run = FederatedRun(strategy, grid)
    every_round = {"run": run.config.run.model_copy(update={"checkpoint_seconds": 0.0})}
    run.config = run.config.model_copy(update=every_round)
    with suppress(OSError):  # if it cannot be made, `locked` raises an error
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    tracked = tracking(names_in(federation.track), folder.path, run.config)
    with folder.locked(), tracked as track:
        if folder.exists:
            _check_folder(folder, strategy.config)
        try:
            session.record(run, folder, on_event, track)
        except OSError as error:
            raise RunError(f"the server's run folder {folder.path} cannot be written: {error}") from error
        except CwfedError as error:
            if folder.exists:
                folder.append(Note(f"the run was broken off: {error}", logs.now()))
            raise
    return result


def _check_folder(folder: RunFolder, config: Config) -> None:
    """RunError unless the run in a folder is the same experiment and has rounds left."""
    folder.check_same(config)
    stored = folder.read_json("summary.json", "rounds") if folder.finished else {"rounds": 0}
    if "stopped" in stored:
        raise RunError(f"{folder.path} holds a finished run, {stored['stopped']}: set federation.out")
    if stored["rounds"] >= config.train.rounds:
        raise RunError(
            f"{folder.path} holds a finished run of {stored['rounds']} rounds: set train.rounds or federation.out"
        )


def sentence(event: Round, rounds: int) -> str:
    """A round as a line of the log."""
    accuracy = ""
    if found := event.received:
        own = [right / n for right, n in zip(found.right, found.samples or [], strict=True) if n]
        accuracy = f", received {found.accuracy:.1%} (median of the clients {median(own):.1%})"
    if event.loss is not None:
        accuracy += f", training loss {event.loss:.4g} (median {median(event.client_loss):.4g})"
    gone = f", {len(event.dropped)} did not answer" if event.dropped else ""
    bad = f", {len(event.refused)} refused" if event.refused else ""
    return f"round {event.round} of {rounds}: {len(event.participants):,} clients{gone}{bad}{accuracy}"


def server_app(plan: Plan | None = None) -> ServerApp:
    """A Flower ServerApp for the plan in its run config (or for this one)."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logs.show()
        ask_sooner()
        try:
            PersonalisedStrategy(plan or Plan.of(context.run_config)).start(grid)
        except CwfedError as error:
            log.error("%s", error)
            raise  # Flower marks the run as failed

    return app
